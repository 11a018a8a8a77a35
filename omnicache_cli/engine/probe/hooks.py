"""The wrappers around vLLM's methods: which method, and what the probe does around it.

Each wrapper calls vLLM's method exactly once with its own arguments and returns what it
returned. Everything of ours runs guarded: an error is counted and vLLM goes on.
"""

import functools
import multiprocessing
import time
from collections.abc import Iterable
from typing import Any

from omnicache_cli.engine.adapter import group_hit_tokens
from omnicache_cli.engine.probe import hooks_v2
from omnicache_cli.engine.probe import recorder as recording
from omnicache_cli.engine.probe.live import read_batch
from omnicache_cli.engine.probe.runner import RunnerProbe
from omnicache_cli.engine.probe.scheduler import SchedulerProbe
from omnicache_cli.engine.probe.wrapping import (
    PROBE_ATTRIBUTE,
    Method,
    Wrap,
    cover,
    guarded,
    probe_of,
)

# -- scheduler ------------------------------------------------------------------------------------


def scheduler_init(original: Method) -> Method:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        recorder = recording.current()
        if recorder is None or probe_of(self) is not None:
            return
        with guarded(recorder, "Scheduler.__init__"):
            cover(type(self), "Scheduler", SCHEDULER_METHODS)
            probe = SchedulerProbe(recorder, self)
            manager = self.kv_cache_manager
            for traced in (manager.block_pool, manager, self):
                setattr(traced, PROBE_ATTRIBUTE, probe)

    return __init__


def schedule(original: Method) -> Method:
    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None or probe.busy:
            return original(self, *args, **kwargs)
        probe.busy = True
        started = time.perf_counter_ns()
        try:
            output = original(self, *args, **kwargs)
        finally:
            probe.busy = False
        ended = time.perf_counter_ns()
        with guarded(probe.recorder, "Scheduler.schedule"):
            probe.step(output, started, ended)
        return output

    return schedule


