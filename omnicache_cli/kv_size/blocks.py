"""The block size of the attention layers, and the padding that hybrid models need.

Mirrors Platform.update_block_size_for_backend, _align_hybrid_block_size and
_align_heterogeneous_kv_block_size (vLLM's platforms/interface.py).
"""

from dataclasses import dataclass, replace
from math import lcm

from omnicache_cli.kv_size.dtypes import bytes_of, unpacked
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, MambaLayer, Model
from omnicache_cli.kv_size.options import MLA_BLOCK_SIZE, Settings
from omnicache_cli.kv_size.pages import (
    attention_page,
    kernel_block,
    layer_cache_dtype,
    mamba_page,
)

MLA_ALIGNMENT = 128
"""Tokens: hybrid models with MLA keep whole groups of kernel blocks."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Tokens per block and bytes of the pads; `why` says what set them."""

    attention: int
    mamba: int  # tokens between cached states
    mamba_page_padded: int | None = None
    skipped_page_padded: int | None = None  # CacheConfig.skip_page_size_padded
    why: str = ""


def block_sizes(model: Model, settings: Settings) -> BlockSizes:
    sizes = BlockSizes(
        settings.block_size,
        settings.max_model_len if settings.mamba_cache_mode == "none" else settings.block_size,
        why=settings.sources.get("block_size", ""),
    )
    if not any(isinstance(layer, AttentionLayer) for layer in model.layers):
        return sizes
    if model.is_hybrid:
        sizes = _aligned_hybrid(model, settings, sizes)
    if settings.kv_cache_dtype_skip_layers and settings.platform == "cuda":
        sizes = _aligned_mixed_dtypes(model, settings, sizes)
    return sizes


def _aligned_hybrid(model: Model, settings: Settings, sizes: BlockSizes) -> BlockSizes:
    """_align_hybrid_block_size: an attention page at least as large as a mamba page."""
    token = _token_bytes(model, settings)
    state = max(
        mamba_page(layer, settings, 1, None).page_bytes
        for layer in model.layers
        if isinstance(layer, MambaLayer)
    )
    kernel = max(kernel_block(settings), sizes.attention)
    if model.uses_mla:
        kernel = max(kernel, MLA_ALIGNMENT)
    if settings.mamba_cache_mode == "all":
        chunk = max(
            layer.state.chunk_size for layer in model.layers if isinstance(layer, MambaLayer)
        )
        step = lcm(chunk, kernel)
        block = step * _ceil(_ceil(state, token), step)
        mamba = block
    else:
        block = kernel * _ceil(state, kernel * token)
        mamba = sizes.mamba
    attention = max(sizes.attention, block)
    if settings.mamba_cache_mode == "align":
        mamba = attention
    page = attention * token
    why = sizes.why
    if attention > sizes.attention:
        why = f"raised so that {attention} tokens of attention hold a {state:,}-byte mamba state"
    return replace(
        sizes,
        attention=attention,
        mamba=mamba,
        mamba_page_padded=None if page == state else page,
        why=why,
    )


def _aligned_mixed_dtypes(model: Model, settings: Settings, sizes: BlockSizes) -> BlockSizes:
    """_align_heterogeneous_kv_block_size: quantised layers beside ones that skip it."""
    if model.uses_mla:  # vLLM takes the latent vector twice here, and no packing
        width = next(one.head_size for one in model.layers if isinstance(one, AttentionLayer))
        cached = settings.dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
        primary, widest = 2 * width * bytes_of(cached), 2 * width * bytes_of(settings.dtype)
        kernel = MLA_BLOCK_SIZE
    else:
        primary = _token_bytes(model, settings)
        widest = _token_bytes(model, replace(settings, kv_cache_dtype="auto"))
        kernel = kernel_block(settings)
    if widest == primary:
        return sizes
    step = max(kernel, sizes.attention)
    needed = max(widest * kernel, sizes.mamba_page_padded or 0)
    attention = max(sizes.attention, step * _ceil(needed, step * primary))
    shared = attention * primary
    return replace(
        sizes,
        attention=attention,
        skipped_page_padded=shared,
        mamba_page_padded=None if sizes.mamba_page_padded is None else shared,
        why="raised so that a quantised page covers one of the skipped layers",
    )


def _token_bytes(model: Model, settings: Settings) -> int:
    """Bytes of one token in one attention layer, by the model-wide heads and head size.

    Packed as the backend of the first attention layer packs, which is the primary dtype's unless
    that layer skips it.
    """
    layers = [
        layer
        for layer in model.layers
        if isinstance(layer, AttentionLayer) and not layer.is_indexer and not layer.is_draft
    ]
    full = [layer for layer in layers if layer.kind in (Kind.FULL, Kind.MLA)] or layers
    whole = replace(settings, kv_cache_dtype_skip_layers=())
    if layer_cache_dtype(layers[0], settings) != settings.kv_cache_dtype:
        whole = replace(whole, kv_cache_dtype=unpacked(settings.kv_cache_dtype))
    typical = full[0]
    if typical.kind is not Kind.MLA:
        typical = replace(typical, kind=Kind.FULL, window=None)
    if model.common_heads is not None:
        heads, size = model.common_heads
        typical = replace(typical, num_kv_heads=heads, head_size=size, head_size_v=size)
    return attention_page(typical, whole, 1).page_bytes


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit)
