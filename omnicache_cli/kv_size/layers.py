"""What a model's config says of its layers that keep a cache, before any option is applied.

One record per layer, in the order in which vLLM registers them.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The names are vLLM's KVCacheSpecKind."""

    FULL = "full_attention"
    SLIDING = "sliding_window"
    CHUNKED = "chunked_local_attention"
    MLA = "mla_attention"
    CROSS = "cross_attention"
    MAMBA = "mamba"


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention that keeps K and V, or one latent vector (MLA: head_size_v is 0)."""

    index: int  # of the decoder layer
    kind: Kind
    num_kv_heads: int  # of the whole model, before tensor parallelism
    head_size: int
    head_size_v: int
    window: int | None = None  # tokens: the window of a sliding layer, the chunk of a chunked one
    is_indexer: bool = False  # the key cache of a sparse-attention indexer
    has_indexer: bool = False  # an MLA layer that owns one
    is_draft: bool = False  # an MTP or EAGLE layer
    dtype: str | None = None  # where it is not the cache's


@dataclass(frozen=True, slots=True)
class MambaLayer:
    """A layer with one state per request instead of one entry per token."""

    index: int
    state: "StateRule"
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class StateRule:
    """The sizes from which vLLM computes a layer's state; `kind` names the rule in `states`."""

    kind: str
    sizes: tuple[tuple[str, int], ...]
    temporal_dtype: str | None = None  # of the recurrent state, where the config names one
    supports_all_mode: bool = False  # vLLM's SupportsMambaPrefixCaching
    chunk_size: int = 2048  # get_mamba_chunk_size

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]


Layer = AttentionLayer | MambaLayer


@dataclass(frozen=True, slots=True)
class Model:
    """A model's caching layers, and what else of its config the accounting needs."""

    architecture: str
    layers: tuple[Layer, ...]
    num_hidden_layers: int
    num_attention_heads: int
    is_hybrid: bool = False  # attention and mamba side by side
    uses_mla: bool = False
    common_heads: tuple[int, int] | None = None
    """KV heads and head size that vLLM takes for the whole model; None: its first full layer's."""
    num_shared_layers: int = 0  # layers that reuse another layer's cache
    encoder_tokens: int | None = None  # cross attention: tokens of the longest encoder input
    disables_hybrid_manager: bool = False  # chunked attention (VllmConfig.__post_init__)
    notes: tuple[str, ...] = ()
