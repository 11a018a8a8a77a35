"""Reads the live attention metadata of a forward pass into numpy, group by group.

On a CPU the vectors are views of vLLM's own tensors. On a device only what has a copy on the CPU
is read at once; the slot mapping has none and is copied on the side (see `device`). This module
knows vLLM's GPUModelRunner that is called V1; `live_v2` knows Model Runner V2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from omnicache_cli.trace.digest import BatchDigest
from omnicache_cli.trace.records import COPIED, BatchDescriptor, WorkerSource


@dataclass(slots=True)
class LiveGroup:
    """One KV cache group as the attention backend is about to see it. Vectors are not copied."""

    num_actual_tokens: int | None
    max_query_len: int | None
    max_seq_len: int | None
    query_start_loc: np.ndarray | None  # (num_reqs + 1,); None: the CPU does not know it
    seq_lens: np.ndarray | None  # (num_reqs,); None: the CPU does not know them
    slot_mapping: np.ndarray | None  # (num_tokens,); None: on a device, or no slots are mapped
    device_slot_mapping: Any  # the tensor, where it is on a device
    block_table: np.ndarray | None  # (at least num_reqs, columns); None: on a device
    device_block_table: Any  # the tensor, where it is on a device without a copy on the CPU
    num_blocks: np.ndarray  # (num_reqs,), used columns of each row
    table_shape: tuple[int, int] | None
    causal: bool | None
    use_cascade: bool | None
    common_prefix_len: int | None

    def copied(self) -> "LiveGroup":
        """The same, to be kept: vLLM writes its vectors anew in every step."""
        width = int(self.num_blocks.max(initial=0))
        table = self.block_table
        return replace(
            self,
            query_start_loc=_copy(self.query_start_loc),
            seq_lens=_copy(self.seq_lens),
            slot_mapping=_copy(self.slot_mapping),
            device_slot_mapping=None,
            block_table=_copy(None if table is None else table[: len(self.num_blocks), :width]),
            device_block_table=None,
            num_blocks=self.num_blocks.copy(),
        )


@dataclass(slots=True)
class LiveBatch:
    """One batch as the model is about to run it."""

    request_ids: list[str]  # per row
    groups: list[LiveGroup]  # empty where vLLM splits the batch into microbatches
    metadata: dict[str, Any]  # layer -> its attention metadata, as far as there is any
    descriptor: BatchDescriptor | None
    cudagraph_mode: str
    num_ubatches: int  # 0: not split
    shared_buffers: list[tuple[str, int, int]]  # vectors in the same memory, and their groups


def read_batch(runner: Any, context: Any) -> LiveBatch:
    """`context` is vLLM's ForwardContext, in which the model is about to be called."""
    batch = runner.input_batch
    microbatched = isinstance(context.attn_metadata, list)
    return LiveBatch(
        request_ids=batch.req_ids[: batch.num_reqs],
        groups=[] if microbatched else read_groups(runner, context, batch.num_reqs),
        metadata=context.attn_metadata if isinstance(context.attn_metadata, dict) else {},
        descriptor=_descriptor(context.batch_descriptor),
        cudagraph_mode=context.cudagraph_runtime_mode.name,
        num_ubatches=len(context.attn_metadata) if microbatched else 0,
        shared_buffers=[] if microbatched else shared_buffers(_buffers(runner, context)),
    )


def read_groups(runner: Any, context: Any, num_reqs: int) -> list[LiveGroup]:
    """All groups of one forward pass; `context` is vLLM's ForwardContext without microbatches."""
    return [
        _read_group(runner, context, group, runner.input_batch.block_table[number], num_reqs)
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
    ]


