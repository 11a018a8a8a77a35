"""The longest context a config allows: vLLM's _get_and_verify_max_len (config/model.py)."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from omnicache_cli.errors import BadInputError

KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""derive_max_model_len_and_key (transformers_utils/model_arch_config_convertor.py)."""

LONGEST = 1 << 40

ALREADY_SCALED = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)


def derived_max_model_len(
    config: Mapping[str, Any], text: Mapping[str, Any]
) -> tuple[int | None, str]:
    """Tokens and the field they come from; None where the config names no length."""
    found = {
        key: value for key in KEYS if isinstance(value := text.get(key), int | float) and value
    }
    for key, value in found.items():
        if not (isfinite(value) and 0 < value <= LONGEST):
            raise BadInputError(f"{key} is {value}, which is no length in tokens; correct it")
    if not found:
        return None, ""
    name = min(found, key=lambda key: found[key])
    if "model_max_length" in found:
        name = "model_max_length"
    length = float(found[name])
    ropes = _ropes(config if "rope_parameters" in config or "rope_scaling" in config else text)
    if "gemma3" in str(config.get("model_type", "")):
        return int(length), name
    for rope in ropes:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "longrope":
            original = config.get("original_max_position_embeddings")
            if isinstance(original, int):
                return original, "original_max_position_embeddings"
        factor = rope.get("factor")
        if kind not in ALREADY_SCALED and isinstance(factor, int | float):
            if not (isfinite(factor) and 0 < factor <= LONGEST):
                raise BadInputError(f"the rope factor {factor} is no factor; correct it")
            return int(length * factor), f"{name} times the rope factor {factor:g}"
    return int(length), name


def _ropes(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """rope_parameters (one, or one per layer type) or the older rope_scaling."""
    ropes = part.get("rope_parameters") or part.get("rope_scaling")
    if not isinstance(ropes, Mapping):
        return []
    if any(isinstance(value, Mapping) for value in ropes.values()):
        return [value for value in ropes.values() if isinstance(value, Mapping)]
    return [ropes]
