"""The page of each layer: the bytes of one block. Mirrors vLLM's KVCacheSpec classes
(v1/kv_cache_interface.py), and how the layers build them.

A page is `block_size` tokens of one layer on one rank, or a whole mamba state.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from omnicache_cli.errors import UsageError
from omnicache_cli.kv_size.dtypes import Packing, bytes_of, packing_of
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, MambaLayer
from omnicache_cli.kv_size.options import Settings
from omnicache_cli.kv_size.states import state_bytes, state_dtypes, state_shapes

MLA_CONTENT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""MLAAttention.get_kv_cache_spec: packed latent, rope part and scales of one token."""

SCALE_BYTES = 4
"""Per-token-head scales are float32 (TritonAttentionBackend.customize_spec)."""


@dataclass(frozen=True, slots=True)
class AttentionPage:
    """AttentionSpec and its subclasses; `kind` says which."""

    kind: Kind
    block_size: int  # tokens
    num_kv_heads: int  # on one rank
    head_size: int
    head_size_v: int
    dtype: str
    window: int | None = None  # tokens; sliding window or chunk
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    page_size_padded: int | None = None
    extra_retained_tokens: int = 0
    is_indexer: bool = False
    has_indexer: bool = False
    packed_as: str = ""  # the cache dtype where it changes the layout

    @property
    def unpadded_page_bytes(self) -> int:
        """AttentionSpec.unpadded_page_size_bytes."""
        slots = self.num_head_slots or self.num_kv_heads
        content = self.state_content_bytes
        if content is None:
            content = (self.head_size + self.head_size_v) * bytes_of(self.dtype)
        return slots * self.block_size * content

    @property
    def page_bytes(self) -> int:
        """AttentionSpec.page_size_bytes."""
        return self.page_size_padded or self.unpadded_page_bytes


@dataclass(frozen=True, slots=True)
class MambaPage:
    """MambaSpec: one state per page."""

    block_size: int  # tokens between cached states; the context where none are cached
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None
    mode: str
    num_speculative_blocks: int

    kind: ClassVar[Kind] = Kind.MAMBA

    @property
    def unpadded_page_bytes(self) -> int:
        """MambaSpec.state_content_size_bytes."""
        return state_bytes(self.shapes, self.dtypes)

    @property
    def page_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_bytes


Page = AttentionPage | MambaPage


def attention_page(
    layer: AttentionLayer, settings: Settings, block_size: int, shared_page: int | None = None
) -> AttentionPage:
    """Attention.get_kv_cache_spec, MLAAttention.get_kv_cache_spec and their kin.

    `shared_page` is CacheConfig.skip_page_size_padded: bytes to which layers that skip the
    quantised cache are padded.
    """
    cache_dtype = layer_cache_dtype(layer, settings)
    heads = layer.num_kv_heads
    if layer.kind is not Kind.MLA:
        heads = max(1, heads // settings.tensor_parallel_size)
    page = AttentionPage(
        kind=layer.kind,
        block_size=block_size,
        num_kv_heads=heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
        dtype=layer.dtype or (settings.dtype if cache_dtype == "auto" else cache_dtype),
        window=layer.window,
        is_indexer=layer.is_indexer,
        has_indexer=layer.has_indexer,
    )
    if layer.kind is Kind.MLA:
        return page if layer.is_indexer else _packed_latent(page, cache_dtype)
    page = _packed(page, cache_dtype)
    if layer.kind is not Kind.SLIDING:
        return page
    return _sliding(page, settings, shared_page)


def mamba_page(
    layer: MambaLayer, settings: Settings, block_size: int, padded: int | None
) -> MambaPage:
    """MambaBase.get_kv_cache_spec."""
    return MambaPage(
        block_size=block_size,
        shapes=state_shapes(
            layer.state, settings.tensor_parallel_size, settings.num_speculative_tokens
        ),
        dtypes=state_dtypes(
            layer.state, settings.dtype, settings.mamba_cache_dtype, settings.mamba_ssm_cache_dtype
        ),
        page_size_padded=padded,
        mode=settings.mamba_cache_mode,
        num_speculative_blocks=settings.num_speculative_tokens,
    )


def layer_cache_dtype(layer: AttentionLayer, settings: Settings) -> str:
    """Attention.__init__: kv_cache_dtype_skip_layers names layers or the sliding ones."""
    skipped = settings.kv_cache_dtype_skip_layers
    if str(layer.index) in skipped or (layer.window and "sliding_window" in skipped):
        return "auto"
    return settings.kv_cache_dtype


def _sliding(page: AttentionPage, settings: Settings, shared: int | None) -> AttentionPage:
    """Attention.get_kv_cache_spec: the largest kernel block that fits the primary page."""
    one_token = replace(page, block_size=1).unpadded_page_bytes
    budget = shared or one_token * page.block_size
    base = kernel_block(settings)
    size = max(base, budget // one_token // base * base)
    if size * one_token > budget:
        size = base
    if shared is not None and size * one_token > shared:
        raise UsageError(
            f"--kv-cache-dtype-skip-layers: a block of a sliding layer takes {size * one_token:,} "
            f"bytes, more than the {shared:,} that vLLM pads it to; vLLM fails on it too"
        )
    return replace(page, block_size=size, page_size_padded=shared)


def kernel_block(settings: Settings) -> int:
    """The smallest block of FlashAttention and Triton (16), or of the CPU backend (32)."""
    return 32 if settings.platform == "cpu" else 16


def _packed_latent(page: AttentionPage, cache_dtype: str) -> AttentionPage:
    if packing_of(cache_dtype) is not Packing.NONE:
        raise UsageError(
            f"--kv-cache-dtype {cache_dtype}: no MLA backend of vLLM takes it; choose auto, fp8 "
            "or, for sparse MLA, nvfp4_ds_mla"
        )
    content = MLA_CONTENT_BYTES.get(cache_dtype)
    return replace(page, state_content_bytes=content, packed_as=cache_dtype)


def _packed(page: AttentionPage, cache_dtype: str) -> AttentionPage:
    """AttentionBackend.customize_spec of Triton, FlashInfer and TurboQuant."""
    key, value = page.head_size, page.head_size_v
    match packing_of(cache_dtype):
        case Packing.NONE:
            return page
        case Packing.PER_TOKEN_HEAD:
            content = (key + value) * bytes_of(page.dtype) + 2 * SCALE_BYTES
            return replace(page, state_content_bytes=content, packed_as=cache_dtype)
        case Packing.INT4_PER_TOKEN_HEAD:
            content = (key // 2 + value // 2) * bytes_of(page.dtype) + 2 * SCALE_BYTES
            return replace(page, state_content_bytes=content, packed_as=cache_dtype)
        case Packing.NVFP4:
            if key != value:
                raise UsageError(
                    f"--kv-cache-dtype {cache_dtype}: vLLM needs K and V heads of one size, "
                    f"this model has {key} and {value}"
                )
            content = key // 2 + key // 16
            return replace(
                page,
                num_head_slots=2 * page.num_kv_heads,
                state_content_bytes=content,
                packed_as="nvfp4",
            )
        case Packing.TURBOQUANT:
            raise UsageError(
                f"--kv-cache-dtype {cache_dtype}: vLLM leaves some layers of it unquantised by "
                "rules that the fast path does not count; use --exact"
            )
