"""What the tensor cache costs beside a plain copy, and beside vLLM-Omni's own cache.

Rows of 2,048 bf16 values go to the slots of a pool four times as large, through block tables that
are shuffled over it. The conditions take turns, so that a noisy machine disturbs all of them alike:

    plain        index_copy_ / index_select of the same rows at the same slots, and nothing else
    plain_again  the same, to measure the noise (A/A)
    fresh        begin_step and save / materialize; blocks are new in each step, as an engine's are
    scattered    the same into blocks whose frames were given out in another order, so that no two
                 blocks of a request lie side by side in memory
    omni         vLLM-Omni's OmniPrefixCacheManager, where it is installed: all its calls of a step

A restore reads a prefix hit of all blocks but the last, and the step's rows of the last.

Prints one JSON object. Ratios are plain over ours, or omni over ours: 2 is twice as fast.

Run: python benchmarks/tensor_cache.py [--turns N] [--threads N]
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from omnicache_cli.tensor_cache import RequestRows, StepLayout, TensorCache

WIDTH = 2048
TOKENS = (64, 1024, 8192)
BLOCK_SIZES = (16, 32)
POOL = 4  # times as many slots as tokens
BAR = 0.8
KEY = "hidden"


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Tables:
    """Disjoint shuffled block tables over one pool, taken in turn so that no cache stays warm."""

    def __init__(self, num_tokens: int, block_size: int) -> None:
        self.num_tokens = num_tokens
        self.block_size = block_size
        self.num_blocks = POOL * num_tokens // block_size
        self.shuffled = torch.randperm(self.num_blocks)
        self.tables = self.shuffled.view(POOL, -1)
        self._turn = 0

    def next(self) -> Tensor:
        self._turn += 1
        return self.tables[self._turn % POOL]

    def slots(self, table: Tensor) -> Tensor:
        return (table[:, None] * self.block_size + torch.arange(self.block_size)).reshape(-1)

    def layout(self, table: Tensor, hit_tokens: int, *, fresh: bool) -> StepLayout:
        """A step of one request that computes what it did not hit."""
        slots = self.slots(table)[hit_tokens:]
        num_tokens = len(slots)
        blocks = tuple(table.tolist())
        new = blocks[hit_tokens // self.block_size :] if fresh else ()
        request = RequestRows("r", 0, num_tokens, hit_tokens, hit_tokens, blocks)
        return StepLayout(1, slots, num_tokens, num_tokens, (request,), new)


def filled(tables: Tables, order: Tensor) -> TensorCache:
    """A cache with rows for the whole pool, its frames given out in this order of blocks."""
    cache = TensorCache(tables.block_size)
    layout = tables.layout(order, 0, fresh=True)
    cache.begin_step(layout)
    cache.save({KEY: torch.zeros(layout.num_tokens, WIDTH, dtype=torch.bfloat16)})
    return cache


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e3


def step(cache: TensorCache, layout: StepLayout, rows: Tensor) -> None:
    cache.begin_step(layout)
    cache.save({KEY: rows})


def against_plain(tables: Tables, turns: int) -> dict[str, Any]:
    rows = torch.randn(tables.num_tokens, WIDTH).to(torch.bfloat16)
    pool = torch.zeros(tables.num_blocks * tables.block_size, WIDTH, dtype=torch.bfloat16)
    caches = {
        "fresh": filled(tables, tables.shuffled),
        "scattered": filled(tables, torch.randperm(tables.num_blocks)),
    }
    hit = tables.num_tokens - tables.block_size
    writes: dict[str, list[float]] = {name: [] for name in ("plain", "plain_again", *caches)}
    reads: dict[str, list[float]] = {name: [] for name in writes}
    for turn in range(turns + 2):
        table = tables.next()
        slots = tables.slots(table)
        taken: dict[str, tuple[float, float]] = {}
        for name in random.sample(list(writes), len(writes)):
            if name in caches:
                cache, fresh = caches[name], name == "fresh"
                layout = tables.layout(table, 0, fresh=fresh)
                write = timed(lambda: step(cache, layout, rows))  # noqa: B023
                step(cache, tables.layout(table, hit, fresh=fresh), rows[hit:])
                read = timed(lambda: cache.materialize("r"))  # noqa: B023
                assert torch.equal(cache.materialize("r").rows[KEY], rows)
            else:
                write = timed(lambda: pool.index_copy_(0, slots, rows))  # noqa: B023
                read = timed(lambda: pool.index_select(0, slots))  # noqa: B023
            taken[name] = write, read
        if turn >= 2:  # the first two turns warm everything up
            for name, (write, read) in taken.items():
                writes[name].append(write)
                reads[name].append(read)
    return {"write": ratios(writes), "restore": ratios(reads)}


def ratios(times: dict[str, list[float]]) -> dict[str, Any]:
    def over(name: str) -> list[float]:
        return [plain / other for plain, other in zip(times["plain"], times[name], strict=True)]

    noise = over("plain_again")
    return {
        "plain_us": round(statistics.median(times["plain"]), 1),
        "fresh_us": round(statistics.median(times["fresh"]), 1),
        "fresh_ratio": round(statistics.median(over("fresh")), 3),
        "scattered_ratio": round(statistics.median(over("scattered")), 3),
        "aa_median": round(statistics.median(noise), 3),
        "aa_spread": [round(quantile(noise, share), 3) for share in (0.05, 0.95)],
    }


class Omni:
    """vLLM-Omni's manager, driven through its public calls as its model runner does."""

    def __init__(self, tables: Tables) -> None:
        from vllm_omni.core.prefix_cache import (
            ModelCachePolicy,
            OmniPrefixCacheManager,
            PrefixCacheConfig,
        )
        from vllm_omni.core.prefix_cache.group_view import FullAttentionGroupView

        self._table = torch.zeros((1, tables.num_tokens // tables.block_size), dtype=torch.int32)
        self._batch = SimpleNamespace(
            block_table=[SimpleNamespace(block_table=SimpleNamespace(cpu=self._table))],
            num_computed_tokens_cpu=[0],
            req_ids=[],
            req_id_to_index={},
        )
        config = PrefixCacheConfig(
            num_blocks=tables.num_blocks,
            block_size=tables.block_size,
            staging_capacity_tokens=tables.num_tokens,
        )
        view = FullAttentionGroupView(self._batch, tables.block_size)
        self._manager = OmniPrefixCacheManager(config, view)
        self._manager.register_policy(ModelCachePolicy())
        self._last = 0

    def step(
        self, table: Tensor, hit: int, rows: Tensor, *, forward_s: float | None = None
    ) -> tuple[float, Tensor]:
        """us of all three calls and the rows; `forward_s` passes uncounted behind the first."""
        finished, self._last = f"r{self._last}", self._last + 1
        name = f"r{self._last}"
        self._batch.req_ids, self._batch.req_id_to_index = [name], {name: 0}
        self._batch.num_computed_tokens_cpu[0] = hit
        self._table[0] = table
        output = SimpleNamespace(
            finished_req_ids={finished},
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=hit, block_ids=[table.tolist()])
            ],
            num_scheduled_tokens={name: len(rows)},
        )
        started = time.perf_counter_ns()
        self._manager.new_step_starts(output)
        spent = time.perf_counter_ns() - started
        if forward_s is not None:
            time.sleep(forward_s)
        started = time.perf_counter_ns()
        step_id = self._manager.save_outputs(
            rows, {}, num_tokens_unpadded=len(rows), num_tokens_padded=len(rows)
        )
        states = self._manager.materialize(step_id, [name]).hidden_states
        spent += time.perf_counter_ns() - started
        assert states is not None
        return spent / 1e3, states[name]

    def close(self) -> None:
        self._manager.shutdown()


