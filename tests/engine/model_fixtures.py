"""Tiny models, built once for all engine tests; conftest.py imports these fixtures."""

import json
from pathlib import Path

import pytest

from omnicache_cli.engine.tiny_kinds import TINY_MODEL_KINDS
from omnicache_cli.engine.tiny_models import build_tiny_model


@pytest.fixture(scope="session")
def tiny_text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "text"
    build_tiny_model("text", directory)
    return directory


@pytest.fixture(scope="session")
def tiny_image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "image"
    build_tiny_model("image", directory)
    return directory


@pytest.fixture(scope="session")
def tiny_models(
    tiny_text_model: Path, tiny_image_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Every kind: its folder."""
    models = {"text": tiny_text_model, "image": tiny_image_model}
    for kind in TINY_MODEL_KINDS.keys() - models.keys():
        models[kind] = tmp_path_factory.mktemp("models") / kind
        build_tiny_model(kind, models[kind])
    return models


def write_lora(model: Path, directory: Path) -> None:
    """A rank-8 adapter for q and v of the tiny text model, in the format vLLM loads."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    widths = {
        "q_proj": config["num_attention_heads"] * head_dim,
        "v_proj": config["num_key_value_heads"] * head_dim,
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (8, hidden)), ("lora_B", (width, 8))):
                values = torch.randn(shape, generator=generator).to(torch.bfloat16)
                tensors[f"{prefix}.{part}.weight"] = values
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(widths)}
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
