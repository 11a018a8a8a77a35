"""omnicache.toml: rules of one's own."""

import os
import stat
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.monitor.rules import SEVERITIES, Rule, parse_conditions

FILE = Path("omnicache.toml")
MAX_BYTES = 1 << 20
KEYS = {"name", "when", "severity", "reason", "causes", "next"}


def rules_of(defaults: list[Rule], path: Path | None, fail_on: list[str]) -> list[Rule]:
    """The rules that count: the defaults, those of the file over them, those asked for.

    `path`: None for omnicache.toml of this folder, where there is one.
    """
    rules = {rule.name: rule for rule in defaults}
    if path is not None or FILE.is_file():
        _add_file(rules, path or FILE)
    for text in fail_on:
        rules[text] = Rule(
            text, text, parse_conditions(text), reason="asked for", must_be_judged=True
        )
    return list(rules.values())


def _add_file(rules: dict[str, Rule], path: Path) -> None:
    table = _table(path)
    if unknown := table.keys() - {"rule", "off"}:
        raise BadInputError(f"{path}: [monitor] has no {min(unknown)!r}; it has rule and off")
    off = table.get("off", [])
    if not isinstance(off, list) or not all(isinstance(one, str) for one in off):
        raise BadInputError(f"{path}: [monitor] off is a list of names of rules")
    for name in off:
        if name not in rules:
            raise BadInputError(
                f"{path}: off names {name!r}, which is no rule; rules: {', '.join(rules)}"
            )
        del rules[name]
    entries = table.get("rule", [])
    if not isinstance(entries, list):
        raise BadInputError(f"{path}: write each rule under a line [[monitor.rule]]")
    for number, entry in enumerate(entries, start=1):
        rule = _rule(entry, f"{path}: rule {number}")
        former = rules.get(rule.name)
        if former is not None and rule.reason == "":
            rule = replace(rule, reason=former.reason)
        rules[rule.name] = rule


def _table(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(_text(path))
    except RecursionError:
        raise BadInputError(f"{path} is nested too deeply for rules; mend it") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of more digits than Python reads
        raise BadInputError(f"{path} is no TOML: {error}; mend it, or move it away") from None
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}; name another file") from None
    table = content.get("monitor", {})
    if not isinstance(table, dict):
        raise BadInputError(f"{path}: monitor is a table; write [[monitor.rule]]")
    return table


def _text(path: Path) -> str:
    """Neither a device, which may have no end, nor a FIFO, which may wait for ever."""
    with open(path, "rb", opener=_without_waiting) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise BadInputError(f"{path} is no regular file; name one with rules")
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise BadInputError(f"{path} is over a megabyte; is it the right file?")
    return content.decode("utf-8")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, dict):
        raise BadInputError(f"{where} is no table; write it under a line [[monitor.rule]]")
    if unknown := entry.keys() - KEYS:
        raise BadInputError(f"{where} has no {min(unknown)!r}; it has {', '.join(sorted(KEYS))}")
    for key in ("name", "when", "severity", "reason"):
        if not isinstance(entry.get(key, ""), str):
            raise BadInputError(f"{where}: {key} is text in quotes")
    if not entry.get("when"):
        raise BadInputError(f'{where} has no when; write when = "kv_cache_hit_rate < 85%"')
    severity = entry.get("severity", "warning")
    if severity not in SEVERITIES:
        raise BadInputError(f"{where}: severity is one of {', '.join(SEVERITIES)}")
    try:
        conditions = parse_conditions(entry["when"])
    except UsageError as error:
        raise BadInputError(f"{where}: {error}") from None
    return Rule(
        entry.get("name") or entry["when"],
        entry["when"],
        conditions,
        severity,
        entry.get("reason", ""),
        _texts(entry, "causes", where),
        _texts(entry, "next", where),
    )


def _texts(entry: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise BadInputError(f"{where}: {key} is a list of texts")
    return tuple(texts)
