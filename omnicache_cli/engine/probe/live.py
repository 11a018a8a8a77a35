"""Reads the live attention metadata of a forward pass into numpy, group by group.

On a CPU the vectors are views of vLLM's own tensors. On a device only what has a copy on the CPU
is read at once; the slot mapping has none and is copied on the side (see `device`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnicache_cli.trace.digest import BatchDigest
from omnicache_cli.trace.records import WorkerSource


@dataclass(slots=True)
class LiveGroup:
    """One KV cache group as the attention backend is about to see it. Vectors are not copied."""

    num_actual_tokens: int | None
    max_query_len: int | None
    max_seq_len: int | None
    query_start_loc: np.ndarray  # (num_reqs + 1,)
    seq_lens: np.ndarray  # (num_reqs,)
    slot_mapping: np.ndarray | None  # (num_tokens,); None: on a device, or no slots are mapped
    device_slot_mapping: Any  # the tensor, where it is on a device
    block_table: np.ndarray  # (at least num_reqs, columns)
    num_blocks: np.ndarray  # (num_reqs,), used columns of each row
    table_shape: tuple[int, int] | None
    causal: bool | None
    use_cascade: bool | None
    common_prefix_len: int | None


def read_groups(runner: Any, context: Any, num_reqs: int) -> list[LiveGroup]:
    """All groups of one forward pass; `context` is vLLM's ForwardContext without microbatches."""
    return [
        _read_group(runner, context, group, runner.input_batch.block_table[number], num_reqs)
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
    ]


def _read_group(runner: Any, context: Any, group: Any, table: Any, num_reqs: int) -> LiveGroup:
    metadata = of_group(context.attn_metadata, group)
    starts = _on_cpu(metadata, "query_start_loc")
    lens = _on_cpu(metadata, "seq_lens")
    cells = _on_cpu(metadata, "block_table")
    shape = getattr(getattr(metadata, "block_table", None), "shape", None)
    slots, device_slots = _slot_mapping(metadata, context, group, table)
    return LiveGroup(
        num_actual_tokens=_int(metadata, "num_actual_tokens"),
        max_query_len=_int(metadata, "max_query_len"),
        max_seq_len=_int(metadata, "max_seq_len"),
        query_start_loc=runner.query_start_loc.np[: num_reqs + 1] if starts is None else starts,
        seq_lens=runner.optimistic_seq_lens_cpu.numpy()[:num_reqs] if lens is None else lens,
        slot_mapping=slots,
        device_slot_mapping=device_slots,
        block_table=table.block_table.np if cells is None else cells,
        num_blocks=table.num_blocks_per_row[:num_reqs],
        table_shape=None if shape is None else (int(shape[0]), int(shape[1])),
        causal=_bool(metadata, "causal"),
        use_cascade=_bool(metadata, "use_cascade"),
        common_prefix_len=_int(metadata, "common_prefix_len"),
    )


def _slot_mapping(
    metadata: Any, context: Any, group: Any, table: Any
) -> tuple[np.ndarray | None, Any]:
    """The slot mapping as numpy, or the tensor where it is on a device; neither: nothing maps."""
    if table.slot_mapping_mode.value == "none":
        return None, None
    tensor = getattr(metadata, "slot_mapping", None)
    if tensor is None and isinstance(context.slot_mapping, dict):
        tensor = of_group(context.slot_mapping, group)
    if tensor is None:
        return None, None
    return (tensor.numpy(), None) if tensor.is_cpu else (None, tensor)


def of_group(by_layer: Any, group: Any) -> Any:
    """The entry of the group's first layer that this rank has (pipeline stages have a part)."""
    return next((by_layer[name] for name in group.layer_names if name in by_layer), None)


def _on_cpu(metadata: Any, name: str) -> np.ndarray | None:
    """A tensor of the metadata as numpy, if that needs no device."""
    tensor = getattr(metadata, name, None)
    if tensor is None or not tensor.is_cpu:
        return None
    array: np.ndarray = tensor.numpy()
    return array


