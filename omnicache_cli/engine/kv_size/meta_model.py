"""A vLLM model with parameters that have shapes but no memory, and the config it was built with."""

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnicache_cli.engine.kv_size.gpu import align_blocks, use_gpu_backends

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from omnicache_cli.engine.kv_size.accounting import ExactOptions

SMALL = 1 << 16
"""Elements; in the second try smaller tensors are real, so that constructors can read them."""


@dataclass(frozen=True, slots=True)
class MetaModel:
    """One pipeline stage: the cache specs of its layers, and the bytes of its parameters."""

    specs: dict[str, Any]  # vLLM's KVCacheSpec by layer name
    weight_bytes: int


def prepare_process() -> None:
    """What vLLM reads when it is imported. No network: hub ids are resolved before."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ["VLLM_PLUGINS"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"


def build_on_meta(
    folder: str, options: "ExactOptions"
) -> tuple["VllmConfig", list[MetaModel], list[str]]:
    """The config, a model per pipeline stage, and what had to be set by hand."""
    import torch
    from vllm.distributed import parallel_state
    from vllm.triton_utils import triton

    if not hasattr(triton, "set_allocator"):  # vLLM's placeholder where there is no GPU
        triton.set_allocator = lambda _: None
    notes: list[str] = []
    config = _engine_config(folder, options, notes)
    _start_group(parallel_state)
    models = []
    last = options.pipeline_parallel_size - 1
    for rank in range(options.pipeline_parallel_size):
        config.compilation_config.static_forward_context.clear()
        config.compilation_config.static_all_moe_layers.clear()
        with _as_rank(parallel_state, options, rank):
            module = _constructed(torch, config, notes)
            if config.speculative_config is not None and rank == last:
                _constructed(torch, config, notes, config.speculative_config.draft_model_config)
            _set_by_hand(config, options, is_built=True)
            use_gpu_backends(config, options)
            align_blocks(config, options)
            specs = _cache_specs(config)
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        models.append(MetaModel(specs, weights))
    return config, models, notes


def _cache_specs(config: "VllmConfig") -> dict[str, Any]:
    """GPUModelRunner.get_kv_cache_spec; states ask for the size of the tensor-parallel group."""
    from vllm.config.vllm import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec

    specs: dict[str, Any] = {}
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(config)
        if isinstance(spec, AttentionSpec):
            spec = layer.get_attn_backend().customize_spec(spec)
        if spec is not None:
            specs[name] = spec
    return specs


def _engine_config(folder: str, options: "ExactOptions", notes: list[str]) -> "VllmConfig":
    """EngineArgs' config on this platform, then what a GPU's platform would have set."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # a process per model costs 30 s
    raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    overrides: dict[str, Any] = {}
    if raw.get("quantization_config"):
        overrides["quantization_config"] = None
        notes.append("quantised weights are counted as if unquantised: kernels need a GPU")
    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        enable_prefix_caching=False,  # set by hand: a CPU without AMX has none for MLA
        mamba_cache_dtype=options.mamba_cache_dtype,
        hf_overrides=overrides,
        skip_mm_profiling=True,
        speculative_config=_speculation(folder, options),
    ).create_engine_config()
    _set_by_hand(config, options)
    config.model_config.verify_with_parallel_config(config.parallel_config)
    return config


def _speculation(folder: str, options: "ExactOptions") -> dict[str, Any] | None:
    """EngineArgs.speculative_config for layers that the model brings itself."""
    if options.speculative_method is None:
        return None
    return {
        "method": options.speculative_method,
        "num_speculative_tokens": options.num_speculative_tokens,
        "model": options.speculative_model or folder,
    }


def _set_by_hand(config: "VllmConfig", options: "ExactOptions", *, is_built: bool = False) -> None:
    """What the platform decides. Multimodal constructors copy the config, which asks the platform
    again: so this is done before and after."""
    scheduler, cache, parallel = (
        config.scheduler_config,
        config.cache_config,
        config.parallel_config,
    )
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.max_num_encoder_input_tokens = options.max_num_batched_tokens
    if options.platform == "cuda" and not config.model_config.is_encoder_decoder:
        scheduler.enable_chunked_prefill = True  # which a CPU without AMX has not for MLA
    scheduler.async_scheduling = options.async_scheduling
    scheduler.disable_hybrid_kv_cache_manager = options.disable_hybrid_kv_cache_manager
    cache.block_size = options.block_size
    cache.enable_prefix_caching = options.enable_prefix_caching
    cache.mamba_cache_mode = options.mamba_cache_mode
    if is_built:  # a copy of the config may lack prefix caching, and then refuses it
        cache.mamba_block_size = (
            options.max_model_len if options.mamba_cache_mode == "none" else options.block_size
        )
    cache.mamba_ssm_cache_dtype = options.mamba_ssm_cache_dtype
    _model_hook(config)
    parallel.tensor_parallel_size = options.tensor_parallel_size
    parallel.pipeline_parallel_size = options.pipeline_parallel_size
    parallel.decode_context_parallel_size = options.decode_context_parallel_size


