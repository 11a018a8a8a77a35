"""The fast path against vLLM's own code: models on the meta device, vLLM's accounting, one process.

No engine starts here; the imports and some two hundred models take about a minute and a half.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.engine.kv_size.accounting import ExactAnswer, ExactOptions, ask_vllm
from omnicache_cli.engine.kv_size.apart import VllmApart
from omnicache_cli.errors import UsageError
from omnicache_cli.kv_size.check import compared
from omnicache_cli.kv_size.class_defaults import answer
from omnicache_cli.kv_size.draft import draft_layers
from omnicache_cli.kv_size.estimate import Estimate, estimate
from omnicache_cli.kv_size.model import ask_child, open_config, read_model
from omnicache_cli.kv_size.options import Options
from omnicache_cli.kv_size.refusals import NO_PIPELINE

pytestmark = pytest.mark.engine

DATA = Path(__file__).parents[1] / "data" / "kv-size"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((DATA / "published.json").read_text())
MEMORY = [80 << 30]

OPTIONS = {
    "defaults": Options(),
    "tp-fp8-sync": Options(tensor_parallel_size=2, kv_cache_dtype="fp8", async_scheduling=False),
    "pp-no-prefix-caching": Options(
        pipeline_parallel_size=2, enable_prefix_caching=False, max_num_batched_tokens=4096
    ),
    "int8-block-32": Options(kv_cache_dtype="int8_per_token_head", block_size=32),
}

ODD_HEADS = {"Falcon-7B", "GPT-2-XL"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    for name, config in PUBLISHED.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        if config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):  # vLLM reads it before the model
            processor = {"image_processor_type": "Qwen2VLImageProcessor"}
            (root / name / "preprocessor_config.json").write_text(json.dumps(processor))
    return root


def both(
    folder: Path, options: Options, drafter: Path | None = None
) -> tuple[Estimate, ExactAnswer]:
    found, settings = fast(folder, options, drafter)
    return found, ask_vllm(str(folder), settings)


def fast(
    folder: Path, options: Options, drafter: Path | None = None
) -> tuple[Estimate, ExactOptions]:
    """The estimate, and its settings as a question to vLLM."""
    reading = read_model(open_config(str(folder)), answer)
    method = options.speculative_method
    own = read_model(open_config(str(drafter)), answer) if drafter else None
    draft = draft_layers(reading, method, options.num_speculative_tokens, own)
    found = estimate(reading, options, MEMORY, draft=draft)
    names = {field.name for field in dataclasses.fields(ExactOptions)}
    resolved = {
        field.name: getattr(found.settings, field.name)
        for field in dataclasses.fields(found.settings)
        if field.name in names
    }
    return found, ExactOptions(
        **resolved,
        available_bytes=MEMORY,
        speculative_method=method,
        speculative_model=None if drafter is None else str(drafter),
    )


def assert_equal(folder: Path, options: Options, drafter: Path | None = None) -> None:
    found, exact = both(folder, options, drafter)
    assert [row for row in compared(found, exact) if row[1] != row[2]] == []


@pytest.mark.parametrize("name", sorted(PUBLISHED))
@pytest.mark.parametrize("options", OPTIONS)
def test_fast_equals_exact(name: str, options: str, folders: Path) -> None:
    is_latent = '"kv_lora_rank"' in json.dumps(PUBLISHED[name])
    if (options == "int8-block-32" and is_latent) or (
        options == "tp-fp8-sync" and name in ODD_HEADS
    ):  # vLLM has no MLA backend for int8, and does not split 71 or 25 heads over two ranks
        with pytest.raises(UsageError):
            both(folders / name, OPTIONS[options])
        return
    if options == "pp-no-prefix-caching" and PUBLISHED[name]["architectures"][0] in NO_PIPELINE:
        with pytest.raises(UsageError, match="vLLM has no pipeline parallelism"):
            both(folders / name, OPTIONS[options])
        return
    assert_equal(folders / name, OPTIONS[options])


def test_where_the_fast_path_knows_no_pipeline_vllm_has_none() -> None:
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()
    stages = {
        name: registry.ModelRegistry._try_inspect_model_cls(name).supports_pp
        for name in sorted({config["architectures"][0] for config in PUBLISHED.values()})
    }
    stages["VoxtralForConditionalGeneration"] = False  # its encoder's Whisper has none
    assert {name for name in stages if not stages[name]} == NO_PIPELINE & stages.keys()


MORE = {
    "all states": ("Jamba-v0.1", Options(mamba_cache_mode="all")),
    "all states, long chunks": ("Falcon-H1-7B", Options(mamba_cache_mode="all")),
    "mode all not supported": ("Qwen3-Next-80B", Options(mamba_cache_mode="all")),
    "states in float32": ("Qwen3-Next-80B", Options(mamba_ssm_cache_dtype="float32")),
    "fp8 attention, larger block": ("Qwen3.5-35B-A3B", Options(kv_cache_dtype="fp8")),
    "more ranks than KV heads": ("Qwen3-Next-80B", Options(tensor_parallel_size=4)),
    "context parallel": (
        "Llama-3.1-8B",
        Options(tensor_parallel_size=16, decode_context_parallel_size=2),
    ),
    "context parallel MLA": (
        "DeepSeek-V2-Lite",
        Options(tensor_parallel_size=4, decode_context_parallel_size=4),
    ),
    "hybrid manager off": ("Gemma-3-27B", Options(disable_hybrid_kv_cache_manager=True)),
    "three uneven stages": ("Llama-2-7B", Options(pipeline_parallel_size=3)),
    "stages and async windows": ("Gemma-3-27B", Options(pipeline_parallel_size=2)),
    "block override": ("gpt-oss-20b", Options(num_gpu_blocks_override=777)),
    "nvfp4": ("Llama-3.1-8B", Options(kv_cache_dtype="nvfp4")),
    "int4": ("Gemma-3-27B", Options(kv_cache_dtype="int4_per_token_head")),
    "fp8 with scales, hybrid": ("Qwen3.5-9B", Options(kv_cache_dtype="fp8_per_token_head")),
    "nvfp4, sparse MLA": ("DeepSeek-V3.2", Options(kv_cache_dtype="nvfp4_ds_mla")),
    "fp8, sparse MLA": ("DeepSeek-V3.2", Options(kv_cache_dtype="fp8")),
    "more stages than a window likes": (
        "Command-R7B",
        Options(pipeline_parallel_size=4, tensor_parallel_size=4),
    ),
    "float16": ("Qwen2.5-7B", Options(dtype="float16", block_size=64)),
    "float32": ("OPT-125M", Options(dtype="float32")),
    "skipped layers": (
        "Llama-3.1-8B",
        Options(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("0", "31")),
    ),
    "skipped windows": (
        "gpt-oss-20b",
        Options(kv_cache_dtype="nvfp4", kv_cache_dtype_skip_layers=("sliding_window",)),
    ),
    "skipped layer of a hybrid": (
        "Qwen3.5-9B",
        Options(kv_cache_dtype="nvfp4", kv_cache_dtype_skip_layers=("3",)),
    ),
    "skipped first layer, scales": (
        "Llama-3.1-8B",
        Options(kv_cache_dtype="int4_per_token_head", kv_cache_dtype_skip_layers=("0", "5")),
    ),
    "skipped layer, two head sizes": (
        "Gemma-4-26B-A4B",
        Options(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("5",)),
    ),
    "skipped layer, all windows": (
        "Mistral-7B-v0.1",
        Options(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("4",)),
    ),
    "skipped layer, MLA": (
        "DeepSeek-V3",
        Options(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("5",)),
    ),
    "skipped layer, sparse MLA": (
        "DeepSeek-V3.2",
        Options(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("5",)),
    ),
    "MLA and states, two stages": (
        "Kimi-Linear-48B-A3B",
        Options(kv_cache_dtype="fp8", pipeline_parallel_size=2, block_size=32),
    ),
    "experts over many ranks": (
        "gpt-oss-20b",
        Options(pipeline_parallel_size=3, tensor_parallel_size=8),
    ),
    "stages, states, all of them": (
        "Falcon-H1-7B",
        Options(mamba_cache_mode="all", pipeline_parallel_size=2, tensor_parallel_size=2),
    ),
    "large blocks": ("Llama-4-Scout", Options(block_size=128, max_num_batched_tokens=16384)),
    "CPU, sliding": ("Gemma-3-1B", Options(platform="cpu")),
    "CPU, MLA": ("DeepSeek-V2-Lite", Options(platform="cpu")),
    "CPU, hybrid": (
        "Qwen3-Next-80B",
        Options(platform="cpu", mamba_ssm_cache_dtype="float32"),
    ),
}


@pytest.mark.parametrize("case", MORE)
def test_fast_equals_exact_for_further_options(case: str, folders: Path) -> None:
    name, options = MORE[case]
    assert_equal(folders / name, options)


COMMON = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 1000,
    "max_position_embeddings": 16384,
}
EXPERTS = {
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
}
DROPOUT = {"embedding_dropout": 0.0, "output_dropout": 0.0, "use_qkv_bias": False}
STAND_INS: dict[str, dict[str, Any]] = {
    "InternLM2ForCausalLM": {"bias": False},
    "DeepseekForCausalLM": EXPERTS,
    "BailingMoeForCausalLM": {**EXPERTS, **DROPOUT, "use_bias": False, "head_dim": 128},
    "BailingMoeV2ForCausalLM": {**EXPERTS, **DROPOUT, "use_bias": False, "head_dim": 128},
    "OrionForCausalLM": {},
    "MiniCPMForCausalLM": {
        **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "num_experts": 0}
    },
    "SolarForCausalLM": {
        **{f"bskcn_{number}": [number] for number in range(1, 5)},
        "bskcn_tv": [0.9, 0.8],
    },
    "TeleChat3ForCausalLM": {},
    "TeleFLMForCausalLM": {"input_mult": 1.0, "output_mult": 1.0, "use_mup": False},
    "ExaoneForCausalLM": {"layer_norm_epsilon": 1e-5, "activation_function": "silu"},
    "AXK1ForCausalLM": {
        **{"model_type": "axk1", "kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "num_key_value_heads": 16},
    },
}
"""Architectures whose config class comes with the checkpoint: the fields are those that vLLM's
model code reads, the class is Llama's."""


