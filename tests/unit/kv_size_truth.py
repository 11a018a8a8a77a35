"""The ground-truth files of tests/data/kv-size, and models made from what their rows say."""

import json
from pathlib import Path
from typing import Any

from omnicache_cli.kv_size.estimate import Estimate, account
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, Layer, MambaLayer, Model, StateRule
from omnicache_cli.kv_size.options import Settings

DATA = Path(__file__).parents[1] / "data" / "kv-size"
CONFIGS = DATA / "configs"
GIB = 1 << 30


def rows(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def settings(**changes: Any) -> Settings:
    """bfloat16, one GPU, block 16, vLLM's other defaults; `changes` replace them."""
    values: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "kv_cache_dtype_skip_layers": (),
        "block_size": 16,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "async_scheduling": True,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "none",
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "auto",
        "num_speculative_tokens": 0,
        "disable_hybrid_kv_cache_manager": False,
        "num_gpu_blocks_override": None,
        "platform": "cuda",
    }
    return Settings(**{**values, **changes})


def full(count: int, heads: int, head_size: int, first: int = 0) -> list[Layer]:
    return [
        AttentionLayer(first + index, Kind.FULL, heads, head_size, head_size)
        for index in range(count)
    ]


def sliding(count: int, heads: int, head_size: int, window: int, first: int = 0) -> list[Layer]:
    return [
        AttentionLayer(first + index, Kind.SLIDING, heads, head_size, head_size, window)
        for index in range(count)
    ]


def states(count: int, rule: StateRule, first: int = 0) -> list[Layer]:
    return [MambaLayer(first + index, rule) for index in range(count)]


def model_of(layers: list[Layer], **changes: Any) -> Model:
    values: dict[str, Any] = {
        "architecture": "made by a test",
        "layers": tuple(layers),
        "num_hidden_layers": len(layers),
        "num_attention_heads": 64,
    }
    return Model(**{**values, **changes})


def counted(model: Model, available: int | None = None, **changes: Any) -> Estimate:
    return account(model, settings(**changes), None if available is None else [available])
