"""Models with mamba, gated delta net, delta attention or short convolution beside attention.

The sizes of each state are those that the model class's get_mamba_state_shape_from_config reads.
"""

from collections.abc import Callable, Sequence

from omnicache_cli.errors import BadInputError
from omnicache_cli.kv_size.architectures.decoder import (
    head_size,
    kv_heads,
)
from omnicache_cli.kv_size.fields import Fields
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, Layer, MambaLayer, Model, StateRule

MAMBA = frozenset({"mamba", "linear_attention", "conv"})
ATTENTION = frozenset({"attention", "full_attention"})
OTHER = frozenset({"mlp", "moe"})
BOTH = frozenset({"hybrid"})
WORDS = MAMBA | ATTENTION | OTHER | BOTH


def hybrid(
    state: Callable[[Fields], StateRule],
    words: Callable[[Fields, int], Sequence[str]],
    *,
    size: Callable[[Fields], int] = head_size,
    heads: Callable[[Fields], int] = kv_heads,
) -> Callable[[Fields, str], Model]:
    """A reader: `words` says of each layer what it is."""

    def read(text: Fields, architecture: str) -> Model:
        count = text.integer("num_hidden_layers")
        rule = state(text)
        layers: list[Layer] = []
        for index, word in enumerate(words(text, count)):
            if word in MAMBA | BOTH:
                layers.append(MambaLayer(index, rule))
            if word in ATTENTION | BOTH:
                layers.append(AttentionLayer(index, Kind.FULL, heads(text), size(text), size(text)))
        kinds = {type(layer) for layer in layers}
        return Model(
            architecture,
            tuple(layers),
            num_hidden_layers=count,
            num_attention_heads=text.integer("num_attention_heads"),
            is_hybrid=len(kinds) > 1 or MambaLayer in kinds,
        )

    return read


def layer_types(text: Fields, count: int) -> Sequence[str]:
    return text.words("layer_types", WORDS, count)


def layers_block_type(text: Fields, count: int) -> Sequence[str]:
    return text.words("layers_block_type", WORDS, count)


def full_every_nth(text: Fields, count: int) -> Sequence[str]:
    """layer_types, or full_attention_interval as the config class of Qwen3-Next reads it."""
    if "layer_types" not in text.values and "full_attention_interval" in text.values:
        interval = text.integer("full_attention_interval")
        return [
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(count)
        ]
    return layer_types(text, count)


def jamba_words(text: Fields, count: int) -> Sequence[str]:
    """JambaConfig.layers_block_type."""
    period, offset = text.integer("attn_layer_period"), text.integer("attn_layer_offset")
    return ["attention" if index % period == offset else "mamba" for index in range(count)]


def all_both(text: Fields, count: int) -> Sequence[str]:
    return ["hybrid"] * count


def nemotron_h_words(text: Fields, count: int) -> Sequence[str]:
    """hybrid_override_pattern: M mamba, * attention, - MLP, E experts (models/nemotron_h.py)."""
    pattern = text.get("hybrid_override_pattern")
    if pattern is None:
        return layers_block_type(text, count)
    known = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if not isinstance(pattern, str) or set(pattern) - known.keys():
        raise BadInputError(
            f"{text.path}hybrid_override_pattern is {pattern!r}; the fast path knows "
            f"{', '.join(known)}; use --exact"
        )
    return [known[letter] for letter in pattern]


def zamba_words(text: Fields, count: int) -> Sequence[str]:
    """Zamba2: every layer has mamba, a hybrid one attention as well."""
    return text.words("layers_block_type", MAMBA | BOTH, count)


def zamba_head(text: Fields) -> int:
    """Zamba2Config: attention runs on twice the hidden size."""
    size = text.optional_integer("attention_head_dim")
    return size or 2 * text.integer("hidden_size") // text.integer("num_attention_heads")


def gated_delta_net(text: Fields) -> StateRule:
    """Qwen3-Next and Qwen3.5."""
    sizes = {
        "num_k_heads": text.integer("linear_num_key_heads"),
        "num_v_heads": text.integer("linear_num_value_heads"),
        "head_k_dim": text.integer("linear_key_head_dim"),
        "head_v_dim": text.integer("linear_value_head_dim"),
        "conv_kernel": text.integer("linear_conv_kernel_dim"),
    }
    return StateRule("gated_delta_net", tuple(sizes.items()))


def qwen3_5_state(text: Fields) -> StateRule:
    """Qwen3_5ForConditionalGenerationConfig: the config's mamba_ssm_dtype."""
    rule = gated_delta_net(text)
    return StateRule(rule.kind, rule.sizes, temporal_dtype=text.get("mamba_ssm_dtype"))


def jamba_state(text: Fields) -> StateRule:
    sizes = {
        "intermediate_size": text.integer("mamba_expand") * text.integer("hidden_size"),
        "state_size": text.integer("mamba_d_state"),
        "conv_kernel": text.integer("mamba_d_conv"),
    }
    return StateRule("mamba1", tuple(sizes.items()), supports_all_mode=True)


def mamba1_state(text: Fields) -> StateRule:
    sizes = {
        "intermediate_size": text.integer("intermediate_size"),
        "state_size": text.integer("state_size"),
        "conv_kernel": text.integer("conv_kernel"),
    }
    return StateRule("mamba1", tuple(sizes.items()), supports_all_mode=True)


