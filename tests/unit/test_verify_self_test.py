"""The self-test of `verify`, on a session that is easily damaged.

Stands beside `tests/engine/test_verify_self_test.py`, which damages a real engine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

torch = pytest.importorskip("torch", reason="rows are torch tensors")

from omnicache_cli.verify.faults import Fault  # noqa: E402
from omnicache_cli.verify.results import Pair, Verdict  # noqa: E402
from omnicache_cli.verify.runs import Delivered  # noqa: E402
from omnicache_cli.verify.scenarios import ModelFacts  # noqa: E402
from omnicache_cli.verify.selftest import PLANTS, SelfTest, add_session  # noqa: E402
from omnicache_cli.verify.selftest_report import (  # noqa: E402
    self_test_exit_code,
    self_test_line,
    self_test_report,
)
from tests.unit.fake_session import KEYS, FakeSession, change_rows  # noqa: E402

Damage = Callable[[Delivered], Delivered]


def pair_called(fault: Fault) -> Pair:
    return Pair("repeat", "hit-0", KEYS[0], Verdict.CORRUPTION, "", 12, 3, fault=fault)


def zero_block(piece: Delivered) -> Delivered:
    return change_rows(piece, KEYS[-1], lambda rows: torch.cat([torch.zeros(4, 8), rows[4:]]))


def skipped_key(piece: Delivered) -> Delivered:
    return change_rows(piece, KEYS[-1], lambda rows: rows[12:])


@dataclass
class PlantingFake(FakeSession):
    damages: tuple[tuple[str, Damage], ...] = ()

    def facts(self) -> ModelFacts:
        return ModelFacts(4, 100, 200, count_tokens=len, image_placeholder=None)

    def why_not_planted(self, name: str) -> str | None:
        return None if name in dict(self.damages) else "no such fault here"

    @contextmanager
    def planted(self, name: str) -> Iterator[None]:
        change = dict(self.damages)[name]
        self.damage = lambda piece: change(piece) if piece.hit_tokens else piece
        yield
        self.damage = lambda piece: piece


def outcome_of(*damages: tuple[str, Damage], session: PlantingFake | None = None) -> SelfTest:
    test = SelfTest()
    add_session(test, session or PlantingFake(damages=damages), "fake")
    return test


def test_what_is_caught_and_named_passes() -> None:
    test = outcome_of(("zero-block", zero_block), ("skipped-key", skipped_key))
    assert [(one.plant.name, one.faults, one.is_named) for one in test.planted] == [
        ("zero-block", (Fault.ZERO,), True),
        ("skipped-key", (Fault.NEVER_CACHED,), True),
    ]
    assert test.planted[0].diagnosis == "zero rows 0 .. 3 of key layers.0"
    assert test.is_passed
    assert self_test_exit_code(test) == 0
    assert self_test_line(test) == (
        "self-test: passed: 2 faults planted, 2 caught, 2 named; 0 false alarms in "
        f"{test.num_clean_pairs} clean pairs"
    )
    assert test.num_clean_pairs > 100


def test_what_is_missed_or_has_another_name_fails() -> None:
    test = outcome_of(("zero-block", lambda piece: piece), ("short-prefix", skipped_key))
    found = [(one.plant.name, one.is_caught, one.is_named) for one in test.planted]
    assert found == [("short-prefix", True, False), ("zero-block", False, False)]
    assert not test.is_passed
    assert self_test_exit_code(test) == 1
    report = self_test_report(test, {"model": "fake"}, vllm_version=None)
    lines = [line for section in report.sections for line in getattr(section, "lines", ())]
    assert lines[:2] == [
        "short-prefix, fake: called key never cached: key layers.0 has no cached rows: 5 rows "
        "instead of 17",
        "zero-block, fake: not caught; repeat hit 12 tokens",
    ]
    data = {one["name"]: one for one in report.result["faults"]}
    assert (data["zero-block"]["planted"], data["zero-block"]["caught"]) == (True, False)
    assert data["short-prefix"]["named_as"] == ["key never cached"]
    assert data["weak-hash"]["why_not_planted"] == "no such fault here"


def test_an_alarm_without_a_fault_fails() -> None:
    test = SelfTest()
    session = PlantingFake(damages=(("zero-block", zero_block),), damage=zero_block)
    add_session(test, session, "fake", plants=())
    assert {one.fault for one in test.false_alarms} == {Fault.ZERO}
    assert not test.is_passed
    assert self_test_exit_code(test) == 1


def test_nothing_verified_is_no_pass() -> None:
    test = outcome_of(session=PlantingFake(caching=False))
    assert {one.scenario for one in test.nothing_verified} >= {"repeat", "decode"}
    assert (test.is_passed, self_test_exit_code(test)) == (False, 3)


def test_a_consequence_is_no_other_name() -> None:
    plant = next(one for one in PLANTS if one.name == "weak-hash")
    test = outcome_of(("weak-hash", lambda piece: piece))
    (trial,) = test.planted
    assert not trial.is_caught
    pair = pair_called(Fault.OUTPUT)
    assert not replace(trial, found=(pair,)).is_named
    assert replace(trial, found=(pair, pair_called(plant.fault))).is_named
    assert not replace(trial, found=(pair_called(plant.fault), pair_called(Fault.STALE))).is_named


def test_every_fault_has_a_plant() -> None:
    """All names that `verify` gives, but for what a cache says itself, what it cannot name and
    what follows from another one; adapters are mixed in tests/engine."""
    names = {one.fault for one in PLANTS}
    assert set(Fault) - names == {
        *(Fault.REFUSED, Fault.UNKNOWN, Fault.OUTPUT, Fault.OTHER_ADAPTER),
    }
    assert len({one.name for one in PLANTS}) == len(PLANTS)


def test_plants_are_the_ones_an_engine_knows() -> None:
    from omnicache_cli.engine.verify.plants import FAULTS

    assert list(FAULTS) == [one.name for one in PLANTS]
