"""Who wrote which slot last, from what the model computed: the truth that restored rows must equal.

Kept apart from every cache: it sees the forward pass, not what a cache made of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnicache_cli.verify.runs import Computed


@dataclass(frozen=True, slots=True)
class Written:
    """The latest write of one slot."""

    piece: Computed
    row: int  # of the piece

    @property
    def position(self) -> int:
        return self.piece.first_position + self.row


class Ledger:
    """Feed it the forward passes in order."""

    def __init__(self) -> None:
        self._slots: dict[int, Written] = {}

    def write(self, piece: Computed) -> None:
        for row, slot in enumerate(piece.slots):
            self._slots[slot] = Written(piece, row)

    def at(self, slot: int) -> Written | None:
        return self._slots.get(slot)

    def step_of(self, slot: int) -> int:
        """The step of its latest write; -1: there was none."""
        written = self._slots.get(slot)
        return -1 if written is None else written.piece.step

    def has(self, slot: int, key: str) -> bool:
        written = self._slots.get(slot)
        return written is not None and key in written.piece.rows

    def rows(self, slots: Sequence[int], key: str) -> Tensor | None:
        """(len(slots), width); None: a slot was never written, or without this key."""
        found = []
        for slot in slots:
            written = self._slots.get(slot)
            rows = None if written is None else written.piece.rows.get(key)
            if written is None or rows is None:
                return None
            found.append(rows[written.row])
        return torch.stack(found) if found else None
