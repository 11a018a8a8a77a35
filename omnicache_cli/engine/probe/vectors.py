"""numpy vectors of a forward pass -> what a record says about them: runs, padding, changed rows."""

from typing import Any

import numpy as np

from omnicache_cli.trace.records import Runs, to_runs

SHORT_VECTOR = 80
"""Up to this length Python encodes a vector faster than numpy's calls do."""

FULL_COMPARE_CELLS = 1 << 18
"""Block tables up to this size are compared whole in every step; larger ones a part at a time."""


class TableMirror:
    """What was last recorded of one group's block table."""

    def __init__(self) -> None:
        self._cells = np.empty((0, 0), dtype=np.int32)
        self._used = np.empty(0, dtype=np.int32)
        self._turn = 0

    def changes(
        self, table: np.ndarray, used: np.ndarray, *, reordered: bool = False
    ) -> list[tuple[int, int, Runs]]:
        """Rows that differ: (row, first differing column, ids from there to the row's end).

        A large table whose rows hold the requests they held before is looked at a part at a time.
        `table` is (at least num_reqs, columns), `used` (num_reqs,) the columns in use.
        """
        num_rows = len(used)
        width = int(used.max(initial=0))
        self._grow(num_rows, width)
        cells, now = self._cells[:num_rows, :width], table[:num_rows, :width]
        known = self._used[:num_rows]
        if reordered or cells.size <= FULL_COMPARE_CELLS:
            unequal = cells != now
            if not unequal.any() and not (known != used).any():
                self._used[num_rows:] = 0
                return []
            differs = unequal.any(axis=1)
        else:
            differs = np.zeros(num_rows, dtype=bool)
            part = max(1, FULL_COMPARE_CELLS // width)
            turn = np.arange(self._turn, self._turn + part) % num_rows
            differs[turn] = (cells[turn] != now[turn]).any(axis=1)
            self._turn = int(turn[-1] + 1) % num_rows
        changed = []
        for row in np.flatnonzero(differs | (known != used)).tolist():
            old_end, end = int(known[row]), int(used[row])
            shared = min(old_end, end)
            wrong = np.flatnonzero(cells[row, :shared] != now[row, :shared])
            first = int(wrong[0]) if len(wrong) else shared
            if first < shared or old_end != end:
                changed.append((row, first, runs_of(now[row, first:end])))
            cells[row] = now[row]
        self._used[:num_rows] = used
        self._used[num_rows:] = 0  # rows that left are told again in full
        return changed

    def _grow(self, num_rows: int, width: int) -> None:
        have_rows, have_width = self._cells.shape
        if num_rows > have_rows or width > have_width:
            grown = np.full((max(num_rows, have_rows), max(width, have_width)), -1, dtype=np.int32)
            grown[:have_rows, :have_width] = self._cells
            self._cells = grown
            used = np.zeros(len(grown), dtype=np.int32)
            used[: len(self._used)] = self._used
            self._used = used


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
