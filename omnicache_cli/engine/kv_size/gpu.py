"""What a GPU's platform would set: each layer's cache dtype and backend,
and the sizes of blocks that follow from them. This machine may have no GPU.
"""

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from omnicache_cli.engine.kv_size.accounting import ExactOptions


def use_gpu_backends(config: "VllmConfig", options: "ExactOptions") -> None:
    """Give each layer the cache dtype that was asked for, and a GPU's backend for its packing."""
    if options.platform == "cpu":
        return
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend

    cache = config.cache_config
    cache.cache_dtype = options.kv_cache_dtype
    cache.kv_cache_dtype_skip_layers = _skipped(config, options)
    for name, layer in config.compilation_config.static_forward_context.items():
        if isinstance(layer, MambaBase) or not hasattr(layer, "kv_cache_dtype"):
            continue
        window = layer.sliding_window if isinstance(layer, Attention) else None
        dtype = _layer_dtype(name, window, options.kv_cache_dtype, cache.kv_cache_dtype_skip_layers)
        layer.kv_cache_dtype = dtype
        if isinstance(layer, MLAAttention) and not layer.use_sparse:
            layer.attn_backend = FlashMLABackend
        if isinstance(layer, Attention):
            layer.kv_cache_torch_dtype = kv_cache_dtype_str_to_dtype(dtype, config.model_config)
            layer.attn_backend = (
                _nvfp4_backend()
                if options.kv_cache_dtype.startswith("nvfp4")  # Blackwell's first choice for all
                else _backend(dtype)
            )


def _skipped(config: "VllmConfig", options: "ExactOptions") -> list[str]:
    """EngineArgs.create_engine_config: TurboQuant leaves the first and last layers alone."""
    asked = list(options.kv_cache_dtype_skip_layers)
    if not options.kv_cache_dtype.startswith("turboquant_"):
        return asked
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

    boundary = TurboQuantConfig.get_boundary_skip_layers(config.model_config)
    return sorted({*asked, *boundary}, key=int)


def _layer_dtype(name: str, window: int | None, dtype: str, skipped: Sequence[str]) -> str:
    """Attention.__init__ and MLAAttention.__init__."""
    from vllm.model_executor.models.utils import extract_layer_index

    if not skipped:
        return dtype
    is_skipped = window is not None and "sliding_window" in skipped
    return "auto" if is_skipped or str(extract_layer_index(name)) in skipped else dtype


def _backend(kv_cache_dtype: str) -> Any:
    """Who packs a cache of this dtype: FlashAttention leaves pages dense."""
    if kv_cache_dtype.endswith("_per_token_head"):
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        return TritonAttentionBackend
    if kv_cache_dtype.startswith("turboquant_"):
        from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

        return TurboQuantAttentionBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend


def _nvfp4_backend() -> Any:
    """FlashInfer's, which packs NVFP4. Where its kernels are not installed, only their names are
    there while vLLM's module is loaded: the packing needs none of them."""
    import importlib.util
    import sys
    import types

    class Names(types.ModuleType):
        __path__: MutableSequence[str] = []  # noqa: RUF012  what makes it a package

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    parts = ("", ".decode", ".prefill", ".utils", ".cascade", ".fp4_quantization")
    planted = []
    if importlib.util.find_spec("flashinfer") is None:
        planted = [f"flashinfer{part}" for part in parts]
        sys.modules.update({name: Names(name) for name in planted})
    try:
        from vllm.v1.attention.backends.flashinfer import FlashInferBackend
    finally:
        for name in planted:
            del sys.modules[name]
    return FlashInferBackend


def align_blocks(config: "VllmConfig", options: "ExactOptions") -> None:
    """Platform.update_block_size_for_backend, phases 2 and 3, with the model's own backend."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import Platform

    is_mixed = bool(config.cache_config.kv_cache_dtype_skip_layers) and options.platform == "cuda"
    if not (config.model_config.is_hybrid or is_mixed):
        return
    backend = current_platform._find_non_ssm_backend(config)
    if backend is None:
        return
    if config.model_config.is_hybrid:
        Platform._align_hybrid_block_size.__func__(type(current_platform), config, backend)
    if is_mixed:
        Platform._align_heterogeneous_kv_block_size.__func__(
            type(current_platform), config, backend
        )
