"""Corruption gets its name: every class of wrong rows, and where they came from."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="rows are torch tensors")

from torch import Tensor  # noqa: E402

from omnicache_cli.verify.faults import (  # noqa: E402
    PADDING_REQUEST,
    Evidence,
    Fault,
    Named,
    RowIndex,
    name_fault,
    spans,
)
from omnicache_cli.verify.results import Pair, Verdict  # noqa: E402
from omnicache_cli.verify.run import verify  # noqa: E402
from omnicache_cli.verify.runs import Computed, Delivered  # noqa: E402
from omnicache_cli.verify.scenarios import ModelFacts, choose  # noqa: E402
from tests.unit.fake_session import FakeSession, change_rows  # noqa: E402

FACTS = ModelFacts(4, 100, 200, count_tokens=len, image_placeholder=None)
KEY = "layers.0"


def judged(damage: Callable[[Delivered], Delivered], scenario: str = "repeat") -> Pair:
    """The pair of hit-0 under the damaged key. `repeat`: 14 tokens, 12 of them hit, 17 rows."""
    session = FakeSession(damage=lambda piece: damage(piece) if piece.hit_tokens else piece)
    result = verify(session, choose(FACTS, [scenario], (), 4))
    others = [one for one in result.pairs if (one.request, one.key) != ("hit-0", KEY)]
    assert {one.verdict for one in others if one.key != KEY} == {Verdict.EQUAL}
    (pair,) = (one for one in result.pairs if (one.request, one.key) == ("hit-0", KEY))
    assert pair.verdict is Verdict.CORRUPTION
    return pair


def blocks_swapped(rows: Tensor) -> Tensor:
    return torch.cat([rows[4:8], rows[:4], rows[8:]])


def taken_from_the_front(rows: Tensor) -> Tensor:
    return torch.cat([rows[:12], rows[:5]])


def zero_block(rows: Tensor) -> Tensor:
    rows[4:8] = 0
    return rows


@pytest.mark.parametrize(
    ("change", "fault", "diagnosis"),
    [
        (
            lambda rows: torch.cat([rows[:8], rows[10:]]),
            Fault.SHORT_PREFIX,
            "15 rows instead of 17: rows 8 .. 9 are missing, what follows is shifted by 2",
        ),
        (
            lambda rows: torch.cat([rows[:11], rows[12:]]),
            Fault.SHORT_PREFIX,
            "16 rows instead of 17: row 11 is missing, what follows is shifted by 1",
        ),
        (
            lambda rows: rows[:-1],
            Fault.SHORT_PREFIX,
            "16 rows instead of 17: row 16 is missing",
        ),
        (
            lambda rows: rows[:0],
            Fault.SHORT_PREFIX,
            "0 rows instead of 17: rows 0 .. 16 are missing",
        ),
        (lambda rows: rows.roll(1, 0), Fault.SHIFTED, "rows 0 .. 16 are shifted: those 1 before"),
        (
            lambda rows: rows.roll(-3, 0),
            Fault.SHIFTED,
            "rows 0 .. 16 are shifted: those 3 further on",
        ),
        (
            blocks_swapped,
            Fault.OTHER_BLOCK,
            "rows 0 .. 7 are of other blocks: block 0 has those of 1, block 1 has those of 0",
        ),
        (
            lambda rows: torch.cat([rows[4:8], rows[4:]]),
            Fault.OTHER_BLOCK,
            "rows 0 .. 3 are of block 1, not of block 0",
        ),
        (zero_block, Fault.ZERO, "zero rows 4 .. 7 of key layers.0"),
        (torch.zeros_like, Fault.ZERO, "zero rows 0 .. 16 of key layers.0"),
        (
            lambda rows: rows[12:],
            Fault.NEVER_CACHED,
            "key layers.0 has no cached rows: 5 rows instead of 17",
        ),
        (
            taken_from_the_front,
            Fault.OFFSET,
            "rows 12 .. 16 are those of positions 0 .. 4: they were taken as if nothing had hit",
        ),
        (
            lambda rows: rows.double(),
            Fault.KIND,
            "rows of (8,) torch.float64 came back, the model computed (8,) torch.float32",
        ),
        (
            lambda rows: rows[:, :4],
            Fault.KIND,
            "rows of (4,) torch.float32 came back, the model computed (8,) torch.float32",
        ),
    ],
)
def test_a_fault_has_its_name(
    change: Callable[[Tensor], Tensor], fault: Fault, diagnosis: str
) -> None:
    pair = judged(lambda piece: change_rows(piece, KEY, change))
    assert (pair.fault, pair.diagnosis) == (fault, diagnosis)


def test_rows_of_another_request_name_it() -> None:
    kept: dict[str, Tensor] = {}

    def damage(piece: Delivered) -> Delivered:
        kept[piece.request] = piece.rows[KEY].clone()
        if piece.request != "hit-0":
            return piece
        return change_rows(piece, KEY, lambda rows: torch.cat([kept["write-1"][4:8], rows[4:]]))

    session = FakeSession(damage=damage)
    result = verify(session, choose(FACTS, ["inside-block"], (), 4))
    (pair,) = (one for one in result.pairs if (one.request, one.key) == ("hit-0", KEY))
    assert (pair.fault, pair.diagnosis) == (
        Fault.OTHER_REQUEST,
        "rows 0 .. 3 are those of write-1, from position 4 on",
    )


def test_a_false_hit_names_the_request_with_other_tokens() -> None:
    """A hash that ignores the block's last token: what is restored was written for other tokens."""

    class ForgetfulSession(FakeSession):
        def _serve(self, run: Any, name: str, prompt: list[int], max_tokens: int) -> None:
            for tokens, block in list(self._cached.items()):
                if name == "hit-0" and len(tokens) == 4 and tokens[:3] == tuple(prompt[:3]):
                    self._cached[tuple(prompt[:4])] = block
            super()._serve(run, name, prompt, max_tokens)

    from omnicache_cli.trace.workload import Prompt
    from omnicache_cli.verify.scenarios import Scenario

    donor, hitter = (Prompt(None, [7, 8, 9, last, 1, 2]) for last in (3, 4))
    result = verify(ForgetfulSession(), [Scenario("near", "", (donor,), (hitter,))])
    (pair,) = (one for one in result.pairs if (one.request, one.key) == ("hit-0", KEY))
    assert (pair.verdict, pair.fault, pair.hit_tokens) == (
        *(Verdict.CORRUPTION, Fault.OTHER_REQUEST),
        4,
    )
    assert "row 3, restored, is off by" in pair.diagnosis
    assert pair.diagnosis.endswith(
        "a false hit, it is that of write-0, position 3, which has other tokens"
    )


