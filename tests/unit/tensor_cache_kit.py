"""Steps for the tests of the tensor cache: layouts by hand, and those of a tiny scheduler.

Imports torch: import it behind `pytest.importorskip("torch")`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from omnicache_cli.tensor_cache import RequestRows, StepLayout


@dataclass(frozen=True)
class Share:
    """A request's share of a step, before it is known which rows of the batch it gets."""

    request_id: str
    block_ids: tuple[int, ...]
    start: int
    end: int
    hit: int | None = None


def step_of(
    step: int,
    shares: Sequence[Share],
    block_size: int,
    new_block_ids: Sequence[int] = (),
    padded: int | None = None,
) -> StepLayout:
    requests, slots = [], []
    for share in shares:
        requests.append(
            RequestRows(
                request_id=share.request_id,
                first_row=len(slots),
                num_rows=share.end - share.start,
                num_computed_tokens=share.start,
                hit_tokens=share.hit,
                block_ids=share.block_ids,
            )
        )
        slots += [
            share.block_ids[position // block_size] * block_size + position % block_size
            for position in range(share.start, share.end)
        ]
    num_tokens = len(slots)
    num_padded = num_tokens if padded is None else padded
    mapping = torch.tensor(slots + [-1] * (num_padded - num_tokens), dtype=torch.int64)
    return StepLayout(step, mapping, num_tokens, num_padded, tuple(requests), tuple(new_block_ids))


def numbered(first: int, num_rows: int, width: int = 2) -> Tensor:
    """Rows that say which they are: row r is [first + r, first + r, ...]."""
    return torch.arange(first, first + num_rows, dtype=torch.float32)[:, None].repeat(1, width)


def numbers_in(rows: Tensor) -> list[int]:
    """What `numbered` rows say."""
    return [int(row[0]) for row in rows]


class LateCopies:
    """Copies like a device's: kept rows are a copy, and nothing comes before somebody waits for it
    or `arrive` is called. `log` says what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.under_way: list[LateCopy] = []

    def keeps(self, rows: Tensor) -> bool:
        return True

    def keep(self, rows: Tensor) -> Tensor:
        self.log.append(f"keep {len(rows)}")
        return rows.clone()

    def start(self, kept: Sequence[Tensor]) -> "LateCopy":
        self.log.append(f"start {[len(rows) for rows in kept]}")
        copy = LateCopy(self, list(kept))
        self.under_way.append(copy)
        return copy

    def arrive(self) -> None:
        for copy in self.under_way:
            copy.arrived = True


@dataclass(eq=False)
class LateCopy:
    copies: LateCopies
    kept: list[Tensor]
    arrived: bool = False

    def done(self) -> bool:
        return self.arrived

    def wait(self) -> list[Tensor]:
        if not self.arrived:
            self.copies.log.append(f"wait {[len(rows) for rows in self.kept]}")
            self.arrived = True
        return [rows.clone() for rows in self.kept]


@dataclass(eq=False)
class TinyRequest:
    request_id: str
    tokens: tuple[int, ...]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class TinyScheduler:
    """Full-block prefix hits, chunked prefill, eviction, preemption and resume, as vLLM does them.

    Blocks are hashed when they are scheduled, so a request can hit blocks of the same step.
    """

    def __init__(self, rng: Random, block_size: int, num_blocks: int) -> None:
        self.rng = rng
        self.block_size = block_size
        self.waiting: list[TinyRequest] = []
        self.running: list[TinyRequest] = []
        self.seen: Counter[str] = Counter()
        self._free = list(range(num_blocks))
        self._cached: dict[tuple[int, ...], int] = {}
        self._hash_of: dict[int, tuple[int, ...]] = {}
        self._users: Counter[int] = Counter()
        self._step = 0
        self._new: list[int] = []

    def schedule(self, budget: int) -> StepLayout:
        self._step += 1
        self._new = []
        shares: list[Share] = []
        preempted = False
        for request in list(self.running):
            if request not in self.running or not budget:
                continue
            num_tokens = min(self._chunk(budget), len(request.tokens) - request.computed)
            while not self._grow(request, num_tokens):
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                shares.append(self._share(request, num_tokens, hit=None))
                budget -= num_tokens
        while self.waiting and budget and not preempted:
            request = self.waiting[0]
            hits = self._hits(request)
            hit = len(hits) * self.block_size
            num_tokens = min(self._chunk(budget), len(request.tokens) - hit)
            for block in hits:
                self._use(block)
            request.blocks, request.computed = list(hits), hit
            if not self._grow(request, num_tokens):
                self._release(request)
                break
            self.running.append(self.waiting.pop(0))
            self.seen["hit" if hit else "miss"] += 1
            self.seen["same-step hit"] += any(block in self._new for block in hits)
            self.seen["chunked hit"] += bool(hit) and num_tokens < len(request.tokens) - hit
            shares.append(self._share(request, num_tokens, hit=hit))
            budget -= num_tokens
        padded = sum(share.end - share.start for share in shares) + self.rng.choice([0, 0, 3])
        return step_of(self._step, shares, self.block_size, self._new, padded)

    def end_step(self) -> list[str]:
        """Ends finished requests; their ids."""
        done = [one for one in self.running if one.computed == len(one.tokens)]
        for request in done:
            self.running.remove(request)
            self._release(request)
        for request in self.running:  # a rejected draft: its slot is written again
            if request.computed % self.block_size and self.rng.random() < 0.2:
                self.seen["again"] += 1
                request.computed -= 1
        return [request.request_id for request in done]

    def _chunk(self, budget: int) -> int:
        return min(budget, self.rng.choice([1, 2, 4, 20]))

    def _share(self, request: TinyRequest, num_tokens: int, hit: int | None) -> Share:
        start = request.computed
        request.computed += num_tokens
        for column in range(start // self.block_size, request.computed // self.block_size):
            prefix = request.tokens[: (column + 1) * self.block_size]
            block = request.blocks[column]
            if prefix not in self._cached:
                self._cached[prefix] = block
                self._hash_of[block] = prefix
        return Share(request.request_id, tuple(request.blocks), start, request.computed, hit)

    def _hits(self, request: TinyRequest) -> list[int]:
        hits = []
        for end in range(self.block_size, len(request.tokens), self.block_size):
            block = self._cached.get(request.tokens[:end])
            if block is None:
                break
            hits.append(block)
        return hits

    def _grow(self, request: TinyRequest, num_tokens: int) -> bool:
        needed = -(-(request.computed + num_tokens) // self.block_size) - len(request.blocks)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            block = self._free[0]
            if (evicted := self._hash_of.pop(block, None)) is not None:
                self.seen["evicted"] += 1
                del self._cached[evicted]
            self._use(block)
            self._new.append(block)
            request.blocks.append(block)
        return True

    def _use(self, block: int) -> None:
        self._users[block] += 1
        if block in self._free:
            self._free.remove(block)

    def _release(self, request: TinyRequest) -> None:
        for block in reversed(request.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        request.blocks, request.computed = [], 0

    def _preempt(self, request: TinyRequest) -> None:
        self.seen["preempted"] += 1
        self._release(request)
        self.waiting.insert(0, request)