def _mamba2(
    intermediate: int,
    groups: int,
    heads: int,
    head: int,
    state: int,
    kernel: int,
    chunk: int,
    temporal_dtype: str | None = None,
    kind: str = "mamba2",
) -> StateRule:
    sizes = {
        "intermediate_size": intermediate,
        "n_groups": groups,
        "num_heads": heads,
        "head_dim": head,
        "state_size": state,
        "conv_kernel": kernel,
    }
    return StateRule(
        kind,
        tuple(sizes.items()),
        temporal_dtype=temporal_dtype,
        supports_all_mode=True,
        chunk_size=chunk,
    )


def mamba2_state(text: Fields) -> StateRule:
    return _mamba2(
        text.integer("expand") * text.integer("hidden_size"),
        text.integer("n_groups"),
        text.integer("num_heads"),
        text.integer("head_dim"),
        text.integer("state_size"),
        text.integer("conv_kernel"),
        text.optional_integer("chunk_size") or 2048,
        kind="mamba2_speculative",
    )


def falcon_h1_state(text: Fields) -> StateRule:
    width = text.optional_integer("mamba_d_ssm")
    if width is None:
        width = text.integer("mamba_expand") * text.integer("hidden_size")
    return _mamba2(
        width,
        text.integer("mamba_n_groups"),
        text.integer("mamba_n_heads"),
        text.integer("mamba_d_head"),
        text.integer("mamba_d_state"),
        text.integer("mamba_d_conv"),
        text.optional_integer("mamba_chunk_size") or 2048,
    )


def granite_state(text: Fields) -> StateRule:
    heads, head = text.integer("mamba_n_heads"), text.get("mamba_d_head")
    width = text.integer("mamba_expand") * text.integer("hidden_size")
    return _mamba2(
        width,
        text.integer("mamba_n_groups"),
        heads,
        width // heads if head in (None, "auto") else text.integer("mamba_d_head"),
        text.integer("mamba_d_state"),
        text.integer("mamba_d_conv"),
        text.optional_integer("mamba_chunk_size") or 2048,
    )


def nemotron_h_state(text: Fields) -> StateRule:
    """NemotronHForCausalLMConfig: the recurrent state is float32 unless the config says."""
    heads, head = text.integer("mamba_num_heads"), text.integer("mamba_head_dim")
    return _mamba2(
        heads * head,
        text.integer("n_groups"),
        heads,
        head,
        text.integer("ssm_state_size"),
        text.integer("conv_kernel"),
        text.optional_integer("chunk_size") or 2048,
        temporal_dtype=text.get("mamba_ssm_cache_dtype") or "float32",
        kind="mamba2_speculative",
    )


def zamba_state(text: Fields) -> StateRule:
    return _mamba2(
        text.integer("mamba_expand") * text.integer("hidden_size"),
        text.integer("mamba_ngroups"),
        text.integer("n_mamba_heads"),
        text.integer("mamba_headdim"),
        text.integer("mamba_d_state"),
        text.integer("mamba_d_conv"),
        text.optional_integer("chunk_size") or 2048,
    )


def short_conv(text: Fields) -> StateRule:
    """LFM2: a short convolution has no recurrent state."""
    sizes = {
        "intermediate_size": text.integer("conv_dim", "hidden_size"),
        "conv_kernel": text.integer("conv_L_cache"),
    }
    return StateRule("short_conv", tuple(sizes.items()))


def mamba_only(state: Callable[[Fields], StateRule]) -> Callable[[Fields, str], Model]:
    """Every layer is mamba; vLLM turns prefix caching off for attention-free models."""

    def read(text: Fields, architecture: str) -> Model:
        count = text.integer("num_hidden_layers", "n_layer")
        rule = state(text)
        return Model(
            architecture,
            tuple(MambaLayer(index, rule) for index in range(count)),
            num_hidden_layers=count,
            num_attention_heads=0,
        )

    return read


def mamba2_only(text: Fields, architecture: str) -> Model:
    return mamba_only(mamba2_state)(text, architecture)


def kimi_linear(text: Fields, architecture: str) -> Model:
    """models/kimi_k3: delta attention, and MLA in the layers that are none of kda_layers."""
    linear = text.mapping("linear_attn_config")
    rule = StateRule(
        "delta_attention",
        (
            ("num_heads", linear.integer("num_heads")),
            ("head_dim", linear.integer("head_dim")),
            ("conv_kernel", linear.integer("short_conv_kernel_size")),
        ),
        temporal_dtype="float32",  # kda_state_dtype
    )
    count = text.integer("num_hidden_layers")
    states = {number - 1 for number in linear.integers("kda_layers")}  # counted from one
    size = text.integer("kv_lora_rank") + text.integer("qk_rope_head_dim")
    layers: list[Layer] = [
        MambaLayer(index, rule) if index in states else AttentionLayer(index, Kind.MLA, 1, size, 0)
        for index in range(count)
    ]
    return Model(
        architecture,
        tuple(layers),
        num_hidden_layers=count,
        num_attention_heads=text.integer("num_attention_heads"),
        is_hybrid=bool(states),
        uses_mla=True,
    )
