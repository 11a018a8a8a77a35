"""Pieces of many steps -> one request's rows, aligned by token position and never by row index.

A preempted request is computed twice: the later rows of a position count.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from omnicache_cli.verify.runs import Computed, Delivered


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's rows of one key."""

    positions: tuple[int, ...]  # ascending
    rows: Tensor  # (len(positions), width)

    def missing(self, num_rows: int) -> list[int]:
        """Positions below `num_rows` without a row."""
        there = set(self.positions)
        return [position for position in range(num_rows) if position not in there]

    def up_to(self, end: int) -> "Rows":
        """Those of the positions below `end`."""
        count = sum(position < end for position in self.positions)
        return Rows(self.positions[:count], self.rows[:count])


def assemble(pieces: Iterable[Computed | Delivered], request: str, key: str) -> Rows | None:
    """None: no piece has this key."""
    last: dict[int, tuple[Tensor, int]] = {}
    for piece in pieces:
        rows = piece.rows.get(key) if piece.request == request else None
        if rows is not None:
            for index in range(len(rows)):
                last[piece.first_position + index] = (rows, index)
    if not last:
        return None
    positions = tuple(sorted(last))
    return Rows(positions, torch.stack([last[one][0][last[one][1]] for one in positions]))


def common(one: Rows, other: Rows) -> tuple[list[int], Tensor, Tensor]:
    """Positions that both have, and the rows of each."""
    if one.positions == other.positions:
        return list(one.positions), one.rows, other.rows
    shared = sorted(set(one.positions) & set(other.positions))
    return shared, _at(one, shared), _at(other, shared)


def _at(rows: Rows, positions: list[int]) -> Tensor:
    index = {position: row for row, position in enumerate(rows.positions)}
    return rows.rows[[index[position] for position in positions]]
