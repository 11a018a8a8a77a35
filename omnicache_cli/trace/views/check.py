"""`show RUN --check`: every invariant over every step."""

from typing import Any

from omnicache_cli.errors import EXIT_DIFFERS, EXIT_DONE, BadInputError
from omnicache_cli.report.model import Cell, Lines, Report, Section, Table
from omnicache_cli.trace.invariants import (
    INVARIANTS,
    ONLY_WHERE_ASKED,
    UNITS,
    Coverage,
    InvariantChecker,
    Violation,
)
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.views.view import View, of_engine, steps_of
from omnicache_cli.trace.views.words import counted

TEXT_VIOLATIONS = 20
JSON_VIOLATIONS = 10_000
"""Violations listed one by one; all are counted."""


def show_check(run: Run, engine: str | None) -> View:
    """BadInputError: nothing in the run could be checked."""
    checker = InvariantChecker()
    found: list[Violation] = []
    for step in steps_of(run, engine):
        violations = checker.check(step)
        found += violations[: JSON_VIOLATIONS - len(found)]
    if not checker.num_checked:
        reasons = ", ".join(checker.unchecked()) or "no step was recorded"
        raise BadInputError(f"{run.folder}: nothing could be checked: {reasons}")
    broken = checker.num_broken
    steps = counted(checker.num_steps, "step")
    verdict = f"{broken:,} broken" if broken else "all hold"
    sections: list[Section] = [_coverage_table(checker)]
    unchecked = _unchecked_lines(checker, run)
    if unchecked:
        sections.append(Lines("Not checked", unchecked))
    if found:
        sections += [_violation_lines(run, found)]
        if broken > TEXT_VIOLATIONS:
            more = broken - TEXT_VIOLATIONS
            sections.append(Lines("", [f"… and {more:,} more; --format json for all"]))
    report = Report(
        "show",
        f"Invariants of {steps}: {verdict}",
        {"run": str(run.folder), **_data(checker, found)},
        tuple(sections),
        run.vllm_version,
    )
    hint = of_engine(run, f"--step {found[0].step}", found[0].engine) if found else "--summary"
    return View(report, hint, EXIT_DIFFERS if broken else EXIT_DONE)


def _listed(checker: InvariantChecker) -> dict[int, Coverage]:
    """What is about several ranks is no question for a run on one, and so on."""
    return {
        number: one
        for number, one in checker.coverage.items()
        if number not in ONLY_WHERE_ASKED or one.checked or one.unchecked
    }


def _coverage_table(checker: InvariantChecker) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (number, INVARIANTS[number], one.checked, UNITS[number], one.broken)
        for number, one in _listed(checker).items()
    ]
    return Table("", ("no.", "invariant", "checked", "", "broken"), rows)


def _unchecked_lines(checker: InvariantChecker, run: Run) -> list[str]:
    lines = [
        f"{number}: {count:,} {UNITS[number]}: {reason}"
        for number, one in checker.coverage.items()
        for reason, count in one.unchecked.items()
    ]
    if run.dropped:
        lines.append(f"{run.dropped:,} records could not be written")
    if run.unjoined_forwards:
        lines.append(f"{run.unjoined_forwards:,} forward passes belong to no recorded step")
    lines += [
        f"{file.path.name} has no end record: what its process did later is not there"
        for file in run.files
        if file.end is None
    ]
    return lines


def _violation_lines(run: Run, found: list[Violation]) -> Lines:
    lines = []
    for one in found[:TEXT_VIOLATIONS]:
        where = [f"engine {one.engine}"] if len(run.engines) > 1 else []
        where += [f"step {one.step}"]
        where += [f"rank {one.rank}"] if one.rank is not None else []
        where += [f"group {one.group}"] if one.group is not None else []
        where += [f"request {one.request}"] if one.request is not None else []
        where += [f"row {one.row}"] if one.row is not None else []
        lines.append(f"{one.invariant}: {one.name}: {', '.join(where)}")
        lines.append(f"   {one.what}")
        lines.append(f"   expected {one.expected}")
        lines.append(f"   found    {one.found}")
    return Lines("Broken", lines)


def _data(checker: InvariantChecker, found: list[Violation]) -> dict[str, Any]:
    return {
        "num_steps": checker.num_steps,
        "broken": checker.num_broken,
        "listed": len(found),
        "invariants": [
            {
                "invariant": number,
                "name": INVARIANTS[number],
                "unit": UNITS[number],
                "checked": one.checked,
                "broken": one.broken,
                "not_checked": dict(one.unchecked),
            }
            for number, one in _listed(checker).items()
        ],
        "violations": [
            {
                "invariant": one.invariant,
                "name": one.name,
                "engine": one.engine,
                "step": one.step,
                "rank": one.rank,
                "group": one.group,
                "request": one.request,
                "row": one.row,
                "what": one.what,
                "expected": one.expected,
                "found": one.found,
            }
            for one in found
        ],
    }
