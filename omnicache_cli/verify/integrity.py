"""Restored rows must be, bit for bit, the rows that were last written to their slots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from omnicache_cli.verify.compare import compare_rows
from omnicache_cli.verify.ledger import Ledger
from omnicache_cli.verify.results import Place
from omnicache_cli.verify.runs import Computed, Delivered, RunRows


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong with one key of one request."""

    diagnosis: str
    place: Place | None = None


Broken = dict[tuple[str, str], Wrong]
"""By request and key; the first finding of each."""


def check_integrity(run: RunRows, ledger: Ledger, keys: Sequence[str], block_size: int) -> Broken:
    """Follow one run; `ledger` knows of the runs before and learns of this one.

    Within a step all rows are written before any is restored: a request may hit what another one
    writes in the same step.
    """
    broken: Broken = {}
    for pieces in _by_step(run):
        for piece in pieces:
            if isinstance(piece, Computed):
                ledger.write(piece)
        for piece in pieces:
            if isinstance(piece, Delivered):
                for key in keys:
                    wrong = _wrong(piece, key, ledger, block_size)
                    if wrong is not None:
                        broken.setdefault((piece.request, key), wrong)
    return broken


def _by_step(run: RunRows) -> Iterator[list[Computed | Delivered]]:
    pieces: list[Computed | Delivered] = [*run.computed, *run.delivered]
    for _, group in groupby(sorted(pieces, key=lambda one: one.step), key=lambda one: one.step):
        yield list(group)


def _wrong(piece: Delivered, key: str, ledger: Ledger, block_size: int) -> Wrong | None:
    if piece.refused is not None:
        return Wrong(f"the cache refused: {piece.refused}")
    rows, hit = piece.rows.get(key), piece.hit_tokens
    if rows is None:
        return Wrong("no rows came back for this key")
    if not hit:
        return None

    def place(position: int) -> Place:
        slot = piece.hit_slots[position]
        block = position // block_size
        return Place(position, block, slot // block_size, slot, piece.step)

    if len(rows) < hit:
        return Wrong(f"{len(rows)} rows instead of {hit} and more", place(len(rows)))
    expected = ledger.rows(piece.hit_slots, key)
    if expected is None:
        first = next(i for i, slot in enumerate(piece.hit_slots) if not ledger.has(slot, key))
        return Wrong("a row was restored that was never written", place(first))
    if expected.shape != rows[:hit].shape or expected.dtype != rows.dtype:
        return Wrong(
            f"rows of {tuple(rows.shape[1:])} {rows.dtype} were restored, written were "
            f"{tuple(expected.shape[1:])} {expected.dtype}"
        )
    gap = compare_rows(expected, rows[:hit], range(hit))
    if gap.first_position is None:
        return None
    start = place(gap.first_position)
    return Wrong(
        f"{gap.num_differing_rows} of {hit} restored rows are not what was written there",
        Place(
            start.token,
            start.block,
            start.block_id,
            start.slot,
            start.step,
            gap.first_column,
            gap.expected_values,
            gap.found_values,
        ),
    )