@pytest.mark.parametrize("architecture", STAND_INS)
def test_an_architecture_with_a_class_of_its_own(architecture: str, tmp_path: Path) -> None:
    config = {**COMMON, **STAND_INS[architecture], "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equal(tmp_path, Options())
    assert_equal(tmp_path, Options(tensor_parallel_size=2, kv_cache_dtype="fp8"))


DRAFTS = {
    "mtp, MLA": ("DeepSeek-V3", 1, {}),
    "mtp, two stages": ("GLM-4.5-Air", 1, {"pipeline_parallel_size": 2}),
    "mtp, hybrid": ("Qwen3-Next-80B", 2, {}),
    "mtp, hybrid, two ranks": ("Qwen3.5-9B", 3, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("case", DRAFTS)
def test_mtp_layers_are_counted_as_by_vllm(case: str, folders: Path) -> None:
    name, tokens, changes = DRAFTS[case]
    options = Options(num_speculative_tokens=tokens, speculative_method="mtp", **changes)
    assert_equal(folders / name, options)


def test_an_eagle_drafter_is_counted_as_by_vllm(folders: Path, tmp_path: Path) -> None:
    config = {
        **PUBLISHED["Llama-3.1-8B"],
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
        "rope_scaling": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = Options(num_speculative_tokens=3, speculative_method="eagle3", max_model_len=8192)
    assert_equal(folders / "Llama-3.1-8B", options, tmp_path)


def test_a_child_process_gives_the_same_class_defaults(folders: Path) -> None:
    """The matrix asks in this process, where torch is loaded; the command asks a child."""
    for name in ("Gemma-3-27B", "Jamba-v0.1"):
        here = json.loads(json.dumps(answer(str(folders / name)), default=str))
        child = ask_child(str(folders / name))
        for key in ("num_hidden_layers", "layer_types", "layers_block_type", "sliding_window"):
            assert here["text"].get(key) == child["text"].get(key)
        assert here["version"] == child["version"]


APART = (
    *("Llama-3.1-8B", "Gemma-3-27B", "Gemma-4-26B-A4B", "DeepSeek-V3", "DeepSeek-V3.2"),
    *("Qwen3-Next-80B", "Jamba-v0.1", "Falcon-H1-7B", "LFM2-1.2B", "Qwen3-VL-2B"),
    *("Qwen3-Omni-30B-A3B", "Whisper-large-v3", "Llama-4-Scout", "gpt-oss-20b"),
)


def test_a_lean_process_counts_as_one_with_all_of_vllm(folders: Path) -> None:
    """The command asks a process that leaves compilers and servers out."""
    with VllmApart() as vllm:
        for name in APART:
            _, settings = fast(folders / name, Options())
            here = ask_vllm(str(folders / name), settings)
            there = vllm.ask(str(folders / name), settings)
            assert there == here
        assert vllm.is_lean


def test_weights_of_a_published_model_are_right(folders: Path) -> None:
    _, exact = both(folders / "Llama-3.1-8B", Options(max_model_len=8192))

    assert exact.weight_bytes == 8_030_261_248 * 2
