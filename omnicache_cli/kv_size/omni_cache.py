"""Host memory of vLLM-Omni's tensor prefix cache: a row per slot of the KV pool and per key.

Mirrors vllm_omni/core/prefix_cache: block_pool (num_blocks, block_size, width), the slot status
table of manager.py, and the staging buffers of controller.py (staging_depth steps).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnicache_cli.kv_size.dtypes import bytes_of
from omnicache_cli.kv_size.estimate import Estimate

HIDDEN_KEY = "__hidden_states__"
STATUS_BYTES_PER_SLOT = 1 + 8 + 8
"""_SlotStatusTable: a state, a task id and a version per slot and key."""

STAGING_DEPTH = 4
"""PrefixCacheConfig.staging_depth: steps, each of max_num_batched_tokens rows."""


@dataclass(frozen=True, slots=True)
class TensorKey:
    """One cached tensor; `width` is its row, in elements."""

    name: str
    width: int
    dtype: str


@dataclass(frozen=True, slots=True)
class KeyMemory:
    """Host bytes of one key."""

    key: TensorKey
    pool_bytes: int  # slots x width x bytes
    status_bytes: int
    staging_bytes: int  # pinned

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.status_bytes + self.staging_bytes


def thinker_keys(
    config: Mapping[str, Any], text: Mapping[str, Any], dtype: str
) -> tuple[TensorKey, ...]:
    """The hidden states, and the layers that the talker takes (talker_config)."""
    width = text.get("hidden_size")
    if not isinstance(width, int):
        return ()
    keys = [TensorKey(HIDDEN_KEY, width, dtype)]
    talker = config.get("talker_config")
    layer = talker.get("accept_hidden_layer") if isinstance(talker, Mapping) else None
    if isinstance(layer, int):
        keys += [
            TensorKey(f"hidden_states.layer_{number}", width, dtype)
            for number in dict.fromkeys((0, layer))
        ]
    return tuple(keys)


def host_memory(found: Estimate, keys: tuple[TensorKey, ...]) -> list[KeyMemory] | None:
    """None where the number of blocks is unknown."""
    if found.pool.num_blocks is None:
        return None
    slots = found.pool.num_blocks * found.sizes.attention
    rows = STAGING_DEPTH * found.settings.max_num_batched_tokens
    memory = []
    for key in keys:
        row = key.width * bytes_of(key.dtype)
        memory.append(KeyMemory(key, slots * row, slots * STATUS_BYTES_PER_SLOT, rows * row))
    return memory
