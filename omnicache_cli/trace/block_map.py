"""A pool over time in a grid of bounded size: rows of blocks, columns of steps.

A row starts as one block and a column as one step; where there are more, neighbours are merged,
so that neither a large pool nor a long run makes it grow. What a cell holds are block-steps: how
many of its blocks were in a state, summed over its steps.
"""

from dataclasses import dataclass, field

from omnicache_cli.trace.pool import CACHED, FREE, SHARED

MAX_ROWS = 24
MAX_COLUMNS = 80
"""Even, so that pairs can be merged."""

NUM_STATES = SHARED + 1


@dataclass(slots=True)
class Column:
    """Neighbouring steps of one engine."""

    first_step: int
    last_step: int
    num_steps: int = 0
    peak_in_use: int = 0  # blocks held by requests after scheduling, the most in one step
    rows: list[list[int]] = field(default_factory=list)  # block-steps per state; FREE stays 0

    def total(self, state: int) -> int:
        """Block-steps of a state other than FREE, all rows together."""
        return sum(row[state] for row in self.rows)


class BlockMap:
    """Call `move` for each block whose state changes, then `tick` for the step that it is so in."""

    def __init__(self) -> None:
        self.blocks_per_row = 1
        self.steps_per_column = 1
        self.columns: list[Column] = []
        self._now: list[list[int]] = []  # blocks per row and state
        self._since: list[int] = []  # per row: steps of the last column that are summed up
        self._in_use = 0

    @property
    def num_rows(self) -> int:
        return len(self._now)

    def first_block(self, row: int) -> int:
        """Block 0 is the null block and in no row."""
        return 1 + row * self.blocks_per_row

    def move(self, block: int, old: int, new: int) -> None:
        row = self._row(block)
        self._settle(row)
        self._now[row][old] -= 1
        self._now[row][new] += 1
        self._in_use += (new > CACHED) - (old > CACHED)

    def tick(self, step: int) -> None:
        """The step that the latest moves made."""
        if not self.columns or self.columns[-1].num_steps == self.steps_per_column:
            self._new_column(step)
        column = self.columns[-1]
        column.last_step = step
        column.num_steps += 1
        column.peak_in_use = max(column.peak_in_use, self._in_use)

    def close(self) -> None:
        """Sum up the last column; all of them then have all rows."""
        self._settle_all()
        for column in self.columns:
            column.rows += [[0] * NUM_STATES for _ in range(self.num_rows - len(column.rows))]

    def _row(self, block: int) -> int:
        while block > MAX_ROWS * self.blocks_per_row:
            self._merge_rows()
        row = (block - 1) // self.blocks_per_row
        while len(self._now) <= row:
            self._now.append([0] * NUM_STATES)
            self._since.append(self.columns[-1].num_steps if self.columns else 0)
        return row

    def _settle(self, row: int) -> None:
        """Sum up what the row was in the steps of the last column since it was settled."""
        if not self.columns:
            return
        column = self.columns[-1]
        steps = column.num_steps - self._since[row]
        if not steps:
            return
        while len(column.rows) <= row:
            column.rows.append([0] * NUM_STATES)
        cell = column.rows[row]
        for state in range(FREE + 1, NUM_STATES):
            cell[state] += steps * self._now[row][state]
        self._since[row] = column.num_steps

    def _settle_all(self) -> None:
        for row in range(self.num_rows):
            self._settle(row)

    def _new_column(self, step: int) -> None:
        self._settle_all()
        if len(self.columns) == MAX_COLUMNS:
            self.columns = [
                _joined(one, other)
                for one, other in zip(self.columns[::2], self.columns[1::2], strict=True)
            ]
            self.steps_per_column *= 2
        self.columns.append(Column(step, step))
        self._since = [0] * self.num_rows

    def _merge_rows(self) -> None:
        self._settle_all()
        self._now = _paired(self._now)
        for column in self.columns:
            column.rows = _paired(column.rows)
        self._since = [self.columns[-1].num_steps if self.columns else 0] * self.num_rows
        self.blocks_per_row *= 2


def _paired(rows: list[list[int]]) -> list[list[int]]:
    """Each row joined with the next one; the last of an odd number stays alone."""
    return [
        [sum(values) for values in zip(*rows[first : first + 2], strict=True)]
        for first in range(0, len(rows), 2)
    ]


def _joined(one: Column, other: Column) -> Column:
    """Two neighbours as one column."""
    longer, shorter = sorted((one.rows, other.rows), key=len, reverse=True)
    rows = [
        [sum(values) for values in zip(row, shorter[index], strict=True)]
        if index < len(shorter)
        else row
        for index, row in enumerate(longer)
    ]
    return Column(
        one.first_step,
        other.last_step,
        one.num_steps + other.num_steps,
        max(one.peak_in_use, other.peak_in_use),
        rows,
    )