def flush_after(original: Method) -> Method:
    """Around methods that finish, abort or reset between steps."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None and not probe.busy:
            with guarded(probe.recorder, f"Scheduler.{original.__name__}"):
                probe.flush()
        return result

    return method


def last_of_process(original: Method) -> Method:
    """vLLM gives a child process seconds to tear down and then kills it: end its file first."""

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = recording.current()
        if recorder is not None and multiprocessing.parent_process() is not None:
            with guarded(recorder, "shutdown"):
                recorder.close()
        return original(self, *args, **kwargs)

    return shutdown


def add_request(original: Method) -> Method:
    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        # A session's last word ends it in here: afterwards it would look like a new request.
        goes_on = probe is not None and probe.is_live(request.request_id)
        result = original(self, request, *args, **kwargs)
        if probe is not None and not goes_on:
            with guarded(probe.recorder, "Scheduler.add_request"):
                probe.add_request(request)
        return result

    return add_request


def preempt_request(original: Method) -> Method:
    @functools.wraps(original)
    def _preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "Scheduler._preempt_request"):
                probe.preempt(request)
        return original(self, request, *args, **kwargs)

    return _preempt_request


def free_request(original: Method) -> Method:
    @functools.wraps(original)
    def _free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, request, *args, **kwargs)
        with guarded(probe.recorder, "Scheduler._free_request"):
            probe.finish(request)
        result = original(self, request, *args, **kwargs)
        with guarded(probe.recorder, "Scheduler._free_request"):
            probe.forget(request)
        return result

    return _free_request


# -- KV cache manager and block pool --------------------------------------------------------------


def for_request(original: Method) -> Method:
    """Around methods whose pool events belong to the request in their first argument."""

    @functools.wraps(original)
    def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, request, *args, **kwargs)
        probe.request = request
        try:
            return original(self, request, *args, **kwargs)
        finally:
            probe.request = None

    return method


def get_computed_blocks(original: Method) -> Method:
    @functools.wraps(original)
    def get_computed_blocks(self: Any, request: Any) -> Any:
        result = original(self, request)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "KVCacheManager.get_computed_blocks"):
                probe.group_hits(request, group_hit_tokens(self, request))
        return result

    return get_computed_blocks


def record_prefix_cache_stats(original: Method) -> Method:
    @functools.wraps(original)
    def record_prefix_cache_stats(self: Any, request: Any, num_hits: int) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "KVCacheManager.record_prefix_cache_stats"):
                asked = self.prefix_cache_lookup_enabled(request)
                probe.lookup(request, request.num_tokens if asked else 0, num_hits)
        return original(self, request, num_hits)

    return record_prefix_cache_stats


def get_new_blocks(original: Method) -> Method:
    @functools.wraps(original)
    def get_new_blocks(self: Any, num_blocks: int) -> Any:
        blocks = original(self, num_blocks)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "BlockPool.get_new_blocks"):
                probe.allocate(blocks)
        return blocks

    return get_new_blocks


def maybe_evict_cached_block(original: Method) -> Method:
    @functools.wraps(original)
    def _maybe_evict_cached_block(self: Any, block: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, block)
        hashes: list[bytes] = []
        with guarded(probe.recorder, "BlockPool._maybe_evict_cached_block"):
            if block.block_hash is not None:
                hashes.append(block.block_hash)
            hashes += self.cached_block_hashes_by_block.get(block.block_id, ())
        evicted = original(self, block)
        if evicted and hashes:
            with guarded(probe.recorder, "BlockPool._maybe_evict_cached_block"):
                probe.evict(block.block_id, hashes)
        return evicted

    return _maybe_evict_cached_block


def cache_full_blocks(original: Method) -> Method:
    @functools.wraps(original)
    def cache_full_blocks(
        self: Any,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> Any:
        result = original(
            self,
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None and num_cached_blocks < num_full_blocks:
            with guarded(probe.recorder, "BlockPool.cache_full_blocks"):
                probe.cache(
                    request,
                    blocks,
                    num_cached_blocks,
                    num_full_blocks,
                    block_size,
                    kv_cache_group_id,
                    block_mask,
                )
        return result

    return cache_full_blocks


def cache_partial_block(original: Method) -> Method:
    @functools.wraps(original)
    def cache_partial_block(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None and result is not None:
            with guarded(probe.recorder, "BlockPool.cache_partial_block"):
                names = ("request", "block", "num_tokens", "kv_cache_group_id")
                given = dict(zip(names, args, strict=False)) | kwargs
                probe.cache_partial(*(given[name] for name in names))
        return result

    return cache_partial_block


def move_block_hashes(original: Method) -> Method:
    @functools.wraps(original)
    def move_block_hashes(self: Any, src_block: Any, dst_block: Any) -> Any:
        result = original(self, src_block, dst_block)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "BlockPool.move_block_hashes"):
                probe.move_hashes(src_block.block_id, dst_block.block_id)
        return result

    return move_block_hashes


def free_blocks(original: Method) -> Method:
    @functools.wraps(original)
    def free_blocks(self: Any, ordered_blocks: Iterable[Any]) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, ordered_blocks)
        blocks = list(ordered_blocks)  # may be an iterator, which only one of us can read
        result = original(self, blocks)
        with guarded(probe.recorder, "BlockPool.free_blocks"):
            probe.free(blocks)
        return result

    return free_blocks


def pool_reset(original: Method) -> Method:
    @functools.wraps(original)
    def reset_prefix_cache(self: Any) -> Any:
        successful = original(self)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "BlockPool.reset_prefix_cache"):
                probe.reset(successful=bool(successful))
        return successful

    return reset_prefix_cache


# -- model runner ---------------------------------------------------------------------------------


def runner_init(original: Method) -> Method:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        recorder = recording.current()
        if recorder is None or probe_of(self) is not None:
            return
        with guarded(recorder, "GPUModelRunner.__init__"):
            cover(type(self), "GPUModelRunner", RUNNER_METHODS)
            setattr(self, PROBE_ATTRIBUTE, RunnerProbe(recorder, self))

    return __init__


def execute_model(original: Method) -> Method:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        probe: RunnerProbe | None = probe_of(self)
        if probe is None or probe.busy:
            return original(self, scheduler_output, *args, **kwargs)
        with guarded(probe.recorder, "GPUModelRunner.execute_model"):
            probe.begin(scheduler_output, time.perf_counter_ns())
        probe.busy = True
        try:
            result = original(self, scheduler_output, *args, **kwargs)
        finally:
            probe.busy = False
        with guarded(probe.recorder, "GPUModelRunner.execute_model"):
            probe.execute_done(sampled_later=result is None)
        return result

    return execute_model


def model_forward(original: Method) -> Method:
    @functools.wraps(original)
    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: RunnerProbe | None = probe_of(self)
        if (
            probe is None or not probe.busy or probe.forwarding
        ):  # not busy: a dummy or profiling run
            return original(self, *args, **kwargs)
        probe.forwarding = True
        with guarded(probe.recorder, "GPUModelRunner._model_forward"):
            from vllm.forward_context import get_forward_context

            now = time.perf_counter_ns()
            probe.forward(read_batch(self, get_forward_context()), now)
        started = time.perf_counter_ns()
        try:
            output = original(self, *args, **kwargs)
        finally:
            probe.forwarding = False
        ended = time.perf_counter_ns()
        with guarded(probe.recorder, "GPUModelRunner._model_forward"):
            probe.forward_done(ended - started)
        return output

    return _model_forward


def sample_tokens(original: Method) -> Method:
    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: RunnerProbe | None = probe_of(self)
        if probe is None or probe.busy:
            return original(self, *args, **kwargs)
        probe.busy = True
        started = time.perf_counter_ns()
        try:
            result = original(self, *args, **kwargs)
        finally:
            probe.busy = False
        ended = time.perf_counter_ns()
        with guarded(probe.recorder, "GPUModelRunner.sample_tokens"):
            probe.sample_done(ended - started)
        return result

    return sample_tokens


SCHEDULER_METHODS: dict[str, Wrap] = {
    "schedule": schedule,
    "add_request": add_request,
    "update_from_output": flush_after,
    "finish_requests": flush_after,
    "reset_prefix_cache": flush_after,
    "_preempt_request": preempt_request,
    "_free_request": free_request,
}
RUNNER_METHODS: dict[str, Wrap] = {
    "execute_model": execute_model,
    "_model_forward": model_forward,
    "sample_tokens": sample_tokens,
}
HOOKS: dict[str, dict[str, dict[str, Wrap]]] = {
    "vllm.v1.core.sched.scheduler": {
        "Scheduler": {"__init__": scheduler_init, **SCHEDULER_METHODS},
    },
    "vllm.v1.core.kv_cache_manager": {
        "KVCacheManager": {
            "allocate_slots": for_request,
            "free": for_request,
            "get_computed_blocks": get_computed_blocks,
            "record_prefix_cache_stats": record_prefix_cache_stats,
        },
    },
    "vllm.v1.core.block_pool": {
        "BlockPool": {
            "get_new_blocks": get_new_blocks,
            "_maybe_evict_cached_block": maybe_evict_cached_block,
            "cache_full_blocks": cache_full_blocks,
            "cache_partial_block": cache_partial_block,
            "move_block_hashes": move_block_hashes,
            "free_blocks": free_blocks,
            "reset_prefix_cache": pool_reset,
        },
    },
    "vllm.v1.engine.core": {"EngineCore": {"shutdown": last_of_process}},
    "vllm.v1.worker.worker_base": {"WorkerWrapperBase": {"shutdown": last_of_process}},
    "vllm.v1.worker.gpu_model_runner": {
        "GPUModelRunner": {"__init__": runner_init, **RUNNER_METHODS},
    },
    **hooks_v2.HOOKS,
}
"""vLLM module -> class -> method -> wrapper: every place where the probe touches vLLM."""
