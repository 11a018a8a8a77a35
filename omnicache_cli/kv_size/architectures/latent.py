"""Multi-head latent attention: one vector per token and layer, whatever the number of heads."""

from omnicache_cli.kv_size.architectures.decoder import decoder
from omnicache_cli.kv_size.fields import Fields
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, Layer, Model

INDEXER_QUANT_BLOCK = 128
"""Elements per scale in the indexer's key cache (Indexer.quant_block_size, deepseek_v2.py)."""


def latent(text: Fields, architecture: str) -> Model:
    """models/deepseek_v2.py: MLA, with an indexer's key cache beside it where index_topk is set.

    A config without kv_lora_rank has plain attention (is_deepseek_mla).
    """
    if not text.has("kv_lora_rank"):
        return decoder()(text, architecture)
    count = text.integer("num_hidden_layers")
    size = text.integer("kv_lora_rank") + text.integer("qk_rope_head_dim")
    is_sparse = text.has("index_topk")
    layers: list[Layer] = []
    for index in range(count):
        owns_indexer = is_sparse and not _shares_indices(text, index)
        if owns_indexer:
            layers.append(_indexer(text, index))
        layers.append(AttentionLayer(index, Kind.MLA, 1, size, 0, has_indexer=owns_indexer))
    return Model(
        architecture,
        tuple(layers),
        num_hidden_layers=count,
        num_attention_heads=text.integer("num_attention_heads"),
        uses_mla=True,
    )


def longcat(text: Fields, architecture: str) -> Model:
    """models/longcat_flash.py: two attention layers in every decoder layer."""
    size = text.integer("kv_lora_rank") + text.integer("qk_rope_head_dim")
    count = text.integer("num_hidden_layers")
    return Model(
        architecture,
        tuple(
            AttentionLayer(index, Kind.MLA, 1, size, 0) for index in range(count) for _ in range(2)
        ),
        num_hidden_layers=count,
        num_attention_heads=text.integer("num_attention_heads"),
        uses_mla=True,
    )


def unfolded_head_size(text: Fields) -> int:
    """models/minicpm3.py: latent projections, but keys and values cached per head."""
    return text.integer("qk_nope_head_dim") + text.integer("qk_rope_head_dim")


def _indexer(text: Fields, index: int) -> AttentionLayer:
    """DeepseekV32IndexerCache: fp8 keys with a float32 scale per block of them."""
    keys = text.integer("index_head_dim")
    width = keys + keys // INDEXER_QUANT_BLOCK * 4
    return AttentionLayer(index, Kind.MLA, 1, width, 0, is_indexer=True, dtype="fp8")


def _shares_indices(text: Fields, index: int) -> bool:
    """DeepseekV2MLAAttention.__init__: layers that reuse the top-k of an earlier one."""
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        return index < len(pattern) and pattern[index] == "S"
    every = text.optional_integer("index_topk_freq") or 1
    offset = text.optional_integer("index_skip_topk_offset")
    return max(index - (2 if offset is None else offset) + 1, 0) % every != 0
