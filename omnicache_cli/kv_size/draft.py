"""The caching layers of a drafter: MTP layers of the model itself, or an EAGLE or draft model.

Mirrors SpeculativeConfig.hf_config_override (config/speculative.py) for MTP; a drafter's layers
come after the model's, on the last pipeline stage.
"""

from collections.abc import Sequence
from dataclasses import replace

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, Layer
from omnicache_cli.kv_size.model import Reading

MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
ONE_MTP_LAYER = ("Qwen3NextForCausalLM", "Qwen3_5")
"""Architectures, by how they begin, whose model code takes one MTP layer where the config is silent
(models/qwen3_next_mtp.py, qwen3_5_mtp.py)."""

METHODS = ("mtp", "eagle", "eagle3", "draft_model", "ngram")


def draft_layers(
    reading: Reading, method: str | None, num_tokens: int, drafter: Reading | None
) -> Sequence[Layer]:
    """UsageError: the options do not go together; BadInputError names a field."""
    if method is not None and method not in METHODS:
        raise UsageError(f"--speculative-method {method!r}: choose {', '.join(METHODS)}")
    if method is None:
        if num_tokens or drafter is not None:
            raise UsageError("speculative decoding needs --speculative-method, such as mtp")
        return ()
    if not num_tokens:
        raise UsageError(f"--speculative-method {method} needs --num-speculative-tokens N")
    if method == "ngram":
        return ()
    if method == "mtp":
        return _mtp(reading)
    if drafter is None:
        raise UsageError(f"--speculative-method {method} needs --speculative-model DIR")
    first = reading.model.num_hidden_layers
    return tuple(
        replace(layer, index=first + layer.index, is_draft=True) for layer in drafter.model.layers
    )


def _mtp(reading: Reading) -> Sequence[Layer]:
    """One attention layer, of the kind of the model's last one, per MTP layer."""
    count = next(
        (
            value
            for name in MTP_FIELDS
            if isinstance(value := reading.text.get(name), int) and value > 0
        ),
        1 if reading.model.architecture.startswith(ONE_MTP_LAYER) else None,
    )
    if count is None:
        raise BadInputError(
            f"the config has no {' or '.join(MTP_FIELDS)}, so the model has no MTP layers; "
            "choose another --speculative-method"
        )
    attention = [layer for layer in reading.model.layers if isinstance(layer, AttentionLayer)]
    if count > 1 and any(layer.kind is Kind.SLIDING for layer in attention):
        raise BadInputError(
            f"{count} MTP layers beside sliding windows: vLLM retains further tokens there, which "
            "the fast path does not count"
        )
    full = [layer for layer in attention if layer.kind is not Kind.SLIDING] or attention
    last = [layer for layer in full if not layer.is_indexer][-1]
    indexer = [layer for layer in full if layer.is_indexer][-1:]
    first = reading.model.num_hidden_layers
    return tuple(
        replace(layer, index=first + number, is_draft=True)
        for number in range(count)
        for layer in (*indexer, replace(last, has_indexer=bool(indexer)))
    )
