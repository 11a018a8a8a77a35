"""What vLLM makes of options for a model, a card and a CPU, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.kv_size import hardware
from omnicache_cli.kv_size.hardware import card_named
from omnicache_cli.kv_size.layers import StateRule
from omnicache_cli.kv_size.model import open_config, read_model
from omnicache_cli.kv_size.options import Options, Settings, resolve
from omnicache_cli.kv_size.states import state_dtypes, state_shapes
from tests.unit.kv_size_truth import CONFIGS, counted, full, model_of, sliding


def resolved(name: str, **changes: Any) -> Settings:
    reading = read_model(open_config(str(CONFIGS / name)))
    card = changes.pop("card", None)
    return resolve(Options(**changes), reading.model, reading.config, reading.text, card)


@pytest.mark.parametrize(
    ("card", "dtype", "block"),
    [
        (None, "auto", 64),
        ("h100", "auto", 16),
        ("h100", "fp8", 64),
        ("b200", "auto", 32),
        ("a100", "auto", 16),
    ],
)
def test_the_block_of_mla_is_that_of_the_backend_on_the_card(
    card: str | None, dtype: str, block: int
) -> None:
    named = None if card is None else card_named(card)
    found = resolved("deepseek-v3", card=named, kv_cache_dtype=dtype)
    assert found.block_size == block
    assert "MLA" in found.sources["block_size"]


@pytest.mark.parametrize(
    ("flags", "asked", "dtype"),
    [
        (frozenset[str](), "auto", "auto"),
        (frozenset({"avx512_bf16"}), "auto", "float32"),
        (frozenset({"avx512_bf16"}), "bfloat16", "bfloat16"),
    ],
)
def test_the_cpu_decides_on_the_dtype_of_states(
    flags: frozenset[str], asked: str, dtype: str
) -> None:
    found = resolved("qwen3-next-80b", platform="cpu", cpu_flags=flags, mamba_ssm_cache_dtype=asked)
    assert found.mamba_ssm_cache_dtype == dtype


def test_a_cpu_with_amx_caches_prefixes_of_mla() -> None:
    without = resolved("deepseek-v3", platform="cpu")
    with_amx = resolved("deepseek-v3", platform="cpu", cpu_flags=frozenset({"amx_tile"}))
    assert (without.block_size, without.enable_prefix_caching) == (16, False)
    assert (with_amx.block_size, with_amx.enable_prefix_caching) == (128, True)


def test_the_flags_of_a_cpu_are_read_once_for_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nflags\t\t: fpu avx512_bf16\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    monkeypatch.setattr(hardware, "CPU_INFO", info)
    assert hardware.cpu_flags() == {"fpu", "avx512_bf16"}
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "none")
    assert hardware.cpu_flags() == frozenset()


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"num_attention_heads": 40, "num_key_value_heads": 10}, {"tensor_parallel_size": 4}, "KV"),
        ({"model_type": "gemma2"}, {"dtype": "float16"}, "refuses it for model_type gemma2"),
        (
            {"architectures": ["Mamba2ForCausalLM"]},
            {"pipeline_parallel_size": 2},
            "no pipeline parallelism",
        ),
    ],
)
def test_what_vllm_refuses_has_no_number(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    heads = config.get("num_key_value_heads", 4)
    model = model_of(
        full(4, heads, 128),
        num_attention_heads=config.get("num_attention_heads", 8),
        architecture=config.get("architectures", ["made by a test"])[0],
    )
    whole = {"dtype": "bfloat16", "max_position_embeddings": 4096, **config}
    with pytest.raises(UsageError, match=message):
        resolve(Options(**changes), model, whole, whole)


def test_a_padded_window_that_cannot_grow_is_refused() -> None:
    layers = [*full(1, 4, 256), *sliding(2, 8, 256, 4096, first=1)]
    with pytest.raises((UsageError, BadInputError), match="vLLM fails on"):
        counted(
            model_of(layers),
            kv_cache_dtype="fp8",
            kv_cache_dtype_skip_layers=("sliding_window",),
        )


def test_delta_attention_keeps_its_states_in_float32() -> None:
    rule = StateRule(
        "delta_attention",
        (("num_heads", 32), ("head_dim", 128), ("conv_kernel", 4)),
        temporal_dtype="float32",
    )
    assert state_shapes(rule, 2, 0) == ((3, 6144), (16, 128, 128))
    assert state_dtypes(rule, "bfloat16", "auto", "auto") == ("bfloat16", "float32")
    with pytest.raises(UsageError, match="float32 and fails on any other"):
        state_dtypes(rule, "bfloat16", "auto", "bfloat16")
