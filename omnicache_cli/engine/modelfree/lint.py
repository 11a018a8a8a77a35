"""What engine arguments say about the prefix cache, before an engine is built."""

from dataclasses import dataclass
from typing import Any

from omnicache_cli.engine.options import EngineOptions, engine_config


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """Plain values of a VllmConfig. Blocks: (full, window or state; tokens)."""

    enable_prefix_caching: bool
    blocks: tuple[tuple[str, int], ...]
    unit: int | None
    drops_unit: bool
    retention_interval: int | None


def config_facts(options: EngineOptions) -> ConfigFacts:
    """EngineFailedError: vLLM refuses the arguments."""
    config = engine_config(options)
    cache, model = config.cache_config, config.model_config
    if model.is_hybrid:
        _align_blocks(config)
    size = int(cache.block_size)
    kinds = [str(one) for one in getattr(model.hf_text_config, "layer_types", None) or ()]
    blocks = [("full", size)]
    if model.get_sliding_window() is not None or any("sliding" in kind for kind in kinds):
        blocks.append(("window", size))
    unit = None
    if model.is_hybrid:
        blocks.append(("state", int(cache.mamba_block_size or size)))
        if cache.mamba_cache_mode == "align" and cache.prefix_match_unit is not None:
            unit = int(cache.prefix_match_unit)
    drafting: Any = config.speculative_config
    return ConfigFacts(
        bool(cache.enable_prefix_caching),
        tuple(blocks),
        unit,
        drafting is not None and bool(drafting.use_eagle_block_drop()),
        cache.prefix_cache_retention_interval,
    )


def _align_blocks(config: Any) -> None:
    """What vLLM does when it has built a hybrid model: a block of attention holds a state."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        backend = get_attn_backend(
            model.get_head_size(), model.dtype, config.cache_config.cache_dtype, model.use_mla
        )
    current_platform._align_hybrid_block_size(config, backend)
