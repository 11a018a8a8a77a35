"""What a cache gives back must be, bit for bit, what the model computed for these tokens.

Restored rows are held against the rows that were last written to their slots, this step's rows
against the forward pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from omnicache_cli.verify.compare import compare_rows
from omnicache_cli.verify.faults import Evidence, Fault, Named, RowIndex, name_fault
from omnicache_cli.verify.ledger import Ledger
from omnicache_cli.verify.results import Place
from omnicache_cli.verify.runs import Computed, Delivered, RunRows


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong with one key of one request."""

    fault: Fault
    diagnosis: str
    place: Place | None = None


Broken = dict[tuple[str, str], Wrong]
"""By request and key; the first finding of each."""


Earlier = Sequence[tuple[str, Sequence[RunRows]]]
"""Scenarios that ran before, with their runs: what they left in the slots may turn up."""


class Origins:
    """Where rows of a key come from, in a scenario and those before; searched only when asked."""

    def __init__(self, runs: Sequence[RunRows], earlier: Earlier = ()) -> None:
        self._runs = runs
        self._earlier = earlier
        self._indexes: dict[str, RowIndex] = {}

    def of(self, key: str) -> RowIndex:
        if key not in self._indexes:
            index = self._indexes[key] = RowIndex(key)
            for run in self._runs:
                index.add(run.computed)
            for scenario, runs in self._earlier:
                for run in runs:
                    index.add(run.computed, scenario)
        return self._indexes[key]


@dataclass(frozen=True, slots=True)
class IntegrityCheck:
    """Follows the runs of one scenario in order; the ledger learns from each."""

    ledger: Ledger
    origins: Origins
    keys: Sequence[str]
    block_size: int

    def broken(self, run: RunRows) -> Broken:
        """Within a step all rows are written before any is restored: a request may hit what another
        one writes in the same step."""
        found: Broken = {}
        for pieces in _by_step(run):
            computed = {}
            for piece in pieces:
                if isinstance(piece, Computed):
                    self.ledger.write(piece)
                    computed[piece.request] = piece
            for piece in pieces:
                if isinstance(piece, Delivered):
                    for key in self.keys:
                        wrong = self._wrong(piece, key, computed[piece.request])
                        if wrong is not None:
                            found.setdefault((piece.request, key), wrong)
        return found

    def _wrong(self, piece: Delivered, key: str, new: Computed) -> Wrong | None:
        if piece.refused is not None:
            return Wrong(Fault.REFUSED, f"the cache refused: {piece.refused}")
        rows, hit = piece.rows.get(key), piece.hit_tokens
        computed = new.rows.get(key)
        if computed is None:  # the model put out no such key in this step
            return (
                None if rows is None else Wrong(Fault.KIND, "rows that the model did not put out")
            )
        if rows is None:
            return Wrong(Fault.NEVER_CACHED, "no rows came back for this key")
        written = self.ledger.rows(piece.hit_slots, key) if hit else computed[:0]
        if written is None:
            return self._never_written(piece, key, new)
        if computed.shape[1:] != rows.shape[1:] or computed.dtype != rows.dtype:
            return Wrong(
                Fault.KIND,
                f"rows of {tuple(rows.shape[1:])} {rows.dtype} came back, the model computed "
                f"{tuple(computed.shape[1:])} {computed.dtype}",
            )
        truth = torch.cat([written, computed])
        if len(rows) == len(truth):
            gap = compare_rows(truth, rows, range(len(truth)))
            if gap.first_position is None:
                return None
            first, column = gap.first_position, gap.first_column
            values = (gap.expected_values, gap.found_values)
        else:
            shorter = min(len(rows), len(truth))
            part = compare_rows(truth[:shorter], rows[:shorter], range(shorter))
            first = shorter if part.first_position is None else part.first_position
            first = min(first, len(truth) - 1)
            column, values = part.first_column, (part.expected_values, part.found_values)
        evidence = Evidence(
            request=piece.request,
            key=key,
            step=piece.step,
            first_position=piece.first_position,
            hit=hit,
            found=rows,
            truth=truth,
            slots=piece.hit_slots,
            written=[self.ledger.step_of(slot) for slot in piece.hit_slots],
            block_size=self.block_size,
        )
        named = name_fault(evidence, self.origins.of(key))
        place = self._place(piece, new, first)
        return Wrong(named.fault, named.sentence, _with_values(place, column, *values))

    def _never_written(self, piece: Delivered, key: str, new: Computed) -> Wrong:
        slots = piece.hit_slots
        first = next(i for i, slot in enumerate(slots) if not self.ledger.has(slot, key))
        rows = piece.rows[key]
        zero = first < len(rows) and not bool(rows[first].any())
        named = Named(
            Fault.ZERO if zero else Fault.UNKNOWN,
            f"row {first} was restored and never written{': it is zero' if zero else ''}",
        )
        return Wrong(named.fault, named.sentence, self._place(piece, new, first))

    def _place(self, piece: Delivered, new: Computed, row: int) -> Place:
        hit = piece.hit_tokens
        slots = (*piece.hit_slots, *new.slots)
        slot = slots[row] if row < len(slots) else None
        position = piece.first_position + row if hit == 0 else row
        block_id = None if slot is None else slot // self.block_size
        return Place(position, position // self.block_size, block_id, slot, piece.step)


def _with_values(
    place: Place, column: int | None, expected: tuple[float, ...], found: tuple[float, ...]
) -> Place:
    return Place(
        place.token, place.block, place.block_id, place.slot, place.step, column, expected, found
    )


def _by_step(run: RunRows) -> Iterator[list[Computed | Delivered]]:
    pieces: list[Computed | Delivered] = [*run.computed, *run.delivered]
    for _, group in groupby(sorted(pieces, key=lambda one: one.step), key=lambda one: one.step):
        yield list(group)
