"""Encoder-decoder models: the decoder caches itself and, once per request, the encoder's output."""

from omnicache_cli.kv_size.fields import Fields
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, Layer, Model


def whisper(text: Fields, architecture: str) -> Model:
    """models/whisper.py: self-attention and cross-attention in each decoder layer, both MHA."""
    count = text.integer("decoder_layers")
    heads = text.integer("decoder_attention_heads")
    size = text.integer("d_model") // heads
    layers: list[Layer] = []
    for index in range(count):
        layers.append(AttentionLayer(index, Kind.FULL, heads, size, size))
        layers.append(AttentionLayer(index, Kind.CROSS, heads, size, size))
    return Model(
        architecture,
        tuple(layers),
        num_hidden_layers=count,
        num_attention_heads=heads,
        encoder_tokens=text.integer("max_source_positions"),
    )
