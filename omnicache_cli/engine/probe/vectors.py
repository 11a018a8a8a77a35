"""numpy vectors of a forward pass -> what a record says about them: runs, padding, changed rows."""

from functools import lru_cache
from typing import Any

import numpy as np

from omnicache_cli.trace.records import Runs, to_runs

SHORT_VECTOR = 80
"""Up to this length Python encodes a vector faster than numpy's calls do."""

SMALL_TABLE_CELLS = 1 << 15
"""Block tables up to this size are compared as raw bytes: numpy's calls would cost more."""

FULL_COMPARE_CELLS = 1 << 18
"""Block tables up to this size are compared whole in every step; larger ones a part at a time."""


class TableMirror:
    """What was last recorded of one group's block table."""

    def __init__(self) -> None:
        self._cells = np.empty((0, 0), dtype=np.int32)
        self._used: list[int] = []
        self._turn = 0

    def changes(
        self, table: np.ndarray, used: np.ndarray, *, reordered: bool = False
    ) -> list[tuple[int, int, Runs]]:
        """Rows that differ: (row, first differing column, ids from there to the row's end).

        `table` is (at least num_reqs, at least the columns in use), `used` (num_reqs,) the columns
        in use. A large
        table whose rows hold the requests they held before is looked at a part at a time; a row
        whose length changes is told at once.
        """
        now = table[: len(used)]
        lengths: list[int] = used.tolist()
        known = self._grow(now)
        rows = [row for row, length in enumerate(lengths) if length != known[row]]
        changed = [self._change(row, now, known[row], lengths[row]) for row in rows]
        cells = self._cells[: len(lengths), : now.shape[1]]
        if now.size <= SMALL_TABLE_CELLS:
            others = [] if cells.tobytes() == now.tobytes() else _unequal_rows(cells, now)
        elif reordered or now.size <= FULL_COMPARE_CELLS:
            others = _unequal_rows(cells, now)
        else:
            part = max(1, FULL_COMPARE_CELLS // now.shape[1])
            turn = np.arange(self._turn, self._turn + part) % len(lengths)
            self._turn = int(turn[-1] + 1) % len(lengths)
            others = [int(turn[row]) for row in _unequal_rows(cells[turn], now[turn])]
        for row in others:
            change = self._change(row, now, lengths[row], lengths[row])
            if change[2]:  # else only what lies behind the used columns
                changed.append(change)
        self._used = lengths
        return sorted(changed) if others else changed

    def _change(
        self, row: int, now: np.ndarray, old_length: int, length: int
    ) -> tuple[int, int, Runs]:
        """How one row differs, and the mirror brought up to date."""
        shared = min(old_length, length)
        old: list[int] = self._cells[row, :shared].tolist()
        new: list[int] = now[row, :length].tolist()
        first = shared
        if new[:shared] != old:
            first = next(column for column in range(shared) if old[column] != new[column])
        self._cells[row, : now.shape[1]] = now[row]
        return row, first, to_runs(new[first:])

    def _grow(self, now: np.ndarray) -> list[int]:
        """Room for as many rows and columns; the known length of each row, 0 where it is new."""
        num_rows, width = now.shape
        rows, columns = self._cells.shape
        if num_rows > rows or width > columns:
            shape = (max(num_rows, rows), max(width, columns))
            grown = np.full(shape, -1, dtype=now.dtype)
            grown[:rows, :columns] = self._cells
            self._cells = grown
        return self._used[:num_rows] + [0] * (num_rows - len(self._used))


def _unequal_rows(cells: np.ndarray, now: np.ndarray) -> list[int]:
    rows: list[int] = np.flatnonzero((cells != now).any(axis=1)).tolist()
    return rows


@lru_cache(maxsize=8)
def _counting_bytes(length: int, dtype: np.dtype) -> bytes:
    return np.arange(length, dtype=dtype).tobytes()


def starts_of(values: np.ndarray) -> Runs:
    """`runs_of` for a query_start_loc: in decode steps it counts 0, 1, 2, ..."""
    length = len(values)
    if length and values.tobytes() == _counting_bytes(length, values.dtype):
        return [0, length]
    return runs_of(values)


def runs_of(values: np.ndarray) -> Runs:
    """`trace.records.to_runs` for arrays; runs that count down are not joined."""
    length = len(values)
    if length <= SHORT_VECTOR:
        return to_runs(values.tolist())
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    bounds = np.concatenate(([0], breaks, [length]))
    runs = np.empty(2 * (len(bounds) - 1), dtype=np.int64)
    runs[0::2] = values[bounds[:-1]]
    runs[1::2] = np.diff(bounds)
    encoded: Runs = runs.tolist()
    return encoded


def encode_slots(slots: np.ndarray | None, *, one_each: bool) -> dict[str, Any]:
    """Fields of GroupForward for a slot mapping; `one_each`: every request has one token."""
    if slots is None:
        return {}
    padding = 0
    if len(slots) and slots[-1] == -1:
        real = np.flatnonzero(slots != -1)
        end = int(real[-1]) + 1 if len(real) else 0
        padding = len(slots) - end
        slots = slots[:end]
    if one_each:
        return {"slots": slots.tolist(), "num_slot_padding": padding}
    return {"slot_mapping": runs_of(slots), "num_slot_padding": padding}
