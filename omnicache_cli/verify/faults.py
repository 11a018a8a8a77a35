"""Names for what can go wrong with restored rows, and how each is recognised.

The donor of a wrong row is searched among all rows that the model computed, by their bytes; what
the run's own tables say about it counts for nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from omnicache_cli.verify.runs import Computed


class Fault(StrEnum):
    """What corrupts rows."""

    SHORT_PREFIX = "short prefix"
    SHIFTED = "shifted rows"
    OTHER_BLOCK = "another block's rows"
    OTHER_REQUEST = "another request's rows"
    STALE = "stale rows"
    ZERO = "zero rows"
    NEVER_CACHED = "key never cached"
    OFFSET = "offset ignores the hit"
    TOO_EARLY = "read before written"
    PADDING = "padding row"
    UNSTABLE = "differs from run to run"
    REFUSED = "refused by the cache"
    WRONG_KV = "wrong keys and values"
    OUTPUT = "another output"
    OTHER_ADAPTER = "another adapter's rows"
    REPEATED = "rows given again"
    PAYLOAD = "payload changed"
    KIND = "another kind of rows"
    UNKNOWN = "rows of unknown origin"


PADDING_REQUEST = ""
"""Request of rows that belong to no token: the batch was padded."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One row that the model computed."""

    request: str
    position: int
    slot: int  # -1: of a padding row
    step: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """A delivery that is not what it should be, and what it should be.

    `found` is (rows that came, width), `truth` (hit + new, width): row i is for position
    first_position + i of the request. `slots` and `written` are of the hit: where each row comes
    from, and the step in which it was last written.
    """

    request: str
    key: str
    step: int
    first_position: int
    hit: int
    found: Tensor
    truth: Tensor
    slots: Sequence[int]
    written: Sequence[int]
    block_size: int


