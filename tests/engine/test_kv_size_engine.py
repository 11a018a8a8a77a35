"""Real engines on the CPU: what vLLM has allocated equals the estimate made before it started."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.kv_size.estimate import Estimate, estimate
from omnicache_cli.kv_size.hardware import cpu_flags
from omnicache_cli.kv_size.model import open_config, read_model
from omnicache_cli.kv_size.options import Options
from omnicache_cli.kv_size.startup_log import compare_log, options_of_log, read_log

MEMORY = 1 << 30


def started(model: Path, **arguments: Any) -> tuple[int, int, float, list[tuple[str, int, int]]]:
    """Blocks, tokens, concurrency and (kind, layers, block size) per group of a live engine."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            enforce_eager=True,
            kv_cache_memory_bytes=MEMORY,
            max_num_seqs=4,
            skip_mm_profiling=True,
            **arguments,
        )
    )
    core = engine.engine_core.engine_core
    cache = core.vllm_config.cache_config
    config = core.scheduler.kv_cache_config
    groups = [
        (get_kv_cache_spec_kind(group.kv_cache_spec).value, len(group.layer_names), block)
        for group in config.kv_cache_groups
        for block in (group.kv_cache_spec.block_size,)
    ]
    assert config.num_blocks == cache.num_gpu_blocks
    return (
        config.num_blocks,
        cache.kv_cache_size_tokens,
        cache.kv_cache_max_concurrency,
        sorted(groups),
    )


def estimated(model: Path, **changes: Any) -> Estimate:
    options = Options(platform="cpu", max_num_seqs=4, cpu_flags=cpu_flags(), **changes)
    return estimate(read_model(open_config(str(model))), options, [MEMORY])


@contextlib.contextmanager
def its_log(path: Path) -> Iterator[None]:
    """What vLLM's loggers say meanwhile; importing vLLM sets them up.

    A line that an engine before this one put out, word for word, would not come again.
    """
    from vllm.logger import _print_info_once

    _print_info_once.cache_clear()
    logger, handler = logging.getLogger("vllm"), logging.FileHandler(path)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


def assert_log_agrees(path: Path, model: Path, **arguments: Any) -> None:
    """--startup-log: the options are the log's where it states them."""
    log = read_log(path)
    given = Options(block_size=arguments.get("block_size"), cpu_flags=cpu_flags())
    options, taken = options_of_log(log, given)
    reading = read_model(open_config(str(model)))
    findings = compare_log(
        log,
        lambda memory: estimate(reading, options, memory),
        lambda memory: estimate(reading, options, memory),
    )
    assert {"platform", "max_model_len"} <= set(taken)
    assert log.available_gib == (1.0,)
    assert [(one.name, one.verdict) for one in findings] == [
        ("KV cache size, tokens", "agrees"),
        ("maximum concurrency", "agrees"),
    ]


def assert_as_estimated(model: Path, log: Path, **arguments: Any) -> None:
    found = estimated(model, **arguments)
    with its_log(log):
        blocks, tokens, concurrency, groups = started(model, **arguments)

    assert_log_agrees(log, model, **arguments)

    assert blocks == found.pool.num_blocks
    assert tokens == found.tokens
    assert concurrency == found.concurrency
    assert groups == sorted(
        (group.kind.value, len(group.pages), group.block_size) for group in found.pool.groups
    )


@pytest.mark.parametrize("block_size", [None, 32])
def test_the_text_model_starts_as_estimated(
    block_size: int | None, tiny_text_model: Path, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"max_model_len": 1000, "max_num_batched_tokens": 2048}
    if block_size is not None:
        arguments["block_size"] = block_size
    assert_as_estimated(tiny_text_model, tmp_path / "log", **arguments)


def test_the_image_model_starts_as_estimated(tiny_image_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert_as_estimated(tiny_image_model, log, max_model_len=2048, max_num_batched_tokens=2048)


def test_defaults_are_vllms_own(tiny_text_model: Path, tmp_path: Path) -> None:
    assert_as_estimated(tiny_text_model, tmp_path / "log")


COMMON = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "dtype": "bfloat16"}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}

KINDS: dict[str, dict[str, Any]] = {
    "sliding": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 5,
        "head_dim": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        **COMMON,
        **HEADS,
    },
    "all sliding": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "head_dim": 32,
        "sliding_window": 256,
        **COMMON,
        **HEADS,
    },
    "hybrid": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        **COMMON,
        **HEADS,
    },
    "latent": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,  # no experts: their group is made with a process's first engine
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        **COMMON,
        **HEADS,
        "num_key_value_heads": 4,
    },
}
"""Configs only: vLLM fills them with random weights (load_format dummy)."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_each_kind_starts_as_estimated(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind]))
    arguments: dict[str, Any] = {"max_model_len": 2000, "max_num_batched_tokens": 2048}
    found = estimated(tmp_path, **arguments)
    with its_log(tmp_path / "log"):
        blocks, tokens, concurrency, groups = started(
            tmp_path, load_format="dummy", skip_tokenizer_init=True, **arguments
        )

    assert_log_agrees(tmp_path / "log", tmp_path)
    assert (blocks, tokens, concurrency) == (found.pool.num_blocks, found.tokens, found.concurrency)
    assert groups == sorted(
        (group.kind.value, len(group.pages), group.block_size) for group in found.pool.groups
    )
