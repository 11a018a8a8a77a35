"""What a step computes: whose rows are where in the batch, and the KV cache slot of each row.

Row r of every per-token output belongs to slot `slot_mapping[r]`, and slot = block id * block size
+ offset, as in vLLM. Knows nothing of outputs or of stored rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnicache_cli.errors import OmnicacheError

Ints = NDArray[np.int64]


class BadStepError(OmnicacheError):
    """The layout of a step contradicts itself, or the cache was called out of turn."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request's share of a step: rows [first_row, first_row + num_rows) of the batch.

    They are its tokens at positions num_computed_tokens and on.
    """

    request_id: str
    first_row: int
    num_rows: int
    num_computed_tokens: int
    hit_tokens: int | None  # admitted in this step with this prefix hit; None: was running already
    block_ids: tuple[int, ...]  # the whole block table

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def end(self) -> int:
        """The position behind this step's last token."""
        return self.num_computed_tokens + self.num_rows


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """One step. The slot mapping is read until the next step begins: do not write into it."""

    step: int
    slot_mapping: Tensor  # int64 on the CPU, (at least num_tokens,); -1 behind num_tokens
    num_tokens: int
    num_tokens_padded: int
    requests: tuple[RequestRows, ...]
    new_block_ids: tuple[int, ...]  # allocated, not hit, for this step: what rows they had is void

    def problems(self, block_size: int | None = None) -> list[str]:
        """Contradictions in words; empty when the layout is sound.

        With a block size, slots are also checked against the block tables.
        """
        found = list(self._problems_of_counts())
        if not found:
            found += self._problems_of_requests()
        if not found:
            found += self._problems_of_slots()
        if not found and block_size is not None:
            found += self._problems_of_tables(block_size)
        return found

    def _problems_of_counts(self) -> Iterator[str]:
        slots = self.slot_mapping
        if slots.device.type != "cpu" or slots.dtype != torch.int64 or slots.ndim != 1:
            yield (
                f"slot_mapping is {slots.ndim}-D {slots.dtype} on {slots.device}; "
                "a copy on the CPU, 1-D int64, is needed"
            )
            return
        if self.num_tokens < 0 or self.num_tokens_padded < self.num_tokens:
            yield f"{self.num_tokens} tokens are padded to {self.num_tokens_padded}"
        if len(slots) < self.num_tokens:
            yield f"{len(slots)} slots for {self.num_tokens} tokens"
        if (lowest := min(self.new_block_ids, default=0)) < 0:
            yield f"new block {lowest} has a negative id"

    def _problems_of_requests(self) -> Iterator[str]:
        seen: set[str] = set()
        row = 0
        for request in sorted(self.requests, key=lambda one: one.first_row):
            name = request.request_id
            if name in seen:
                yield f"request {name} is there twice"
            seen.add(name)
            if request.num_rows < 0 or request.num_computed_tokens < 0:
                yield (
                    f"request {name} has {request.num_rows} rows from position "
                    f"{request.num_computed_tokens}"
                )
            if request.first_row != row:
                yield f"request {name} starts at row {request.first_row}, not {row}"
            row = request.first_row + request.num_rows
            if request.hit_tokens and min(request.block_ids, default=0) < 0:
                yield f"request {name} has block {min(request.block_ids)}: a negative id"
            if request.hit_tokens not in (None, request.num_computed_tokens):
                yield (
                    f"request {name} hit {request.hit_tokens} tokens and starts at position "
                    f"{request.num_computed_tokens}"
                )
        if row != self.num_tokens:
            yield f"the requests have {row} rows, the step {self.num_tokens} tokens"

    def _problems_of_slots(self) -> Iterator[str]:
        if bool((self.slot_mapping[self.num_tokens :] != -1).any()):
            yield f"a slot behind the {self.num_tokens} tokens is not -1"
        if (self.slots < 0).any():
            row = int(np.flatnonzero(self.slots < 0)[0])
            yield f"row {row} has slot {self.slots[row]}"

    def _problems_of_tables(self, block_size: int) -> Iterator[str]:
        blocks, _ = self.blocks_and_offsets(block_size)
        for request in self.requests:
            name, num_blocks = request.request_id, len(request.block_ids)
            if request.end > num_blocks * block_size:
                yield (
                    f"request {name}: {num_blocks} blocks hold {num_blocks * block_size} tokens, "
                    f"not {request.end}"
                )
                continue
            if not request.num_rows:
                continue
            first = request.num_computed_tokens // block_size
            table = np.array(request.block_ids[first : -(-request.end // block_size)], np.int64)
            skipped = request.num_computed_tokens - first * block_size
            expected = slots_of(table, block_size)[skipped : skipped + request.num_rows]
            wrong = np.flatnonzero(expected != self.slots[request.rows])
            if len(wrong):
                row = int(wrong[0])
                yield (
                    f"request {name}: position {request.num_computed_tokens + row} belongs to slot "
                    f"{expected[row]}, slot_mapping says {self.slots[request.first_row + row]}"
                )
        written = blocks[np.diff(blocks, prepend=-1) != 0]
        if len(np.unique(written)) != len(written):
            yield "two requests write to one block"

    @property
    def slots(self) -> Ints:
        """The slot of each row, without padding: (num_tokens,), the memory of slot_mapping."""
        slots: Ints = self.slot_mapping[: self.num_tokens].numpy()
        return slots

    def blocks_and_offsets(self, block_size: int) -> tuple[Ints, Ints]:
        """Block id and offset of each of this step's rows, (num_tokens,) both."""
        blocks = self.slots // block_size
        return blocks, self.slots - blocks * block_size


def slots_of(table: Ints, block_size: int) -> Ints:
    """The slots of all positions that these blocks hold: (blocks * block_size,)."""
    slots: Ints = table[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)
