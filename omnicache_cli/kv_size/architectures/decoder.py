"""Decoders whose layers are full, sliding or chunked attention.

vLLM gives a layer its window in one of two ways: the model code passes `per_layer_sliding_window`,
or Attention.__init__ falls back to CacheConfig.sliding_window, which EngineArgs sets only where the
config has no layer_types, or all of them are sliding.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from omnicache_cli.errors import BadInputError
from omnicache_cli.kv_size.fields import Fields, NeedsClassDefaults
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, Model

LAYER_TYPES = frozenset(
    {"full_attention", "sliding_attention", "attention", "chunked_attention", "hybrid_attention"}
)

Windows = Callable[[Fields, int], Sequence[int | None]]
"""Per layer the tokens of its window, None for full attention."""


def head_size(text: Fields) -> int:
    """ModelArchConfigConvertorBase.get_head_size without MLA, as most model code computes it."""
    size = text.optional_integer("head_dim")
    if size:
        return size
    heads = text.integer("num_attention_heads", "n_head")
    return text.integer("hidden_size", "n_embd") // heads


def split_head_size(text: Fields) -> int:
    """Model code that ignores head_dim: hidden_size // num_attention_heads."""
    return text.integer("hidden_size") // text.integer("num_attention_heads")


def kv_heads(text: Fields) -> int:
    """ModelArchConfigConvertorBase.get_total_num_kv_heads for the usual names."""
    heads = text.optional_integer("num_key_value_heads")
    return heads if heads is not None else text.integer("num_attention_heads", "n_head")


def all_heads(text: Fields) -> int:
    """Multi-head attention: model code that passes no num_kv_heads."""
    return text.integer("num_attention_heads", "n_head")


def no_windows(text: Fields, count: int) -> Sequence[int | None]:
    return [None] * count


def model_window(text: Fields, count: int) -> Sequence[int | None]:
    """CacheConfig.sliding_window (EngineArgs.create_engine_config), the same for every layer.

    A window of 0 means none (ModelConfig.__post_init__).
    """
    types = text.get("layer_types")
    if types is not None and not all(word == "sliding_attention" for word in types):
        return [None] * count
    return [text.optional_integer("sliding_window") or None] * count


def window_if_used(text: Fields, count: int) -> Sequence[int | None]:
    """Qwen2 and its kin: their config class drops sliding_window unless use_sliding_window."""
    if not text.get("use_sliding_window"):
        return [None] * count
    types = text.get("layer_types")
    if types is not None and len(set(types)) > 1:
        raise BadInputError(
            f"{text.path}layer_types mixes {sorted(set(types))}, which vLLM's model code for this "
            "architecture does not run; check use_sliding_window and max_window_layers"
        )
    return model_window(text, count)


def by_layer_types(text: Fields, count: int) -> Sequence[int | None]:
    """layer_types names the sliding layers; without layer_types every layer is like the next."""
    if not text.has("layer_types"):
        return model_window(text, count)
    words = text.words("layer_types", LAYER_TYPES - {"chunked_attention"}, count)
    window = text.optional_integer("sliding_window") if "sliding_attention" in words else None
    if "sliding_attention" in words and not window:
        raise BadInputError(
            f"{text.path}layer_types has sliding_attention but {text.path}sliding_window is "
            f"{window!r}; complete the config.json"
        )
    return [window if word == "sliding_attention" else None for word in words]


def one_more_than_window(text: Fields, count: int) -> Sequence[int | None]:
    """Cohere's window counts the token itself apart: sliding_window + 1 (models/commandr.py)."""
    return [window and window + 1 for window in by_layer_types(text, count)]


def every_other(text: Fields, count: int) -> Sequence[int | None]:
    """gpt-oss: layers 0, 2, 4, ... slide, whatever layer_types says (models/gpt_oss.py)."""
    window = text.integer("sliding_window")
    return [window if index % 2 == 0 else None for index in range(count)]


