"""The tensor cache against a dictionary, under a tiny scheduler with a pool that is too small."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the tensor cache runs beside vLLM, which brings torch")

from omnicache_cli.tensor_cache import (  # noqa: E402
    PlainCopies,
    RequestRows,
    RowsMissingError,
    StepLayout,
    TensorCache,
)
from tests.unit.tensor_cache_kit import LateCopies, TinyRequest, TinyScheduler  # noqa: E402

KEYS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "hidden": (torch.float32, (3,)),
    "layer": (torch.bfloat16, (5,)),
    "codes": (torch.int64, (1,)),
    "heads": (torch.int16, (2, 2)),
}

MAX_TOKENS = 14  # of a request


class Model:
    """Rows by (block, its generation, offset): what a cache without any cleverness would hold."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.generation: Counter[int] = Counter()
        self.rows: dict[str, dict[tuple[int, int, int], Any]] = {}
        self.payload_keys: set[str] = set()

    def place(self, slot: int) -> tuple[int, int, int]:
        block, offset = divmod(slot, self.block_size)
        return block, self.generation[block], offset

    def drop(self, blocks: Any) -> None:
        self.generation.update(set(blocks))

    def forget(self, slots: list[int]) -> None:
        for rows in self.rows.values():
            for slot in slots:
                rows.pop(self.place(slot), None)

    def save(self, slots: list[int], outputs: dict[str, Any]) -> None:
        self.forget(slots)
        for key, value in outputs.items():
            rows = self.rows.setdefault(key, {})
            for slot, row in zip(slots, value.tolist(), strict=False):
                rows[self.place(slot)] = row

    def expected(self, key: str, request: RequestRows) -> list[Any]:
        """The rows of `materialize`; None for one that is not there."""
        first = request.num_computed_tokens if request.hit_tokens is None else 0
        slots = (
            request.block_ids[position // self.block_size] * self.block_size
            + position % self.block_size
            for position in range(first, request.end)
        )
        return [self.rows[key].get(self.place(slot)) for slot in slots]


class Run:
    """One random run: the same steps for the cache and for the model."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.block_size = rng.choice([1, 2, 4])
        self.model = Model(self.block_size)
        num_blocks = MAX_TOKENS // self.block_size + rng.randint(1, 5)
        self.scheduler = TinyScheduler(rng, self.block_size, num_blocks)
        self.copies = rng.choice([None, PlainCopies(), LateCopies()])
        self.budget = rng.choice([0, 100, 10**6])
        self.cache = TensorCache(
            self.block_size, deferred_bytes=self.budget, device_copies=self.copies
        )
        self.counter = 0
        self.seen = self.scheduler.seen

    def request(self, number: int) -> TinyRequest:
        shared = [0] * self.rng.randint(0, MAX_TOKENS - 6)
        own = [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 6))]
        return TinyRequest(f"r{number}", tuple(shared + own))

    def go(self, num_requests: int) -> None:
        arriving = [self.request(number) for number in range(num_requests)]
        for _ in range(200):
            while arriving and self.rng.random() < 0.6:
                self.scheduler.waiting.append(arriving.pop())
            if not (arriving or self.scheduler.waiting or self.scheduler.running):
                break
            self.step(self.scheduler.schedule(budget=self.rng.randint(1, 12)))
            ended = self.scheduler.end_step()
            (self.cache.finish if self.rng.random() < 0.7 else self.cache.abort)(ended)
        else:
            raise AssertionError("the tiny scheduler does not end")
        self.cache.commit()
        stats = self.cache.stats()
        assert stats.deferred_bytes == 0
        live = {
            key: [place for place in rows if place[1] == self.model.generation[place[0]]]
            for key, rows in self.model.rows.items()
        }
        assert {key: one.rows for key, one in stats.keys.items()} == {
            key: len(places) for key, places in live.items()
        }

    def step(self, layout: StepLayout) -> None:
        if self.rng.random() < 0.3:
            self.cache.drop_blocks(layout.new_block_ids)
        if isinstance(self.copies, LateCopies) and self.rng.random() < 0.3:
            self.copies.arrive()
        self.cache.begin_step(layout)
        self.model.drop(layout.new_block_ids)
        slots = layout.slot_mapping[: layout.num_tokens].tolist()
        if self.rng.random() < 0.05:
            self.seen["unsaved"] += 1
            self.model.forget(slots)
            return
        outputs = self.outputs(layout)
        self.save(layout, slots, outputs)
        for request in layout.requests:
            if self.rng.random() < 0.8:
                self.compare(request)

    def outputs(self, layout: StepLayout) -> dict[str, Any]:
        outputs = {}
        for key, (dtype, tail) in KEYS.items():
            if self.rng.random() < 0.05:
                continue
            num_rows = self.rng.choice([layout.num_tokens, layout.num_tokens_padded])
            size = num_rows * torch.Size(tail).numel()
            values = torch.arange(self.counter, self.counter + size) % 251
            self.counter += size
            outputs[key] = values.to(dtype).view(num_rows, *tail)
        if layout.num_tokens and outputs and self.rng.random() < 0.02:
            key = self.rng.choice(list(outputs))
            if key in self.model.rows:
                self.seen["demoted"] += 1
            outputs[key] = torch.zeros(layout.num_tokens_padded + 1, 2)
        return outputs

    def save(self, layout: StepLayout, slots: list[int], outputs: dict[str, Any]) -> None:
        rows = {}
        if layout.num_tokens:
            for key, value in outputs.items():
                if len(value) == layout.num_tokens_padded + 1:
                    self.model.payload_keys.add(key)
                    self.model.rows.pop(key, None)
                elif key not in self.model.payload_keys:
                    rows[key] = value
        self.model.save(slots, rows)
        saved = self.cache.save(outputs)
        assert saved.stored == tuple(rows)
        assert saved.payload == {key: outputs[key] for key in outputs.keys() - rows}
        for value in outputs.values():
            value.fill_(0)  # the engine uses its buffers again

    def compare(self, request: RequestRows) -> None:
        step = self.cache._step
        assert step is not None
        assert step.saved is not None
        for key in step.saved.stored:
            expected = self.model.expected(key, request)
            missing = [index for index, row in enumerate(expected) if row is None]
            if not missing:
                self.seen["compared"] += 1
                got = self.cache.materialize(request.request_id, [key])
                assert got.rows[key].tolist() == expected
                continue
            self.seen["missing"] += 1
            with pytest.raises(RowsMissingError) as raised:
                self.cache.materialize(request.request_id)
            with pytest.raises(RowsMissingError) as raised:
                self.cache.materialize(request.request_id, [key])
            error = raised.value
            block = request.block_ids[missing[0] // self.block_size]
            assert (error.key, error.position, error.block) == (key, missing[0], block)
            assert (error.num_missing, error.num_wanted) == (len(missing), len(expected))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=True), st.integers(1, 12))
def test_the_cache_is_a_dictionary_of_rows(rng: Random, num_requests: int) -> None:
    Run(rng).go(num_requests)


def test_the_random_runs_see_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        run = Run(Random(seed))
        run.go(12)
        seen += run.seen

    kinds = [
        *("hit", "same-step hit", "chunked hit", "evicted", "preempted", "again"),
        *("unsaved", "demoted", "missing", "compared"),
    ]
    assert [kind for kind in kinds if seen[kind] <= 10] == []
