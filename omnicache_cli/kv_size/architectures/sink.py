"""Models whose sliding layers have their own heads, head sizes and attention sinks.

A sink is a learned bias, not a cached token: it takes no room in these models.
"""

from omnicache_cli.errors import BadInputError
from omnicache_cli.kv_size.architectures.decoder import head_size
from omnicache_cli.kv_size.fields import Fields
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, Model


def mimo_v2(text: Fields, architecture: str) -> Model:
    """models/mimo_v2.py: hybrid_layer_pattern 1 slides; K and V have different head sizes."""
    count = text.integer("num_hidden_layers")
    pattern = text.integers("hybrid_layer_pattern")
    if len(pattern) < count:
        raise BadInputError(
            f"{text.path}hybrid_layer_pattern has {len(pattern)} entries for {count} layers"
        )
    window = text.integer("sliding_window_size", "sliding_window")
    size, sliding_size = text.integer("head_dim"), text.integer("swa_head_dim")
    value = text.optional_integer("v_head_dim") or size
    sliding_value = text.optional_integer("swa_v_head_dim") or sliding_size
    heads, sliding_heads = (
        text.integer("num_key_value_heads"),
        text.integer("swa_num_key_value_heads"),
    )
    layers = tuple(
        AttentionLayer(index, Kind.SLIDING, sliding_heads, sliding_size, sliding_value, window)
        if pattern[index] == 1
        else AttentionLayer(index, Kind.FULL, heads, size, value)
        for index in range(count)
    )
    return Model(
        architecture,
        layers,
        num_hidden_layers=count,
        num_attention_heads=text.integer("num_attention_heads"),
        common_heads=(heads, size),
    )


def step3p5(text: Fields, architecture: str) -> Model:
    """models/step3p5.py: attention_other_setting changes the layers of one type."""
    count = text.integer("num_hidden_layers")
    words = text.words("layer_types", frozenset({"full_attention", "sliding_attention"}), count)
    window = text.integer("sliding_window")
    other = text.get("attention_other_setting") or {}
    layers = []
    for index, word in enumerate(words):
        heads, size = text.integer("num_attention_groups"), head_size(text)
        if other.get("attention_type") == word:
            heads, size = int(other["num_attention_groups"]), int(other["head_dim"])
        slides = word == "sliding_attention"
        kind = Kind.SLIDING if slides else Kind.FULL
        layers.append(AttentionLayer(index, kind, heads, size, size, window if slides else None))
    return Model(
        architecture,
        tuple(layers),
        num_hidden_layers=count,
        num_attention_heads=text.integer("num_attention_heads"),
    )
