"""The pool over time in a bounded grid: the same sums as without a bound."""

import random

import pytest

from omnicache_cli.trace import block_map
from omnicache_cli.trace.block_map import BlockMap
from omnicache_cli.trace.pool import CACHED, FREE, IN_USE, SHARED


@pytest.mark.parametrize("seed", range(20))
def test_merged_rows_and_columns_keep_every_block_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_map, "MAX_ROWS", 3)
    monkeypatch.setattr(block_map, "MAX_COLUMNS", 4)
    chosen = random.Random(seed)
    grid, states = BlockMap(), dict.fromkeys(range(1, 30), FREE)
    seen: list[dict[int, int]] = []  # the state of every block in every step
    largest = 2
    for step in range(chosen.randint(1, 70)):
        largest = min(29, largest + chosen.randint(0, 1))
        for _ in range(chosen.randint(0, 4)):
            block, new = chosen.randint(1, largest), chosen.choice((FREE, CACHED, IN_USE, SHARED))
            if states[block] != new:
                grid.move(block, states[block], new)
                states[block] = new
        grid.tick(1000 + step)
        seen.append(dict(states))
    grid.close()

    assert len(grid.columns) <= 4
    assert grid.num_rows <= 3
    assert sum(column.num_steps for column in grid.columns) == len(seen)
    first = 0
    for column in grid.columns:
        steps = seen[first : first + column.num_steps]
        assert (column.first_step, column.last_step) == (1000 + first, 999 + first + len(steps))
        assert column.peak_in_use == max(
            sum(state in (IN_USE, SHARED) for state in one.values()) for one in steps
        )
        for row, cell in enumerate(column.rows):
            blocks = range(grid.first_block(row), grid.first_block(row + 1))
            for state in (CACHED, IN_USE, SHARED):
                assert cell[state] == sum(
                    one.get(block) == state for one in steps for block in blocks
                )
        first += column.num_steps


def test_a_large_pool_and_a_long_run_stay_small() -> None:
    grid = BlockMap()
    for step in range(1_000_000):
        if step % 1000 == 0:
            grid.move(1 + step // 10, FREE, IN_USE)  # up to block 99,901
        grid.tick(step)
    grid.close()

    assert (grid.blocks_per_row, grid.steps_per_column) == (8192, 16384)
    assert (grid.num_rows, len(grid.columns)) == (13, 62)
    assert grid.columns[-1].last_step == 999_999
    assert grid.columns[-1].peak_in_use == 1000