def test_what_changes_from_run_to_run_says_so() -> None:
    steps = iter(range(1, 100))

    def noisy(rows: Tensor) -> Tensor:
        rows[2] += next(steps)
        return rows

    pair = judged(lambda piece: change_rows(piece, KEY, noisy))
    assert (pair.fault, pair.diagnosis) == (
        Fault.UNSTABLE,
        "row 2 is none that the model computed, and changes when the same is run again",
    )


def test_a_key_that_does_not_come_back() -> None:
    pair = judged(lambda piece: replace(piece, rows={"hidden_states": piece.rows["hidden_states"]}))
    assert (pair.fault, pair.diagnosis) == (
        Fault.NEVER_CACHED,
        "no rows came back for this key",
    )


def test_a_cache_that_refuses_is_quoted() -> None:
    def refuse(piece: Delivered) -> Delivered:
        return replace(piece, rows={}, refused="slot 9 of block 2 was never written")

    session = FakeSession(damage=lambda piece: refuse(piece) if piece.hit_tokens else piece)
    result = verify(session, choose(FACTS, ["repeat"], (), 4))
    wrong = [one for one in result.pairs if one.verdict is Verdict.CORRUPTION]
    assert {(one.fault, one.diagnosis) for one in wrong} == {
        (Fault.REFUSED, "the cache refused: slot 9 of block 2 was never written")
    }


# -- what a slot held before ------------------------------------------------------------------


def rows(*numbers: float) -> Tensor:
    return torch.tensor([[number, -number] for number in numbers])


def evidence(found: Tensor, written: list[int]) -> Evidence:
    """A hit of one block of two tokens in slots 4 and 5, and one new token, in step 3."""
    return Evidence("b", KEY, 3, 0, 2, found, rows(1, 2, 3), (4, 5), written, 2)