def shared_buffers(of_groups: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Vectors of which two KV cache groups use the same memory, and the groups."""
    found = []
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for number, tensors in enumerate(of_groups):
        for name, tensor in tensors.items():
            if tensor is None or not tensor.numel():
                continue
            start = tensor.data_ptr()
            end = start + tensor.numel() * tensor.element_size()
            before = spans.setdefault(name, [])
            found += [
                (name, other, number)
                for other, first, last in before
                if start < last and first < end
            ]
            before.append((number, start, end))
    return found


def _buffers(runner: Any, context: Any) -> list[dict[str, Any]]:
    """The live tensors of each group, where there are several groups."""
    groups = runner.kv_cache_config.kv_cache_groups
    of_groups: list[dict[str, Any]] = []
    for number, group in enumerate(groups if len(groups) > 1 else ()):
        table = runner.input_batch.block_table[number]
        metadata = of_group(context.attn_metadata, group)
        cells = getattr(metadata, "block_table", None)
        tensors = {"block_table": table.block_table.gpu if cells is None else cells}
        if table.slot_mapping_mode.value != "none":
            tensors["slot_mapping"] = _slot_tensor(metadata, context, group)
        of_groups.append(tensors)
    return of_groups


def _read_group(runner: Any, context: Any, group: Any, table: Any, num_reqs: int) -> LiveGroup:
    metadata = of_group(context.attn_metadata, group)
    starts = _on_cpu(metadata, "query_start_loc")
    lens = _on_cpu(metadata, "seq_lens")
    cells = _on_cpu(metadata, "block_table")
    shape = getattr(getattr(metadata, "block_table", None), "shape", None)
    slots, device_slots = _slot_mapping(metadata, context, group, table)
    return LiveGroup(
        num_actual_tokens=int_of(metadata, "num_actual_tokens"),
        max_query_len=int_of(metadata, "max_query_len"),
        max_seq_len=int_of(metadata, "max_seq_len"),
        query_start_loc=runner.query_start_loc.np[: num_reqs + 1] if starts is None else starts,
        seq_lens=runner.optimistic_seq_lens_cpu.numpy()[:num_reqs] if lens is None else lens,
        slot_mapping=slots,
        device_slot_mapping=device_slots,
        block_table=table.block_table.np if cells is None else cells,
        device_block_table=None,
        num_blocks=table.num_blocks_per_row[:num_reqs],
        table_shape=None if shape is None else (int(shape[0]), int(shape[1])),
        causal=bool_of(metadata, "causal"),
        use_cascade=bool_of(metadata, "use_cascade"),
        common_prefix_len=int_of(metadata, "common_prefix_len"),
    )


def _slot_mapping(
    metadata: Any, context: Any, group: Any, table: Any
) -> tuple[np.ndarray | None, Any]:
    """The slot mapping as numpy, or the tensor where it is on a device; neither: nothing maps."""
    if table.slot_mapping_mode.value == "none":
        return None, None
    tensor = _slot_tensor(metadata, context, group)
    if tensor is None:
        return None, None
    return (tensor.numpy(), None) if tensor.is_cpu else (None, tensor)


def _slot_tensor(metadata: Any, context: Any, group: Any) -> Any:
    tensor = getattr(metadata, "slot_mapping", None)
    if tensor is None and isinstance(context.slot_mapping, dict):
        tensor = of_group(context.slot_mapping, group)
    return tensor


def of_group(by_layer: Any, group: Any) -> Any:
    """The entry of the group's first layer that this rank has (pipeline stages have a part)."""
    return next((by_layer[name] for name in group.layer_names if name in by_layer), None)


def _copy(vector: np.ndarray | None) -> np.ndarray | None:
    return None if vector is None else vector.copy()


def _on_cpu(metadata: Any, name: str) -> np.ndarray | None:
    """A tensor of the metadata as numpy, if that needs no device."""
    tensor = getattr(metadata, name, None)
    if tensor is None or not tensor.is_cpu:
        return None
    array: np.ndarray = tensor.numpy()
    return array


def int_of(metadata: Any, name: str) -> int | None:
    value = getattr(metadata, name, None)
    return int(value) if isinstance(value, int | np.integer) else None


def bool_of(metadata: Any, name: str) -> bool | None:
    value = getattr(metadata, name, None)
    return value if isinstance(value, bool) else None


def digest_of(request_ids: Sequence[str], groups: Sequence[LiveGroup]) -> str:
    """`trace.digest.digest_of` of live tensors."""
    digest = BatchDigest(request_ids)
    for group in groups:
        digest.add_numbers((group.num_actual_tokens, group.max_query_len, group.max_seq_len))
        used: np.ndarray | None = None
        cells: np.ndarray | None = None
        if group.block_table is not None:
            used = group.num_blocks
            width = int(used.max(initial=0))
            cells = group.block_table[: len(used), :width][np.arange(width) < used[:, None]]
        vectors = (group.query_start_loc, group.seq_lens, group.slot_mapping, used, cells)
        for vector in vectors:
            digest.add_vector(None if vector is None else vector.astype("<i8").tobytes())
    return digest.hexdigest()


_READ_FROM = {
    "block_table": "BlockTable.block_table.np",
    "query_start_loc": "GPUModelRunner.query_start_loc.np",
    "seq_lens": "GPUModelRunner.optimistic_seq_lens_cpu",
    "slot_mapping": COPIED,
}
"""Where the vectors of a runner on a device come from."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What each kind of runner keeps in a place of its own; the words are WorkerSource's."""

    kernel_block_sizes: list[int]
    read_from: dict[str, str]


def layout_of(runner: Any, metadata: dict[str, Any]) -> Layout:
    """`metadata`: of each layer, in the forward pass that is about to run."""
    tables = runner.input_batch.block_table
    groups = runner.kv_cache_config.kv_cache_groups
    on_cpu = runner.device.type == "cpu"
    return Layout(
        [int(tables[number].block_size) for number in range(len(groups))],
        _lacking([of_group(metadata, group) for group in groups]) if on_cpu else _READ_FROM,
    )


def _lacking(of_groups: Sequence[Any]) -> dict[str, str]:
    """Vectors that some class of metadata does not have: the runner has them too."""
    found = {}
    for name in ("block_table", "query_start_loc", "seq_lens"):
        lacking = [str(n) for n, one in enumerate(of_groups) if _on_cpu(one, name) is None]
        if lacking:
            found[name] = f"{_READ_FROM[name]}, of KV cache groups: {', '.join(lacking)}"
    return found


def worker_source(
    runner: Any, layout: Layout, metadata: dict[str, Any], *, source: int, engine: str | None
) -> WorkerSource:
    """A running vLLM model runner, of either kind: who it is and what it works on."""
    groups = runner.kv_cache_config.kv_cache_groups
    of_groups = [of_group(metadata, group) for group in groups]
    return WorkerSource(
        source=source,
        engine=engine,
        runner_class=f"{type(runner).__module__}.{type(runner).__qualname__}",
        rank=int(runner.parallel_config.rank),
        tp_rank=int(parallel_group("get_tp_group").rank_in_group),
        pp_rank=int(parallel_group("get_pp_group").rank_in_group),
        device=str(runner.device),
        metadata_classes=["" if one is None else type(one).__name__ for one in of_groups],
        kernel_block_sizes=layout.kernel_block_sizes,
        kv_cache_shapes=_kv_cache_shapes(runner),
        kv_cache_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        read_from=layout.read_from,
    )


def parallel_group(getter: str) -> Any:
    """One of vLLM's parallel groups: `rank_in_group` is this process, `world_size` all."""
    from vllm.distributed import parallel_state  # loaded already: a model runs

    return getattr(parallel_state, getter)()


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


def _descriptor(descriptor: Any) -> BatchDescriptor | None:
    if descriptor is None:
        return None
    return BatchDescriptor(
        num_tokens=int(descriptor.num_tokens),
        num_reqs=None if descriptor.num_reqs is None else int(descriptor.num_reqs),
        uniform=bool(descriptor.uniform),
        has_lora=bool(descriptor.has_lora),
        num_active_loras=int(descriptor.num_active_loras),
    )