def _model_hook(config: "VllmConfig") -> None:
    """The model's own verify_and_update_config again: it reads what was set by hand."""
    from vllm.model_executor.models.config import (
        MODELS_CONFIG_MAP,
        HybridAttentionMambaModelConfig,
    )

    hook = MODELS_CONFIG_MAP.get(config.model_config.architecture)
    if hook is not None and config.cache_config.mamba_ssm_cache_dtype == "auto":
        hook.verify_and_update_config(config)
    if config.model_config.is_hybrid:
        HybridAttentionMambaModelConfig.verify_and_update_config(config)


def _start_group(state: Any) -> None:
    """One gloo rank, once per process."""
    if state.model_parallel_is_initialized():
        return
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        state.initialize_model_parallel(1, 1)


@contextlib.contextmanager
def _as_rank(state: Any, options: "ExactOptions", stage: int) -> Iterator[None]:
    """The first tensor-parallel rank of a pipeline stage, as far as constructors can see."""
    tensor, pipeline = state.get_tp_group(), state.get_pp_group()
    before = (tensor.world_size, pipeline.world_size, pipeline.rank_in_group, pipeline.ranks)
    tensor.world_size = options.tensor_parallel_size
    pipeline.world_size = options.pipeline_parallel_size
    pipeline.rank_in_group = stage
    pipeline.ranks = list(range(options.pipeline_parallel_size))
    pipeline.rank = stage
    try:
        yield
    finally:
        tensor.world_size, pipeline.world_size, pipeline.rank_in_group, pipeline.ranks = before
        pipeline.rank = 0


def _constructed(
    torch: Any, config: "VllmConfig", notes: list[str], drafter: Any = None
) -> "nn.Module":
    """initialize_model on the meta device; small tensors are real in a second try.

    `drafter` is the model config of a draft model, which registers its layers behind the model's.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with (
            set_current_vllm_config(config),
            _sparse_attention_by_name(),
            _any_experts(),
            _no_device(torch),
        ):
            try:
                with torch.device("meta"):
                    return initialize_model(vllm_config=config, model_config=drafter)
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error) or drafter is not None:
                    raise
            config.compilation_config.static_forward_context.clear()
            config.compilation_config.static_all_moe_layers.clear()
            notes.append("its constructor reads values: small tensors are real, large ones are not")
            with _large_tensors_on_meta(torch):
                return initialize_model(vllm_config=config)
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _sparse_attention_by_name() -> Iterator[None]:
    """Sparse MLA has no kernels on a CPU: layers get FlashMLA's storage and nothing that runs."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    class NoKernels:
        is_sparse = True
        supports_dense_mha_prefill = False
        supports_pcp = supports_dcp = False
        dcp_world_size = pcp_world_size = 1

        def __init__(self, **_: Any) -> None:
            self.index_group = None

    class StorageOnly(FlashMLASparseBackend):
        @staticmethod
        def get_impl_cls() -> type:
            return NoKernels

    chosen = mla_attention.get_attn_backend

    def choose(*args: Any, **kwargs: Any) -> Any:
        return StorageOnly if kwargs.get("use_sparse") else chosen(*args, **kwargs)

    mla_attention.get_attn_backend = choose
    try:
        yield
    finally:
        mla_attention.get_attn_backend = chosen


@contextlib.contextmanager
def _any_experts() -> Iterator[None]:
    """Experts that no kernel of a CPU takes (gpt-oss's over eight ranks) get one by name."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
        UnquantizedMoeBackend,
        backend_to_kernel_cls,
    )

    chosen = method.select_unquantized_moe_backend

    def choose(*args: Any, **kwargs: Any) -> Any:
        try:
            return chosen(*args, **kwargs)
        except NotImplementedError:
            backend = UnquantizedMoeBackend.TRITON
            return backend, backend_to_kernel_cls(backend)[0]

    method.select_unquantized_moe_backend = choose
    try:
        yield
    finally:
        method.select_unquantized_moe_backend = chosen


class _NoStream:
    """A class, since annotations name it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


@contextlib.contextmanager
def _no_device(torch: Any) -> Iterator[None]:
    """Constructors move parts of a model, which have nothing to copy, and open CUDA streams."""
    before = torch.nn.Module.to, torch.cuda.Stream, torch.cuda.Event
    torch.nn.Module.to = lambda module, *_, **__: module
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    try:
        yield
    finally:
        torch.nn.Module.to, torch.cuda.Stream, torch.cuda.Event = before


@contextlib.contextmanager
def _large_tensors_on_meta(torch: Any) -> Iterator[None]:
    from torch.overrides import TorchFunctionMode

    factories = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full}

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if function in factories:
                with torch._C.DisableTorchFunction():
                    shape = function(*args, **{**kwargs, "device": "meta"})
                    if shape.numel() > SMALL:
                        return shape
            return function(*args, **kwargs)

    with Mode():
        yield
