"""The pool of blocks: how many there are, what a request takes of them, what fits.

Mirrors get_kv_cache_configs, get_kv_cache_config_from_groups, get_kv_cache_capacity and
_check_enough_kv_cache_memory (v1/core/kv_cache_utils.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from omnicache_cli.kv_size.groups import Group
from omnicache_cli.kv_size.hardware import GIB
from omnicache_cli.kv_size.options import Settings


@dataclass(frozen=True, slots=True)
class Worker:
    """One pipeline stage: the layers it holds, its bytes per block, its memory."""

    groups: tuple[Group, ...]
    bytes_per_block: int
    available_bytes: int | None
    num_blocks: int | None

    @property
    def checked_bytes(self) -> int | None:
        """What vLLM 0.30 plans with: one block is the null block (get_kv_cache_configs)."""
        if self.available_bytes is None:
            return None
        return self.available_bytes - self.bytes_per_block


@dataclass(frozen=True, slots=True)
class Pool:
    """The groups of the whole model, and the pool that its workers share block ids in."""

    groups: tuple[Group, ...]
    workers: tuple[Worker, ...]
    num_blocks: int | None  # the least of the workers; None where no memory is given

    @property
    def bytes_per_block(self) -> int:
        """Of the worker that limits the pool."""
        return max(worker.bytes_per_block for worker in self.workers)


def build_pool(
    groups: Sequence[Group],
    stages: Sequence[Sequence[str]],
    available: Sequence[int] | None,
    override: int | None,
) -> Pool:
    """`stages` names each worker's layers, `available` the bytes of each (or one for all)."""
    workers = []
    for rank, names in enumerate(stages):
        own = tuple(group.on(names) for group in groups) if len(stages) > 1 else tuple(groups)
        size = bytes_per_block(own)
        memory = None if available is None else available[rank % len(available)]
        blocks = memory // size if memory is not None and size else None
        if override is not None:
            blocks, memory = override, override * size
        workers.append(Worker(own, size, memory, blocks))
    counts = [worker.num_blocks for worker in workers if worker.num_blocks is not None]
    return Pool(tuple(groups), tuple(workers), min(counts) if counts else None)


def bytes_per_block(groups: Sequence[Group]) -> int:
    """_get_kv_cache_bytes_per_block: the widest group sets the stride of a block."""
    return max((group.bytes_per_block for group in groups), default=0)


def blocks_per_request(groups: Sequence[Group], settings: Settings, length: int) -> int:
    """get_max_concurrency_for_kv_cache_config: every group draws from the one pool."""
    return sum(group.reserved(settings, length) for group in groups)


def blocks_held_per_request(groups: Sequence[Group], settings: Settings, length: int) -> int:
    return sum(group.held(settings, length) for group in groups)


def max_concurrency(pool: Pool, settings: Settings) -> float | None:
    if pool.num_blocks is None or not pool.groups:
        return None
    return pool.num_blocks / blocks_per_request(pool.groups, settings, settings.max_model_len)


def kv_cache_tokens(pool: Pool, settings: Settings) -> int | None:
    """get_kv_cache_capacity: "KV cache size" since vLLM 0.20.2."""
    concurrency = max_concurrency(pool, settings)
    return None if concurrency is None else int(concurrency * settings.max_model_len)


def kv_cache_tokens_old(pool: Pool, settings: Settings) -> int | None:
    """ "KV cache size" up to vLLM 0.20.0: num_blocks // num_groups * block_size."""
    if pool.num_blocks is None or not pool.groups:
        return None
    block = min(group.block_size for group in pool.groups)
    return pool.num_blocks // len(pool.groups) * block * settings.decode_context_parallel_size


def needed_bytes(worker: Worker, settings: Settings, length: int) -> int:
    """_max_memory_usage_bytes_from_groups: one request of `length` tokens on this worker."""
    return worker.bytes_per_block * blocks_per_request(worker.groups, settings, length)


def longest_context(worker: Worker, settings: Settings, limit: int) -> int:
    """_estimate_max_model_len_from_groups: a binary search up to `limit`; 0 where 1 does not fit.

    The caller checks that the worker has memory.
    """
    memory = worker.checked_bytes
    if memory is None or needed_bytes(worker, settings, 1) > memory:
        return 0
    low, high, best = 1, limit, 1
    while low <= high:
        middle = (low + high) // 2
        if needed_bytes(worker, settings, middle) <= memory:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def refusal(pool: Pool, settings: Settings) -> str | None:
    """vLLM's own sentence where it would not start (_check_enough_kv_cache_memory), else None."""
    for worker in pool.workers:
        memory = worker.checked_bytes
        if memory is None or not worker.bytes_per_block:
            continue
        length = settings.max_model_len
        longest = longest_context(worker, settings, length)
        refused = refusal_of(memory, needed_bytes(worker, settings, length), length, longest)
        if refused is not None:
            return refused
    return None


def refusal_of(memory: int, needed: int, max_model_len: int, longest: int | None) -> str | None:
    """vLLM's sentence for one worker. `memory` is without the null block's, both in bytes."""
    if memory <= 0:
        return "No available memory for the cache blocks."
    if needed <= memory:
        return None
    estimate = f" Based on the available memory, the estimated maximum model length is {longest}."
    return (
        f"To serve at least one request with the model's max seq len ({max_model_len}), "
        f"({gib(needed)} GiB KV cache is needed, which is larger than the available KV cache "
        f"memory ({gib(memory)} GiB).{estimate if longest else ''}"
    )


def gib(number: int) -> str:
    """vLLM's format_gib: two decimals."""
    return f"{round(number / GIB, 2)}"
