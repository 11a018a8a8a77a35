"""Tells what was found: for people, and as JSON that can go into a bug report as it is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from omnicache_cli.doctor.check import Check
from omnicache_cli.doctor.commands import Judged
from omnicache_cli.doctor.facts import Facts
from omnicache_cli.report.model import Lines, Report, Table


def report_of(
    facts: Facts,
    checks: Sequence[Check],
    judged: Sequence[Judged],
    hide: Sequence[tuple[str, str]] = (),
) -> Report:
    """`hide`: texts that must not be passed on, such as a host's name, and what stands for each."""
    cleaned = _cleaner(hide)
    mends = _mends(checks, judged)
    sections = (
        Table(
            "Commands",
            ("command", "verdict", "because"),
            [(one.command, one.verdict, cleaned("; ".join(one.because)) or None) for one in judged],
        ),
        Table(
            "Environment",
            ("what", "state", "found"),
            [(one.name, one.state, cleaned(one.found)) for one in checks],
        ),
        Lines("What mends it", [cleaned(line) for line in mends])
        if mends
        else Lines("", ["Nothing is to be mended."]),
    )
    result = {
        "is_deep": facts.is_deep,
        "commands": [
            {
                "command": one.command,
                "verdict": one.verdict,
                "because": list(one.because),
                "mends": list(one.mends),
            }
            for one in judged
        ],
        "checks": [asdict(one) for one in checks],
        "facts": _facts(facts),
    }
    return Report("doctor", _title(judged), _clean(result, cleaned), sections)


def _mends(checks: Sequence[Check], judged: Sequence[Judged]) -> list[str]:
    """What is wrong in the way of a comment, and under it the line to type; each line once."""
    asked = {mend for one in judged for mend in one.mends}
    names: dict[str, list[str]] = {}
    for check in checks:
        if check.mend in asked or (check.mend and check.state == "limits"):
            names.setdefault(check.mend, []).append(check.name)
    return [line for mend, those in names.items() for line in (f"# {', '.join(those)}", mend)]


def works(judged: Sequence[Judged]) -> bool:
    return all(one.verdict != "does not work" for one in judged)


def _title(judged: Sequence[Judged]) -> str:
    if len(judged) == 1:
        return f"Doctor: {judged[0].command} {judged[0].verdict} here"
    total = len(judged)
    stopped = sum(one.verdict == "does not work" for one in judged)
    limited = sum(one.verdict == "works with limits" for one in judged)
    if stopped:
        return f"Doctor: {stopped} of {total} commands {_do(stopped)} not work here"
    if limited:
        return f"Doctor: {total} of {total} commands work here, {limited} with limits"
    return f"Doctor: {total} of {total} commands work here"


def _do(count: int) -> str:
    return "does" if count == 1 else "do"


def _facts(facts: Facts) -> dict[str, Any]:
    """Plain values; sets as sorted lists, and of the CPU's flags those that decide something."""
    values = asdict(facts)
    values["python"] = ".".join(map(str, facts.python))
    values["cpu"]["allowed"] = sorted(facts.cpu.allowed)
    values["cpu"]["flags"] = sorted(one for one in facts.cpu.flags if one.startswith(_DECIDING))
    values["seconds"] = round(facts.seconds, 1)
    return values


_DECIDING = ("amx", "avx", "sve", "asimd")


def _cleaner(hide: Sequence[tuple[str, str]]) -> Callable[[str], str]:
    def clean(text: str) -> str:
        for old, new in hide:
            text = text.replace(old, new)
        return text

    return clean


def _clean(value: Any, cleaned: Callable[[str], str]) -> Any:
    match value:
        case str():
            return cleaned(value)
        case Mapping():
            return {name: _clean(one, cleaned) for name, one in value.items()}
        case list() | tuple():
            return [_clean(one, cleaned) for one in value]
        case _:
            return value
