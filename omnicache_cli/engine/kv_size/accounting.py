"""Asks vLLM for a model's caching layers, groups, pool and requests, without weights or a GPU.

One process can ask for many models. What vLLM would take from a GPU's platform (block size, async
scheduling, backends) is set by hand, because this machine may have none: `ExactOptions` says what.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omnicache_cli.engine.kv_size.meta_model import build_on_meta, prepare_process
from omnicache_cli.engine.options import IMPORT_ERRORS, missing_engine
from omnicache_cli.errors import EngineFailedError, EngineMissingError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LAYOUT = "LBNHC"
"""The default KV cache layout of FlashAttention, Triton and FlashMLA."""

CPU_LAYOUT = "LBHNC"


@dataclass(frozen=True, slots=True)
class ExactOptions:
    """Resolved settings by vLLM's names; nothing is None that the accounting needs."""

    dtype: str
    kv_cache_dtype: str
    block_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    kv_cache_dtype_skip_layers: tuple[str, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool
    enable_prefix_caching: bool
    mamba_cache_mode: str
    mamba_cache_dtype: str
    mamba_ssm_cache_dtype: str
    num_speculative_tokens: int
    disable_hybrid_kv_cache_manager: bool
    platform: str
    available_bytes: Sequence[int] | None = None
    num_gpu_blocks_override: int | None = None
    speculative_method: str | None = None
    speculative_model: str | None = None  # the drafter's folder


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """vLLM's answer in plain values; bytes, tokens, blocks."""

    vllm_version: str
    layers: Mapping[str, Mapping[str, Any]]  # by layer name: kind, block_size, page_bytes, ...
    groups: Sequence[Mapping[str, Any]]
    bytes_per_block: Sequence[int]  # per worker
    block_size: int
    num_blocks: int | None
    kv_cache_tokens: int | None
    max_concurrency: float | None
    needed_bytes: Sequence[int]  # of one request of max_model_len, per worker
    longest_context: int | None
    weight_bytes: int  # of the first stage on one rank, as if unquantised
    notes: tuple[str, ...] = ()


def ask_vllm(folder: str, options: ExactOptions) -> ExactAnswer:
    """EngineMissingError: no vLLM; EngineFailedError: vLLM cannot build or count this model."""
    return Counter().ask(folder, options)


class Counter:
    """Keeps the last model that it has built: another amount of memory needs no other."""

    def __init__(self) -> None:
        self._key: tuple[str, ExactOptions] | None = None
        self._built: _Built | None = None

    def ask(self, folder: str, options: ExactOptions) -> ExactAnswer:
        """As `ask_vllm`."""
        prepare_process()
        with _as_engine_errors(folder):
            key = (folder, replace(options, available_bytes=None))
            if self._built is None or key != self._key:
                self._built = _build(folder, options)
                self._key = key
            return _count(self._built, options)


@dataclass(frozen=True, slots=True)
class _Built:
    config: "VllmConfig"
    workers: list[dict[str, Any]]  # vLLM's KVCacheSpec by layer name, per pipeline stage
    weight_bytes: int
    notes: Sequence[str]


def _build(folder: str, options: ExactOptions) -> _Built:
    config, models, notes = build_on_meta(folder, options)
    return _Built(config, [model.specs for model in models], models[0].weight_bytes, notes)


@contextlib.contextmanager
def _as_engine_errors(folder: str) -> Iterator[None]:
    try:
        import vllm
    except IMPORT_ERRORS as error:
        raise missing_engine(error, "--exact asks vLLM") from error
    try:
        yield
    except (EngineFailedError, EngineMissingError):
        raise
    except Exception as error:
        raise EngineFailedError(
            f"vLLM {vllm.__version__} cannot count {folder} on the meta device: "
            f"{_one_line(error)}; use the fast path"
        ) from error


def _one_line(error: Exception) -> str:
    """What and why; pydantic tells why in the line after its heading, which says how many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = [line.partition(" [type=")[0] for line in lines if line.startswith("Value error")]
    return ": ".join([type(error).__name__, *(why or lines)[:1]])


@contextlib.contextmanager
def _gpu_runner(options: ExactOptions) -> Iterator[None]:
    """Model runner V2 is vLLM's choice where Triton is, unless every state is cached."""
    if options.platform == "cuda":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0" if options.mamba_cache_mode == "all" else "1"
    try:
        yield
    finally:
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)


def _count(built: _Built, options: ExactOptions) -> ExactAnswer:
    with _gpu_runner(options):
        return _counted(built, options)


def _counted(built: _Built, options: ExactOptions) -> ExactAnswer:
    import vllm
    from vllm.v1.core import kv_cache_utils as v

    config, workers = built.config, built.workers
    config.cache_config.kv_cache_layout = CPU_LAYOUT if options.platform == "cpu" else LAYOUT
    merged = {name: spec for worker in workers for name, spec in worker.items()}
    groups = v.get_kv_cache_groups(config, merged)
    projected = [v._project_kv_cache_groups_to_worker(groups, worker) for worker in workers]
    sizes = [v._pool_bytes_per_block(own) if own else 0 for own in projected]
    needed = [v._max_memory_usage_bytes_from_groups(config, own) for own in projected]
    blocks = tokens = concurrency = longest = None
    available = _available(options, sizes)
    if available is not None:
        configs = [
            v.get_kv_cache_config_from_groups(config, own, memory)
            for own, memory in zip(projected, available, strict=True)
        ]
        blocks = min(found.num_blocks for found in configs)
        configs[0].num_blocks = blocks
        if groups:
            tokens, concurrency = v.get_kv_cache_capacity(
                config, v.generate_scheduler_kv_cache_config([configs[0]])
            )
            longest = min(
                v._estimate_max_model_len_from_groups(config, own, memory - size)
                for own, memory, size in zip(projected, available, sizes, strict=True)
            )
    return ExactAnswer(
        vllm_version=vllm.__version__,
        layers={name: _plain_spec(spec) for name, spec in merged.items()},
        groups=[_plain_group(config, group) for group in groups],
        bytes_per_block=sizes,
        block_size=config.cache_config.block_size,
        num_blocks=blocks,
        kv_cache_tokens=tokens,
        max_concurrency=concurrency,
        needed_bytes=needed,
        longest_context=longest,
        weight_bytes=built.weight_bytes,
        notes=tuple(built.notes),
    )


def _available(options: ExactOptions, sizes: Sequence[int]) -> list[int] | None:
    if options.num_gpu_blocks_override is not None:
        return [options.num_gpu_blocks_override * size for size in sizes]
    memory = options.available_bytes
    if memory is None:
        return None
    return [memory[rank % len(memory)] for rank in range(len(sizes))]


def _plain_spec(spec: Any) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return {
        "kind": get_kv_cache_spec_kind(spec).value,
        "block_size": spec.block_size,
        "page_bytes": spec.page_size_bytes,
    }


def _plain_group(config: "VllmConfig", group: Any) -> dict[str, Any]:
    from vllm.utils.math_utils import cdiv
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, iter_layer_specs

    spec = group.kv_cache_spec
    first = next(iter(iter_layer_specs(spec)))
    return {
        "kind": get_kv_cache_spec_kind(first).value,
        "layers": len(group.layer_names),
        "block_size": spec.block_size,
        "page_bytes": first.page_size_bytes,
        "blocks_per_request": cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes),
    }
