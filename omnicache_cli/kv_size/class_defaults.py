"""Run as a script by `model`: the config class of transformers fills in what config.json omits.

torch is blocked, which makes the import of transformers four times as fast and keeps it below
100 MB. Prints one JSON object; nothing of omnicache is imported.
"""

import json
import sys


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]
    import logging

    logging.disable(logging.WARNING)
    print(json.dumps(answer(*sys.argv[1:]), default=str))


def answer(path: str, stage: str = "") -> dict[str, object]:
    """The config in `path`, its text config, and the version of transformers; or why not.

    Of an omni model the stage's, or the thinker's.
    """
    try:
        import transformers
    except ImportError as error:
        return {"missing": str(error)}
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        config = getattr(config, stage or "thinker_config", None) or config
        text = config.get_text_config()
        found = {"config": config.to_dict(), "text": {**text.to_dict(), **_properties(text)}}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {**found, "version": transformers.__version__}


def _properties(config: object) -> dict[str, object]:
    """Attributes that a class computes or maps, and that to_dict leaves out."""
    names = (
        *("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads"),
        *("layers_block_type", "layer_types", "sliding_window", "head_dim", "intermediate_size"),
        *("conv_dim", "hybrid_override_pattern", "n_head_kv", "num_kv_heads"),
    )
    found: dict[str, object] = {}
    for name in names:
        try:
            value = getattr(config, name)
        except Exception:
            continue
        if value is None or isinstance(value, int | str | list | tuple):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


if __name__ == "__main__":
    main()