def _int(metadata: Any, name: str) -> int | None:
    value = getattr(metadata, name, None)
    return int(value) if isinstance(value, int | np.integer) else None


def _bool(metadata: Any, name: str) -> bool | None:
    value = getattr(metadata, name, None)
    return value if isinstance(value, bool) else None


def digest_of(request_ids: Sequence[str], groups: Sequence[LiveGroup]) -> str:
    """`trace.digest.digest_of` of live tensors."""
    digest = BatchDigest(request_ids)
    for group in groups:
        digest.add_numbers((group.num_actual_tokens, group.max_query_len, group.max_seq_len))
        used = group.num_blocks
        width = int(used.max(initial=0))
        cells = group.block_table[: len(used), :width]
        vectors = (
            group.query_start_loc,
            group.seq_lens,
            group.slot_mapping,
            used,
            cells[np.arange(width) < used[:, None]],
        )
        for vector in vectors:
            digest.add_vector(None if vector is None else vector.astype("<i8").tobytes())
    return digest.hexdigest()


def worker_source(runner: Any, context: Any, *, source: int, engine: str | None) -> WorkerSource:
    """A running vLLM model runner: who it is and what it works on."""
    metadata = context.attn_metadata if isinstance(context.attn_metadata, dict) else {}
    groups = runner.kv_cache_config.kv_cache_groups
    of_groups = [of_group(metadata, group) for group in groups]
    return WorkerSource(
        source=source,
        engine=engine,
        runner_class=f"{type(runner).__module__}.{type(runner).__qualname__}",
        rank=int(runner.parallel_config.rank),
        tp_rank=parallel_rank("get_tp_group"),
        pp_rank=parallel_rank("get_pp_group"),
        device=str(runner.device),
        metadata_classes=["" if one is None else type(one).__name__ for one in of_groups],
        kernel_block_sizes=[
            int(runner.input_batch.block_table[number].block_size) for number in range(len(groups))
        ],
        kv_cache_shapes=_kv_cache_shapes(runner),
        kv_cache_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        read_from=_read_from(runner, of_groups),
    )


_RUNNER_COPIES = {
    "block_table": "BlockTable.block_table.np",
    "query_start_loc": "GPUModelRunner.query_start_loc.np",
    "seq_lens": "GPUModelRunner.optimistic_seq_lens_cpu",
}
"""Vectors of a step that the runner keeps on the CPU too."""


def _read_from(runner: Any, of_groups: Sequence[Any]) -> dict[str, str]:
    """Vectors that are not read from the metadata: it is on a device, or its class lacks them."""
    if runner.device.type != "cpu":
        copied = "copied from the device beside the step, read at the next one"
        return {**_RUNNER_COPIES, "slot_mapping": copied}
    found = {}
    for name, where in _RUNNER_COPIES.items():
        lacking = [str(n) for n, one in enumerate(of_groups) if _on_cpu(one, name) is None]
        if lacking:
            found[name] = f"{where}, of KV cache groups: {', '.join(lacking)}"
    return found


def parallel_rank(getter: str) -> int:
    """This process's rank in one of vLLM's parallel groups."""
    from vllm.distributed import parallel_state  # loaded already: a model runs

    return int(getattr(parallel_state, getter)().rank_in_group)


def _kv_cache_shapes(runner: Any) -> dict[str, list[int]]:
    """Layer -> shape of its KV cache tensor; layers that keep several tensors give each a name."""
    shapes = {}
    for name, layer in runner.compilation_config.static_forward_context.items():
        cache: Any = getattr(layer, "kv_cache", None)
        several = isinstance(cache, list | tuple)
        tensors: Any = cache if several else [cache]
        for index, tensor in enumerate(tensors):
            if hasattr(tensor, "shape"):
                shapes[f"{name}[{index}]" if several else name] = [int(n) for n in tensor.shape]
    return shapes