def against_omni(tables: Tables, turns: int) -> dict[str, Any]:
    """A cold step, a step with a hit, and one whose hit is read while a forward pass would run."""
    rows = torch.randn(tables.num_tokens, WIDTH).to(torch.bfloat16)
    hit = tables.num_tokens - tables.block_size
    omni, cache = Omni(tables), filled(tables, tables.shuffled)
    times: dict[str, list[tuple[float, float]]] = {"cold": [], "hit": [], "hit_in_forward": []}
    for turn in range(turns + 2):
        table = tables.next()
        for name, taken in times.items():
            start = 0 if name == "cold" else hit
            forward_s = 0.05 if name == "hit_in_forward" else None
            theirs, got = omni.step(table, start, rows[start:], forward_s=forward_s)
            assert torch.equal(got, rows)
            layout = tables.layout(table, start, fresh=True)

            def ours() -> None:
                step(cache, layout, rows[start:])  # noqa: B023
                cache.materialize("r")

            if turn >= 2:
                taken.append((theirs, timed(ours)))
            else:
                ours()
    omni.close()
    return {
        name: {
            "omni_us": round(statistics.median(theirs for theirs, _ in taken), 1),
            "ours_us": round(statistics.median(ours for _, ours in taken), 1),
            "ratio": round(statistics.median(theirs / ours for theirs, ours in taken), 3),
        }
        for name, taken in times.items()
    }


def version_of(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    return str(__import__(module).__version__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    random.seed(0)
    omni_version = version_of("vllm_omni")
    results = []
    for num_tokens in TOKENS:
        for block_size in BLOCK_SIZES:
            tables = Tables(num_tokens, block_size)
            result: dict[str, Any] = {"tokens": num_tokens, "block_size": block_size}
            result |= against_plain(tables, arguments.turns)
            result["omni"] = against_omni(tables, arguments.turns) if omni_version else None
            print(json.dumps(result), file=sys.stderr)
            results.append(result)
    lowest = min(
        result[what][kind]
        for result in results
        if result["tokens"] > TOKENS[0]
        for what in ("write", "restore")
        for kind in ("fresh_ratio", "scattered_ratio")
    )
    summary = {
        "benchmark": "tensor_cache",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm_omni": omni_version,
        "cpus": os.cpu_count(),
        "threads": arguments.threads,
        "turns": arguments.turns,
        "row_bytes": 2 * WIDTH,
        "lowest_ratio": lowest,
        "bar": BAR,
        "results": results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
