"""The `lora` kind: the text model, and beside it two LoRA adapters that differ in every weight.

An adapter is a folder in the format that PEFT writes: rank 8, on the query and value projections.
"""

from omnicache_cli.engine.tiny_models.text import (
    HEAD_DIM,
    HIDDEN_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    text_model_files,
)
from omnicache_cli.engine.tiny_models.tokenizer import json_bytes
from omnicache_cli.engine.tiny_models.weights import random_tensors

ADAPTERS = ("adapter-a", "adapter-b")
RANK = 8
WIDTHS = {"q_proj": NUM_HEADS * HEAD_DIM, "v_proj": NUM_KV_HEADS * HEAD_DIM}
"""Output features of the projections that an adapter changes."""


def lora_model_files() -> dict[str, bytes]:
    files = text_model_files()
    for name in ADAPTERS:
        files[f"{name}/adapter_config.json"] = json_bytes(
            {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(WIDTHS)}
        )
        files[f"{name}/adapter_model.safetensors"] = random_tensors(_shapes(), series=name)
    return files


def _shapes() -> dict[str, tuple[int, int]]:
    shapes = {}
    for layer in range(NUM_LAYERS):
        for projection, width in WIDTHS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            shapes[f"{prefix}.lora_A.weight"] = (RANK, HIDDEN_SIZE)
            shapes[f"{prefix}.lora_B.weight"] = (width, RANK)
    return shapes
