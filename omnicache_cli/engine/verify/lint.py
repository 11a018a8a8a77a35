"""What cannot be verified, said before an engine starts, with the option to change."""

from collections.abc import Iterator
from typing import Any

from omnicache_cli.errors import BadInputError


def refuse(config: Any) -> None:
    """BadInputError: this VllmConfig cannot be verified; all reasons in one line."""
    reasons = list(why_not(config))
    if reasons:
        raise BadInputError("nothing verified: " + "; ".join(reasons))


def why_not(config: Any) -> Iterator[str]:
    """Each reason with what to change. `config` is a VllmConfig, before the engine is built."""
    model, cache = config.model_config, config.cache_config
    if config.speculative_config is not None:
        yield "speculative decoding moves the scheduled positions; leave out speculative_config"
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.is_kv_consumer:
        yield (
            "rows of tokens that a KV connector loads were never computed here; leave out "
            "kv_transfer_config"
        )
    if model.is_hybrid or model.is_attention_free:
        yield "a model with recurrent states (mamba) has no slot per token; verify another model"
    elif model.get_sliding_window() is not None or _has_window(model):
        yield (
            "a sliding window frees blocks that a hit would restore; try "
            "--engine disable_hybrid_kv_cache_manager=true, or another model"
        )
    unit = cache.prefix_match_unit
    if unit is not None and unit != cache.block_size:
        yield f"hits end inside blocks of {cache.block_size}; leave out prefix_match_unit={unit}"
    if not cache.enable_prefix_caching:
        yield (
            "prefix caching is off: vLLM turns it off for this model on this device; verify on "
            "another device, or leave out --no-enable-prefix-caching"
        )
    parallel = config.parallel_config
    if parallel.world_size > 1:
        yield f"verify runs on one rank, not on {parallel.world_size}; leave out the parallel sizes"


def _has_window(model: Any) -> bool:
    """Some layers of the model look at a window only."""
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    return any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)


def refuse_groups(groups: Any) -> None:
    """The engine is up: it must have one group of full attention. BadInputError: it has not."""
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"]:
        raise BadInputError(
            f"nothing verified: the engine has KV cache groups of {', '.join(kinds) or 'no kind'}; "
            "a tensor cache needs one group of FullAttentionSpec: verify another model"
        )