class RowIndex:
    """All rows of a key that the model computed, by their bytes."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._origins: defaultdict[bytes, list[Origin]] = defaultdict(list)

    def add(self, pieces: Iterable[Computed], scenario: str | None = None) -> None:
        """`scenario`: of an earlier one, whose requests have the same names."""
        for piece in pieces:
            rows = piece.rows.get(self._key)
            padding = piece.request == PADDING_REQUEST
            request = (
                piece.request if scenario is None or padding else f"{scenario}'s {piece.request}"
            )
            for index, content in enumerate(() if rows is None else contents(rows)):
                slot = piece.slots[index] if index < len(piece.slots) else -1
                position = piece.first_position + index
                self._origins[content].append(Origin(request, position, slot, piece.step))

    def origins(self, content: bytes) -> Sequence[Origin]:
        return self._origins.get(content, ())


def contents(rows: Tensor) -> list[bytes]:
    """The bytes of each row."""
    if not len(rows):
        return []
    flat = rows.contiguous().view(torch.uint8).reshape(len(rows), -1)
    return [row.tobytes() for row in flat.numpy()]


@dataclass(frozen=True, slots=True)
class Named:
    """A fault, and a sentence about this case of it."""

    fault: Fault
    sentence: str


def name_fault(evidence: Evidence, index: RowIndex) -> Named:
    """The fault that explains the rows that came; UNKNOWN if none does."""
    found, truth = contents(evidence.found), contents(evidence.truth)
    for attempt in (_lost, _repeated, _misplaced, _zero, _shifted, _from_elsewhere):
        named = attempt(evidence, found, truth, index)
        if named is not None:
            return named
    wrong = _differing(found, truth)
    if wrong and all(one < evidence.hit and _in_this_step(evidence, one) for one in wrong):
        what = "of before this scenario: another request writes them in this very step"
        return Named(Fault.TOO_EARLY, f"{rows_are(wrong)} {what}")
    return Named(Fault.UNKNOWN, f"{rows_are(wrong)} none that the model computed")


def _in_this_step(e: Evidence, row: int) -> bool:
    return e.written[row] == e.step


def _lost(e: Evidence, found: list[bytes], truth: list[bytes], index: RowIndex) -> Named | None:
    """Fewer rows than there should be."""
    missing = len(truth) - len(found)
    if missing <= 0:
        return None
    counts = f"{len(found)} rows instead of {len(truth)}"
    if missing == e.hit and found == truth[e.hit :]:
        return Named(Fault.NEVER_CACHED, f"key {e.key} has no cached rows: {counts}")
    first = next((i for i, row in enumerate(found) if row != truth[i]), len(found))
    if found[first:] == truth[first + missing :]:
        gap = rows_are(range(first, first + missing))
        after = f", what follows is shifted by {missing}" if found[first:] else ""
        return Named(Fault.SHORT_PREFIX, f"{counts}: {gap} missing{after}")
    return Named(Fault.SHORT_PREFIX, f"{counts}, the first wrong one is row {first}")


def _repeated(e: Evidence, found: list[bytes], truth: list[bytes], index: RowIndex) -> Named | None:
    """More rows than there should be, and those that should be at the end."""
    extra = len(found) - len(truth)
    if extra <= 0:
        return None
    counts = f"{len(found)} rows instead of {len(truth)}"
    first = e.first_position - extra
    known = all(
        any(one.position == first + row for one in index.origins(content))
        for row, content in enumerate(found[:extra])
    )
    if found[extra:] != truth or not known:
        return Named(Fault.UNKNOWN, counts)
    positions = spans(range(first, e.first_position))
    return Named(Fault.REPEATED, f"{counts}: those of positions {positions} came before them again")


def _misplaced(
    e: Evidence, found: list[bytes], truth: list[bytes], index: RowIndex
) -> Named | None:
    """The rows of this step were taken from the front of the request."""
    wrong = _differing(found, truth)
    new = len(truth) - e.hit
    if not e.hit or not wrong or wrong[0] < e.hit or found[e.hit :] != truth[:new]:
        return None
    where = f"{rows_are(wrong)} those of positions {spans(range(new))}"
    return Named(Fault.OFFSET, f"{where}: they were taken as if nothing had hit")


def _zero(e: Evidence, found: list[bytes], truth: list[bytes], index: RowIndex) -> Named | None:
    wrong = _differing(found, truth)
    if not wrong or any(any(found[one]) for one in wrong):
        return None
    rows = f"zero rows {spans(wrong)} of key {e.key}"
    if all(one < e.hit and e.written[one] == e.step for one in wrong):
        return Named(Fault.TOO_EARLY, f"{rows}: another request writes them in this very step")
    return Named(Fault.ZERO, rows)


def _shifted(e: Evidence, found: list[bytes], truth: list[bytes], index: RowIndex) -> Named | None:
    """All wrong rows are rows of this request, each as far from its place."""
    wrong = _differing(found, truth)
    places: defaultdict[bytes, list[int]] = defaultdict(list)
    for position, row in enumerate(truth):
        places[row].append(position)
    offsets: dict[int, int] = defaultdict(int)
    for one in wrong:
        for position in places.get(found[one], ()):
            offsets[position - one] += 1
    if not offsets:
        return None
    offset = max(offsets, key=lambda one: offsets[one])
    if offset % e.block_size == 0 or offsets[offset] < len(wrong) - abs(offset):
        return None
    where = "further on" if offset > 0 else "before"
    return Named(Fault.SHIFTED, f"{rows_are(wrong)} shifted: those {abs(offset)} {where}")


def _from_elsewhere(
    e: Evidence, found: list[bytes], truth: list[bytes], index: RowIndex
) -> Named | None:
    """Every wrong row was computed for another place."""
    wrong = _differing(found, truth)
    donors = [index.origins(found[one]) for one in wrong]
    if not wrong or not all(donors):
        return None
    if all(any(one.request == PADDING_REQUEST for one in each) for each in donors):
        return Named(Fault.PADDING, f"{rows_are(wrong)} of the padding of a batch")
    own = [
        any(wrong[i] < e.hit and one.slot == e.slots[wrong[i]] for one in each)
        for i, each in enumerate(donors)
    ]
    if all(own):
        if all(e.written[one] == e.step for one in wrong):
            what = "what was there before: another request writes them in this very step"
            return Named(Fault.TOO_EARLY, f"{rows_are(wrong)} {what}")
        was = _latest(donors)
        what = f"what {was.request} wrote there in step {was.step}, before the block was given away"
        return Named(Fault.STALE, f"{rows_are(wrong)} {what}")
    inside = set(e.slots)
    if all(any(one.slot in inside for one in each) for each in donors):
        return Named(Fault.OTHER_BLOCK, f"{rows_are(wrong)} {_other_blocks(e, wrong, donors)}")
    donor = donors[0][0]
    text = f"{rows_are(wrong)} those of {donor.request}, from position {donor.position} on"
    return Named(Fault.OTHER_REQUEST, text)


def _other_blocks(e: Evidence, wrong: Sequence[int], donors: Sequence[Sequence[Origin]]) -> str:
    """`of block 1, not of block 2`; of several, which has whose."""
    whose: defaultdict[int, set[int]] = defaultdict(set)
    for row, each in zip(wrong, donors, strict=True):
        inside = next(one for one in each if one.slot in e.slots)
        whose[row // e.block_size].add(inside.position // e.block_size)
    if len(whose) == 1:
        ((block, others),) = whose.items()
        return f"of block {spans(others)}, not of block {block}"
    shown = [f"block {block} has those of {spans(others)}" for block, others in whose.items()]
    more = len(shown) - SHOWN_BLOCKS
    rest = f", and {more} more" if more > 0 else ""
    return f"of other blocks: {', '.join(shown[:SHOWN_BLOCKS])}{rest}"


SHOWN_BLOCKS = 4


def _latest(donors: Sequence[Sequence[Origin]]) -> Origin:
    return max((one for each in donors for one in each), key=lambda one: one.step)


def _differing(found: Sequence[bytes], truth: Sequence[bytes]) -> list[int]:
    pairs = zip(found, truth, strict=False)
    return [index for index, (one, other) in enumerate(pairs) if one != other]


def rows_are(numbers: Iterable[int]) -> str:
    """`row 5 is`, `rows 4 .. 9 are`."""
    known = sorted(numbers)
    return f"row {known[0]} is" if len(known) == 1 else f"rows {spans(known)} are"


def spans(numbers: Iterable[int]) -> str:
    """`3`, `4 .. 9`, `0, 4 .. 9`."""
    return ", ".join(_spans(sorted(numbers)))


def _spans(numbers: Sequence[int]) -> Iterator[str]:
    first = last = None
    for number in numbers:
        if last is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            yield f"{first}" if first == last else f"{first} .. {last}"
        first = last = number
    if first is not None:
        yield f"{first}" if first == last else f"{first} .. {last}"
