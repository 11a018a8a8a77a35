"""The wrappers around vLLM's KVCacheManager and BlockPool, see `hooks` for the rules."""

import functools
import time
from typing import Any

from omnicache_cli.engine.adapter import group_hit_tokens
from omnicache_cli.engine.probe.scheduler import SchedulerProbe
from omnicache_cli.engine.probe.wrapping import Hooks, Method, given, guarded, probe_of

_FULL_BLOCKS = (
    *("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size"),
    *("kv_cache_group_id", "block_mask"),
)
"""Arguments of `cache_full_blocks`; the last one may be left out."""


def for_request(original: Method) -> Method:
    """Around methods whose pool events belong to the request in their first argument."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, *args, **kwargs)
        with guarded(probe.recorder, f"KVCacheManager.{original.__name__}"):
            probe.request = given(args, kwargs, 0, "request")
        try:
            return original(self, *args, **kwargs)
        finally:
            probe.request = None

    return method


def allocate_slots(original: Method) -> Method:
    """As `for_request`, and timed. Called for every request of every step: kept short."""

    @functools.wraps(original)
    def allocate_slots(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, *args, **kwargs)
        probe.request = args[0] if args else kwargs.get("request")
        started = time.perf_counter_ns()
        try:
            return original(self, *args, **kwargs)
        finally:
            probe.allocate_ns += time.perf_counter_ns() - started
            probe.request = None

    return allocate_slots


def get_computed_blocks(original: Method) -> Method:
    @functools.wraps(original)
    def get_computed_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, *args, **kwargs)
        started = time.perf_counter_ns()
        result = original(self, *args, **kwargs)
        ended = time.perf_counter_ns()
        with guarded(probe.recorder, "KVCacheManager.get_computed_blocks"):
            probe.lookup_ns += ended - started
            request = given(args, kwargs, 0, "request")
            probe.group_hits(request, group_hit_tokens(self, request))
        return result

    return get_computed_blocks


def record_prefix_cache_stats(original: Method) -> Method:
    @functools.wraps(original)
    def record_prefix_cache_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "KVCacheManager.record_prefix_cache_stats"):
                request = given(args, kwargs, 0, "request")
                asked = self.prefix_cache_lookup_enabled(request)
                num_hits = given(args, kwargs, 1, "num_hits")
                probe.lookup(request, request.num_tokens if asked else 0, num_hits)
        return original(self, *args, **kwargs)

    return record_prefix_cache_stats


def get_new_blocks(original: Method) -> Method:
    @functools.wraps(original)
    def get_new_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = original(self, *args, **kwargs)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "BlockPool.get_new_blocks"):
                probe.allocate(blocks)
        return blocks

    return get_new_blocks


def maybe_evict_cached_block(original: Method) -> Method:
    @functools.wraps(original)
    def _maybe_evict_cached_block(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, *args, **kwargs)
        hashes: list[bytes] = []
        with guarded(probe.recorder, "BlockPool._maybe_evict_cached_block"):
            block = given(args, kwargs, 0, "block")
            if block.block_hash is not None:
                hashes.append(block.block_hash)
            hashes += self.cached_block_hashes_by_block.get(block.block_id, ())
        evicted = original(self, *args, **kwargs)
        if evicted and hashes:
            with guarded(probe.recorder, "BlockPool._maybe_evict_cached_block"):
                probe.evict(given(args, kwargs, 0, "block").block_id, hashes)
        return evicted

    return _maybe_evict_cached_block


def cache_full_blocks(original: Method) -> Method:
    @functools.wraps(original)
    def cache_full_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "BlockPool.cache_full_blocks"):
                named = {"block_mask": None} | dict(zip(_FULL_BLOCKS, args, strict=False)) | kwargs
                if named["num_cached_blocks"] < named["num_full_blocks"]:
                    probe.cache(*(named[name] for name in _FULL_BLOCKS))
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
                probe.cache_partial(*(given(args, kwargs, *one) for one in enumerate(names)))
        return result

    return cache_partial_block


def move_block_hashes(original: Method) -> Method:
    @functools.wraps(original)
    def move_block_hashes(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "BlockPool.move_block_hashes"):
                source, target = (
                    given(args, kwargs, *one) for one in enumerate(("src_block", "dst_block"))
                )
                probe.move_hashes(source.block_id, target.block_id)
        return result

    return move_block_hashes


def free_blocks(original: Method) -> Method:
    """The blocks may be an iterator, which only one of us can read: vLLM gets a list of them."""

    @functools.wraps(original)
    def free_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        blocks: list[Any] | None = None
        if probe is not None and args:
            blocks = list(args[0])
            args = (blocks, *args[1:])
        elif probe is not None and "ordered_blocks" in kwargs:
            blocks = kwargs["ordered_blocks"] = list(kwargs["ordered_blocks"])
        result = original(self, *args, **kwargs)
        if probe is not None:
            with guarded(probe.recorder, "BlockPool.free_blocks"):
                if blocks is None:
                    raise LookupError("ordered_blocks")
                probe.free(blocks)
        return result

    return free_blocks


def pool_reset(original: Method) -> Method:
    @functools.wraps(original)
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        successful = original(self, *args, **kwargs)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "BlockPool.reset_prefix_cache"):
                probe.reset(successful=bool(successful))
        return successful

    return reset_prefix_cache


HOOKS: Hooks = {
    "vllm.v1.core.kv_cache_manager": {
        "KVCacheManager": {
            "allocate_slots": allocate_slots,
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
}
