"""A model made of a hash function, with a prefix cache and a tensor cache that can be damaged.

Stands beside `tests/engine/test_verify.py`, which does the same on a real engine.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from omnicache_cli.trace.workload import Lora, Prompt
from omnicache_cli.verify.run import Shape
from omnicache_cli.verify.runs import Computed, Delivered, How, RequestRun, RunRows, SampledToken

WIDTH = 8
KEYS = ("hidden_states", "layers.0")


def row_of(tokens: Sequence[int], key: str, noise: float = 0.0, where: str = "") -> Tensor:
    """(WIDTH,) of the last of these tokens. The noise depends on where it was computed."""
    digest = hashlib.blake2b(repr((tuple(tokens), key)).encode(), digest_size=WIDTH).digest()
    row = torch.tensor([byte / 32 - 4 for byte in digest], dtype=torch.float32)
    if not noise:
        return row
    bump = hashlib.blake2b(repr((tuple(tokens), key, where)).encode(), digest_size=WIDTH).digest()
    return row * (1 + noise * torch.tensor([byte / 128 - 1 for byte in bump]))


@dataclass
class FakeSession:
    """`damage` may change what a cache delivers; `noise` is relative, per batch shape."""

    block_size: int = 4
    noise: float = 0.0
    damage: Callable[[Delivered], Delivered] = lambda piece: piece
    caching: bool = True
    keys: Sequence[str] = KEYS
    _cached: dict[tuple[Any, ...], int] = field(default_factory=dict)  # tokens up to -> block
    _salt: str | None = None
    _lora: Lora | None = None
    _stored: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # key, slot -> row
    _next_block: int = 1
    _step: int = 0

    def empty_cache(self) -> None:
        self._cached.clear()

    def limited_pool(self, num_blocks: int | None) -> AbstractContextManager[None]:
        return nullcontext()

    def with_cache(self, prompts: Mapping[str, Prompt], max_tokens: int, how: How) -> RunRows:
        """One after the other, whatever is asked: a batch has no meaning here."""
        run = RunRows(num_resumed=1)
        for name, prompt in prompts.items():
            self._salt = prompt.cache_salt
            self._lora = prompt.lora
            self._serve(run, name, list(prompt.token_ids or ()), max_tokens)
        return run

    def without_cache(
        self, prompts: Mapping[str, Prompt], max_tokens: int, shape: Shape, cut: Mapping[str, int]
    ) -> RunRows:
        run = RunRows()
        for name, prompt in prompts.items():
            if shape is Shape.CUT and name not in cut:
                continue
            self._lora = prompt.lora
            tokens = self._decoded(list(prompt.token_ids or ()), max_tokens)
            rows = self._rows(tokens, 0, len(tokens) - 1, shape)
            slots = tuple(range(len(tokens) - 1))
            run.computed.append(Computed(self._step, name, 0, slots, rows))
            run.requests[name] = self._finished(name, tokens, max_tokens, 0)
            self._step += 1
        return run

    def _serve(self, run: RunRows, name: str, prompt: list[int], max_tokens: int) -> None:
        size = self.block_size
        tokens = self._decoded(prompt, max_tokens)
        table: list[int] = []
        while self.caching and (len(table) + 1) * size < len(prompt):
            block = self._cached.get(self._hash(prompt[: (len(table) + 1) * size]))
            if block is None:
                break
            table.append(block)
        hit = len(table) * size
        while len(table) * size < len(tokens):
            table.append(self._next_block)
            self._next_block += 1
        slots = [table[p // size] * size + p % size for p in range(len(tokens) - 1)]
        new = self._rows(tokens, hit, len(tokens) - 1, "warm")
        for key, rows in new.items():
            for offset, row in enumerate(rows):
                self._stored[key, slots[hit + offset]] = row
        for end in range(size, len(tokens), size):
            self._cached.setdefault(self._hash(tokens[:end]), table[end // size - 1])
        full = {
            key: torch.stack([self._stored[key, slot] for slot in slots[:hit]] + list(rows))
            for key, rows in new.items()
        }
        run.computed.append(Computed(self._step, name, hit, tuple(slots[hit:]), new))
        piece = Delivered(self._step, name, hit, 0, tuple(slots[:hit]), full)
        run.delivered.append(self.damage(piece))
        run.requests[name] = self._finished(name, tokens, max_tokens, hit)
        self._step += 1

    def _hash(self, tokens: Sequence[int]) -> tuple[Any, ...]:
        extra = [one for one in (self._salt, self._lora) if one is not None]
        return (*extra, *tokens)

    def _rows(self, tokens: list[int], first: int, end: int, where: str) -> dict[str, Tensor]:
        return {
            key: torch.stack(
                [
                    row_of(tokens[: p + 1], self._key(key), self.noise, where)
                    for p in range(first, end)
                ]
            )
            for key in self.keys
        }

    def _key(self, key: str) -> str:
        return key if self._lora is None else f"{key} of {self._lora.label}"

    def _decoded(self, prompt: list[int], max_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(int(row_of(tokens, self._key("token"))[0] * 32 + 128))
        return tokens

    def _finished(self, name: str, tokens: list[int], max_tokens: int, hit: int) -> RequestRun:
        sampled = tuple(SampledToken(one, -1.0, 0.5) for one in tokens[-max_tokens:])
        return RequestRun(name, len(tokens) - max_tokens, hit, sampled)


def change_rows(piece: Delivered, key: str, change: Callable[[Tensor], Tensor]) -> Delivered:
    """The piece with other rows under one key."""
    return replace(piece, rows={**piece.rows, key: change(piece.rows[key].clone())})
