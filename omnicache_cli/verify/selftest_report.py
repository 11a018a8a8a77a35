"""A self-test as a Report."""

from typing import Any

from omnicache_cli.errors import EXIT_BAD_INPUT, EXIT_DIFFERS, EXIT_DONE
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.verify.report import pair_data
from omnicache_cli.verify.results import Pair
from omnicache_cli.verify.selftest import PLANTS, Plant, SelfTest, Trial


def self_test_report(test: SelfTest, facts: dict[str, Cell], *, vllm_version: str | None) -> Report:
    """`facts`: what was run on what, in the order in which it is to be read."""
    sections: list[Section] = [Facts("", facts), _table(test)]
    for title, lines in (
        ("Not found", [line for one in test.planted for line in _failure(one)]),
        ("False alarms", [_pair_line(one) for one in test.false_alarms]),
        ("Nothing verified", [_pair_line(one) for one in test.nothing_verified]),
        (
            "Not planted",
            [
                f"{one.plant.name}, {one.session}: {one.not_planted}"
                for one in test.trials
                if one.not_planted is not None
            ],
        ),
    ):
        if lines:
            sections.append(Lines(title, lines))
    sections.append(Lines("", [self_test_line(test)]))
    data = {
        **{name.replace(" ", "_"): value for name, value in facts.items()},
        "passed": test.is_passed,
        "faults": [_trial_data(one) for one in test.trials],
        "num_clean_pairs": test.num_clean_pairs,
        "false_alarms": [pair_data(one) for one in test.false_alarms],
        "nothing_verified": [pair_data(one) for one in test.nothing_verified],
    }
    title = f"Self-test of verify: {_outcome(test)}"
    return Report("verify", title, data, tuple(sections), vllm_version)


def self_test_line(test: SelfTest) -> str:
    """One line that says it all, the last of the report."""
    planted = test.planted
    caught = sum(one.is_caught for one in planted)
    named = sum(one.is_named for one in planted)
    return (
        f"self-test: {_outcome(test)}: {len(planted)} faults planted, {caught} caught, {named} "
        f"named; {len(test.false_alarms)} false alarms in "
        f"{test.num_clean_pairs + len(test.false_alarms)} clean pairs"
    )


def self_test_exit_code(test: SelfTest) -> int:
    if test.is_passed:
        return EXIT_DONE
    ran = bool(test.planted) and not test.nothing_verified
    return EXIT_DIFFERS if ran or test.false_alarms else EXIT_BAD_INPUT


def _outcome(test: SelfTest) -> str:
    return "passed" if test.is_passed else "failed"


def _table(test: SelfTest) -> Table:
    columns = ("planted", "into", "must be called", "times", "caught", "named")
    rows: list[tuple[Cell, ...]] = []
    for plant in PLANTS:
        trials = [one for one in test.planted if one.plant is plant]
        counts = (
            len(trials),
            sum(one.is_caught for one in trials),
            sum(one.is_named for one in trials),
        )
        rows.append((plant.name, plant.into, str(plant.fault), *counts))
    return Table("Faults", columns, rows)


def _failure(one: Trial) -> list[str]:
    if one.is_caught and one.is_named:
        return []
    where = f"{one.plant.name}, {one.session}"
    if not one.is_caught:
        return [f"{where}: not caught; {one.plant.scenario} hit {one.hit_tokens} tokens"]
    names = ", ".join(one.faults)
    return [f"{where}: called {names}: {one.diagnosis}"]


def _pair_line(one: Pair) -> str:
    return f"{one.scenario}, {one.request}, {one.key}: {one.fault or one.verdict}: {one.diagnosis}"


def _trial_data(one: Trial) -> dict[str, Any]:
    return {
        **_plant_data(one.plant),
        "session": one.session,
        "planted": one.not_planted is None,
        "why_not_planted": one.not_planted,
        "caught": one.is_caught,
        "named": one.is_named,
        "named_as": list(one.faults),
        "diagnosis": one.diagnosis,
        "hit_tokens": one.hit_tokens,
    }


def _plant_data(plant: Plant) -> dict[str, Any]:
    return {
        "name": plant.name,
        "into": plant.into,
        "what": plant.what,
        "scenario": plant.scenario,
        "must_be_called": plant.fault,
        "like": plant.like or None,
    }
