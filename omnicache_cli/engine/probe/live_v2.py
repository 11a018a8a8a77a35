"""Reads the batch of a Model Runner V2 from its InputBatch, BlockTables and attention metadata.

On a device V2 keeps fewer copies on the CPU than V1: block tables and slot mappings have none and
are copied on the side (see `device`). With speculative decoding the CPU knows only upper bounds of
the sequence lengths; they are then not read, for a bound is not what the kernels see.
"""

from typing import Any

import numpy as np

from omnicache_cli.engine.probe.live import (
    Layout,
    LiveBatch,
    LiveGroup,
    bool_of,
    int_of,
    of_group,
    shared_buffers,
)
from omnicache_cli.trace.records import COPIED, BatchDescriptor

_READ_FROM = {
    "block_table": COPIED,
    "query_start_loc": "InputBatch.query_start_loc_np",
    "seq_lens": "InputBatch.seq_lens_cpu_upper_bound",
    "slot_mapping": COPIED,
}
"""Where the vectors of a runner on a device come from."""


def layout_of(runner: Any, metadata: dict[str, Any]) -> Layout:
    return Layout(
        [int(size) for size in runner.kernel_block_sizes],
        {} if runner.device.type == "cpu" else _READ_FROM,
    )


def read_batch(
    runner: Any, descriptor: Any, batch: Any, tables: Any, slot_mappings: Any, metadata: Any
) -> LiveBatch:
    """`batch`, `tables` and `slot_mappings` went into and came out of `prepare_attn`.

    NotImplementedError: prefill context parallelism, where a rank's rows are parts of requests.
    """
    if runner.pcp_manager is not None:
        raise NotImplementedError("prefill context parallelism is not recorded")
    by_layer = metadata if isinstance(metadata, dict) else {}
    split = descriptor.num_ubatches > 1
    groups = runner.kv_cache_config.kv_cache_groups
    return LiveBatch(
        request_ids=batch.req_ids,
        groups=[]
        if split
        else [
            _read_group(
                runner, batch, of_group(by_layer, group), number, tables[number], slot_mappings
            )
            for number, group in enumerate(groups)
        ],
        metadata=by_layer,
        descriptor=BatchDescriptor(
            num_tokens=int(batch.num_tokens_after_padding),
            num_reqs=None if descriptor.num_reqs is None else int(descriptor.num_reqs),
            uniform=descriptor.uniform_token_count is not None,
            has_lora=runner.lora_config is not None,
            num_active_loras=int(descriptor.num_active_loras),
        ),
        cudagraph_mode=descriptor.cg_mode.name,
        num_ubatches=int(descriptor.num_ubatches) if split else 0,
        shared_buffers=[] if split else shared_buffers(_buffers(runner, tables, slot_mappings)),
    )


def _buffers(runner: Any, tables: Any, slot_mappings: Any) -> list[dict[str, Any]]:
    """The live tensors of each group, where there are several groups."""
    of_groups = []
    for number, table in enumerate(tables if len(tables) > 1 else ()):
        tensors = {"block_table": table}
        if runner.block_tables._slot_mapping_enabled[number]:
            tensors["slot_mapping"] = slot_mappings[number]
        of_groups.append(tensors)
    return of_groups


def _read_group(
    runner: Any, batch: Any, metadata: Any, number: int, table: Any, slot_mappings: Any
) -> LiveGroup:
    block_tables = runner.block_tables
    slots = slot_mappings[number] if block_tables._slot_mapping_enabled[number] else None
    return LiveGroup(
        num_actual_tokens=int_of(metadata, "num_actual_tokens"),
        max_query_len=int_of(metadata, "max_query_len"),
        max_seq_len=int_of(metadata, "max_seq_len"),
        query_start_loc=_starts(runner, batch),
        seq_lens=_seq_lens(runner, batch),
        slot_mapping=slots.numpy() if slots is not None and _on_cpu(slots) else None,
        device_slot_mapping=slots if slots is not None and not _on_cpu(slots) else None,
        block_table=table.numpy() if _on_cpu(table) else None,
        device_block_table=None if _on_cpu(table) else table,
        num_blocks=block_tables.num_blocks.np[number, batch.idx_mapping_np],
        table_shape=(int(table.shape[0]), int(table.shape[1])),
        causal=bool_of(metadata, "causal"),
        use_cascade=bool_of(metadata, "use_cascade"),
        common_prefix_len=int_of(metadata, "common_prefix_len"),
    )


def _on_cpu(tensor: Any) -> bool:
    return bool(tensor.is_cpu)


def _starts(runner: Any, batch: Any) -> np.ndarray | None:
    """(num_reqs + 1,). Adaptive verification divides the drafts on the device alone."""
    starts = batch.query_start_loc
    if _on_cpu(starts):
        on_cpu: np.ndarray = starts.numpy()[: batch.num_reqs + 1]
        return on_cpu
    if runner.adaptive_verification is not None:
        return None
    copy: np.ndarray = batch.query_start_loc_np[: batch.num_reqs + 1]
    return copy


def _seq_lens(runner: Any, batch: Any) -> np.ndarray | None:
    """(num_reqs,)"""
    lens = batch.seq_lens
    if not _on_cpu(lens):
        if runner.num_speculative_steps:
            return None
        lens = batch.seq_lens_cpu_upper_bound
    values: np.ndarray = lens.numpy()[: batch.num_reqs]
    return values