def decoder(
    windows: Windows = model_window,
    *,
    heads: Callable[[Fields], int] = kv_heads,
    size: Callable[[Fields], int] = head_size,
    value_size: Callable[[Fields], int] | None = None,
) -> Callable[[Fields, str], Model]:
    """A reader of models whose attention layers differ in their windows only."""

    def read(text: Fields, architecture: str) -> Model:
        count = text.integer("num_hidden_layers", "n_layer")
        num_heads, head = heads(text), size(text)
        head_v = value_size(text) if value_size is not None else head
        layers = tuple(
            AttentionLayer(
                index, Kind.SLIDING if window else Kind.FULL, num_heads, head, head_v, window
            )
            for index, window in enumerate(windows(text, count))
        )
        return Model(
            architecture,
            layers,
            num_hidden_layers=count,
            num_attention_heads=text.integer("num_attention_heads", "n_head"),
        )

    return read


def falcon_heads(text: Fields) -> int:
    """FalconModelArchConfigConvertor.get_total_num_kv_heads."""
    if not text.get("new_decoder_architecture") and text.get("multi_query"):
        return 1
    return text.integer("num_kv_heads", "n_head_kv", "num_attention_heads", "n_head")


def llama4(text: Fields, architecture: str) -> Model:
    """models/llama4.py: three of four layers attend in chunks, the NoPE layers to everything."""
    count = text.integer("num_hidden_layers")
    chunk = text.optional_integer("attention_chunk_size")
    ropes = text.integers("no_rope_layers")
    if len(ropes) < count:  # an empty list is filled by the config class
        raise NeedsClassDefaults(f"{text.path}no_rope_layers")
    layers = []
    for index in range(count):
        is_chunked = bool(chunk) and ropes[index] != 0
        layers.append(
            AttentionLayer(
                index,
                Kind.CHUNKED if is_chunked else Kind.FULL,
                kv_heads(text),
                head_size(text),
                head_size(text),
                chunk if is_chunked else None,
            )
        )
    return Model(
        architecture,
        tuple(layers),
        num_hidden_layers=count,
        num_attention_heads=text.integer("num_attention_heads"),
        disables_hybrid_manager=bool(chunk),
    )


def gemma3n(text: Fields, architecture: str) -> Model:
    """models/gemma3n.py: the last num_kv_shared_layers reuse the cache of an earlier layer."""
    model = decoder(by_layer_types)(text, architecture)
    return _without_shared(model, text.optional_integer("num_kv_shared_layers") or 0)


def gemma4(text: Fields, architecture: str) -> Model:
    """models/gemma4.py: full layers have their own head size and KV heads; V may be K again."""
    count = text.integer("num_hidden_layers")
    windows = by_layer_types(text, count)
    wide = text.optional_integer("global_head_dim") or head_size(text)
    wide_heads = kv_heads(text)
    if text.get("attention_k_eq_v"):
        wide_heads = text.optional_integer("num_global_key_value_heads") or wide_heads
    layers = tuple(
        AttentionLayer(index, Kind.SLIDING, kv_heads(text), head_size(text), head_size(text), one)
        if one
        else AttentionLayer(index, Kind.FULL, wide_heads, wide, wide)
        for index, one in enumerate(windows)
    )
    model = Model(
        architecture,
        layers,
        num_hidden_layers=count,
        num_attention_heads=text.integer("num_attention_heads"),
        common_heads=(kv_heads(text), max(wide, head_size(text))),
    )
    return _without_shared(model, text.optional_integer("num_kv_shared_layers") or 0)


def _without_shared(model: Model, num_shared: int) -> Model:
    if not num_shared:
        return model
    first = model.num_hidden_layers - num_shared
    return replace(
        model,
        layers=tuple(layer for layer in model.layers if layer.index < first),
        num_shared_layers=num_shared,
    )


def dbrx(text: Fields, architecture: str) -> Model:
    """models/dbrx.py: names of its own."""
    heads = text.integer("n_heads")
    count, size = text.integer("n_layers"), text.integer("d_model") // heads
    kv = text.mapping("attn_config").integer("kv_n_heads")
    return Model(
        architecture,
        tuple(AttentionLayer(index, Kind.FULL, kv, size, size) for index in range(count)),
        num_hidden_layers=count,
        num_attention_heads=heads,
    )
