"""The pool of a real engine, rebuilt from its events: every block in every step."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.engine.launch import Engine
from omnicache_cli.engine.options import EngineOptions
from omnicache_cli.engine.tracing import tracing
from omnicache_cli.trace.pool import CACHED, FREE, IN_USE, SHARED, BlockPool
from omnicache_cli.trace.records import AnyEvent, CacheReset, Evicted, Finished, Preempted
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Step
from omnicache_cli.trace.summary import summarize
from omnicache_cli.trace.views import show_view
from tests.engine.test_trace import ARGS, WORKLOAD

LivePool = list[tuple[int, bool]]
"""Reference count, and whether it has a hash, of every block."""


@contextmanager
def live_pools() -> Iterator[list[LivePool]]:
    """Copies the pool after every schedule() that scheduled tokens, while the block runs."""
    from vllm.v1.core.sched.scheduler import Scheduler

    seen: list[LivePool] = []
    original = Scheduler.schedule

    def copying(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            blocks = self.kv_cache_manager.block_pool.blocks
            seen.append([(block.ref_cnt, block.block_hash is not None) for block in blocks])
        return output

    Scheduler.schedule = copying
    try:
        yield seen
    finally:
        Scheduler.schedule = original


def state_of(ref_cnt: int, is_cached: bool) -> int:
    if ref_cnt:
        return SHARED if ref_cnt > 1 else IN_USE
    return CACHED if is_cached else FREE


class Traced:
    """The workload of test_trace.py, a reset of the prefix cache, and the workload again."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        with (
            tracing(folder),
            Engine(EngineOptions(str(model), ARGS)) as engine,
            live_pools() as self.live,
        ):
            engine.run(WORKLOAD)
            assert engine._engine.reset_prefix_cache()
            engine.run(WORKLOAD)
        self.steps = list(Run(folder).steps())


@pytest.fixture(scope="module")
def traced(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return Traced(tiny_text_model, tmp_path_factory.mktemp("pool") / "run")


def events_of(step: Step) -> list[AnyEvent]:
    return step.before + step.record.events + step.after


def test_the_run_has_all_that_changes_a_pool(traced: Traced) -> None:
    """Otherwise the tests around this one prove less than they say."""
    events = [event for step in traced.steps for event in events_of(step)]
    for kind in (Evicted, Preempted, Finished, CacheReset):
        assert any(isinstance(event, kind) for event in events), kind
    assert any(one.resumed for step in traced.steps for one in step.scheduled)
    states = {state_of(*block) for pool in traced.live for block in pool[1:]}
    assert states == {FREE, CACHED, IN_USE, SHARED}


def test_every_block_is_in_every_step_what_it_was_in_the_engine(traced: Traced) -> None:
    states: dict[int, int] = {}

    def moved(block: int, old: int, new: int) -> None:
        assert states.get(block, FREE) == old
        states[block] = new

    pool = BlockPool(traced.steps[0].engine, moved=moved)
    assert len(traced.steps) == len(traced.live)
    for step, live in zip(traced.steps, traced.live, strict=True):
        assert pool.add(step) == step.record.num_free_blocks
        assert [states.get(block, FREE) for block in range(1, len(live))] == [
            state_of(*block) for block in live[1:]
        ]
    assert (pool.num_disagreements, pool.num_steps) == (0, len(traced.live))


def test_the_views_agree_with_each_other_and_with_the_summary(traced: Traced) -> None:
    (blocks,) = show_view(Run(traced.folder), mode="--blocks").report.result["engines"]
    summary = summarize(Run(traced.folder))
    (pool,) = summary.pools.values()
    evictions = show_view(Run(traced.folder), mode="--evictions").report.result
    requests = show_view(Run(traced.folder), mode="--requests").report.result["requests"]

    assert blocks["steps_that_disagree"] == 0
    assert blocks["mean_blocks_in_use"] / blocks["usable_blocks"] == pytest.approx(pool.mean)
    assert blocks["peak_blocks_in_use"] / blocks["usable_blocks"] == pool.peak
    assert blocks["evicted_blocks"] == summary.evicted_blocks == evictions["num_evictions"]
    assert sum(use["evicted_step"] is not None for use in blocks["uses"]) == summary.evicted_blocks
    assert sum(row["hit_tokens"] for row in requests) == summary.hit_tokens
    assert sum(row["computed_tokens"] for row in requests) == summary.scheduled_tokens
    assert sum(row["num_preemptions"] for row in requests) == summary.preemptions
    hit_blocks = (summary.hit_tokens + summary.resumed_hit_tokens) // 32
    assert blocks["hit_blocks"] == hit_blocks


def test_a_regretted_eviction_made_the_request_compute_more(traced: Traced) -> None:
    """Whoever needed an evicted hash again had a hit that ends before it."""
    result = show_view(Run(traced.folder), mode="--evictions", every_row=True).report.result
    needed = [one for one in result["evictions"] if one["needed_again"] is not None]
    assert needed
    admitted = {
        (step.number, one.request.number): one
        for step in traced.steps
        for one in step.scheduled
        if one.hit_tokens is not None
    }
    for one in needed:
        share = admitted[one["needed_again"]["step"], one["needed_again"]["request"]]
        place = share.request.record.block_hashes.index(one["hash"])
        assert share.hit_tokens is not None
        assert share.hit_tokens <= place * 32
        assert share.resumed == one["needed_again"]["resumed"]