OLD = Computed(0, "old", 0, (4, 5), {KEY: rows(8, 9)})
DONOR = Computed(1, "a", 0, (4, 5), {KEY: rows(1, 2)})
PADDING = Computed(1, PADDING_REQUEST, 0, (), {KEY: rows(7)})
INDEX = RowIndex(KEY)
INDEX.add([OLD, DONOR, PADDING])


@pytest.mark.parametrize(
    ("found", "written", "named"),
    [
        (
            rows(8, 9, 3),
            [1, 1],
            Named(
                Fault.STALE,
                "rows 0 .. 1 are what old wrote there in step 0, before the block was given away",
            ),
        ),
        (
            rows(8, 9, 3),
            [3, 3],
            Named(
                Fault.TOO_EARLY,
                "rows 0 .. 1 are what was there before: another request writes them in this very "
                "step",
            ),
        ),
        (
            rows(0, 0, 3),
            [3, 3],
            Named(
                Fault.TOO_EARLY,
                "zero rows 0 .. 1 of key layers.0: another request writes them in this very step",
            ),
        ),
        (rows(0, 2, 3), [1, 1], Named(Fault.ZERO, "zero rows 0 of key layers.0")),
        (rows(1, 7, 3), [1, 1], Named(Fault.PADDING, "row 1 is of the padding of a batch")),
        (rows(1, 5, 3), [1, 1], Named(Fault.UNKNOWN, "row 1 is none that the model computed")),
    ],
)
def test_what_a_slot_held_before_is_told_from_the_rest(
    found: Tensor, written: list[int], named: Named
) -> None:
    assert name_fault(evidence(found, written), INDEX) == named


def test_spans() -> None:
    assert spans([3]) == "3"
    assert spans([9, 0, 4, 5, 6]) == "0, 4 .. 6, 9"


# -- what came before -------------------------------------------------------------------------


def test_rows_that_come_again_with_every_piece() -> None:
    """A piece of two tokens at positions 2 and 3, in step 4; before it came two others."""
    piece = Evidence("a", KEY, 4, 2, 0, rows(1, 2, 3, 4), rows(3, 4), (), (), 2)
    assert name_fault(piece, INDEX) == Named(
        Fault.REPEATED, "4 rows instead of 2: those of positions 0 .. 1 came before them again"
    )
    unknown = replace(piece, found=rows(5, 5, 3, 4))
    assert name_fault(unknown, INDEX) == Named(Fault.UNKNOWN, "4 rows instead of 2")


def test_stale_rows_of_an_earlier_scenario_name_it() -> None:
    index = RowIndex(KEY)
    index.add([DONOR])
    index.add([OLD], "repeat")
    assert name_fault(evidence(rows(8, 9, 3), [1, 1]), index) == Named(
        Fault.STALE,
        "rows 0 .. 1 are what repeat's old wrote there in step 0, before the block was given away",
    )


def test_payload_that_was_cut_is_told_with_its_first_step() -> None:
    def cut(piece: Delivered) -> Delivered:
        return replace(piece, payload={"one": None, "other": "other was cut into rows"})

    result = verify(FakeSession(damage=cut), choose(FACTS, ["repeat"], (), 4))
    found = {(one.request, one.key): one for one in result.pairs if one.key in ("one", "other")}
    assert {key: one.verdict for key, one in found.items()} == {
        ("write-0", "one"): Verdict.EQUAL,
        ("write-0", "other"): Verdict.CORRUPTION,
        ("hit-0", "one"): Verdict.EQUAL,
        ("hit-0", "other"): Verdict.CORRUPTION,
    }
    pair = found["hit-0", "other"]
    assert (pair.fault, pair.diagnosis) == (Fault.PAYLOAD, "step 1: other was cut into rows")


def test_unknown_rows_in_slots_of_this_very_step_were_read_too_early() -> None:
    """What was there is of a scenario before, and so of unknown origin."""
    truth = torch.arange(24.0).reshape(6, 4)
    found = torch.cat([truth[:2] + 100, truth[2:]])
    evidence = Evidence("hit-0", KEY, 7, 0, 4, found, truth, [0, 1, 2, 3], [7, 7, 7, 7], 4)
    assert name_fault(evidence, RowIndex(KEY)) == Named(
        Fault.TOO_EARLY,
        "rows 0 .. 1 are of before this scenario: another request writes them in this very step",
    )
    before = replace(evidence, written=[6, 7, 7, 7])
    assert name_fault(before, RowIndex(KEY)).fault is Fault.UNKNOWN
