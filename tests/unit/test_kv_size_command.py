"""`omnicache kv-size` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from omnicache_cli.kv_size.check import check_sections, exact_refusal
from omnicache_cli.kv_size.estimate import Estimate, estimate
from omnicache_cli.kv_size.model import open_config, read_model
from omnicache_cli.kv_size.options import Options, Settings
from omnicache_cli.kv_size.question import Question, answer
from omnicache_cli.report.formats import render
from tests.unit.kv_size_truth import CONFIGS

LLAMA = str(CONFIGS / "llama-3.1-8b")
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "kv-size.schema.json").read_text())


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omnicache_cli.cli", "kv-size", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def result(*arguments: str) -> dict[str, Any]:
    ran = run(*arguments, "--format", "json")
    assert ran.stderr == ""
    found: dict[str, Any] = json.loads(ran.stdout)
    jsonschema.validate(found, SCHEMA)
    return found


def test_the_names_that_scripts_rely_on() -> None:
    found = result(LLAMA, "--available-kv-memory", "40GiB", "--max-model-len", "32768")

    assert (found["command"], found["vllm_version"]) == ("kv-size", None)
    assert found["num_blocks"] == 20480
    assert found["kv_cache_tokens"] == found["kv_cache_tokens_old"] == 327_680
    assert found["max_concurrency"] == 10.0
    assert found["bytes_per_token"] == 131_072
    assert found["groups"][0]["tensor_shape"] == [2, 20480, 16, 8, 128]
    assert (found["fits"], found["refusal"]) == (True, None)


def test_without_memory_the_blocks_are_unknown_not_zero() -> None:
    found = result(LLAMA)
    assert found["num_blocks"] is None
    assert found["kv_cache_tokens"] is None
    assert "number of blocks                   -" in run(LLAMA).stdout


@pytest.mark.parametrize(
    ("need", "code"),
    [
        (["--need-tokens", "327680"], 0),
        (["--need-tokens", "327681"], 1),
        (["--need-concurrency", "10"], 0),
        (["--need-concurrency", "10.01"], 1),
    ],
)
def test_a_need_gates_by_the_exit_code(need: list[str], code: int) -> None:
    ran = run(LLAMA, "--available-kv-memory", "40GiB", "--max-model-len", "32768", *need)
    assert ran.returncode == code
    assert "number of blocks" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "fits", "code"),
    [
        (["--available-kv-memory", "1.01GiB", "--max-model-len", "8192"], True, 0),
        (["--available-kv-memory", "1GiB", "--max-model-len", "8192"], False, 1),  # the null block
        (["--available-kv-memory", "0"], False, 1),
        (["--gpu-memory", "10GiB", "--weights", "15GiB"], False, 1),
        (["--max-model-len", "8192", "--num-gpu-blocks-override", "513"], True, 0),
        (["--max-model-len", "8192", "--num-gpu-blocks-override", "512"], False, 1),
    ],
)
def test_what_vllm_would_not_start_with_exits_1(
    arguments: list[str], fits: bool, code: int
) -> None:
    ran = run(LLAMA, *arguments, "--format", "json")
    assert (json.loads(ran.stdout)["fits"], ran.returncode) == (fits, code)
    assert ("vLLM refuses: " in run(LLAMA, *arguments).stdout) is not fits


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["./nowhere"], 3, "does not exist"),
        ([LLAMA, "--need-tokens", "5"], 2, "--need-tokens needs"),
        ([LLAMA, "--max-model-len", "200000"], 2, "more than the config's max_position_embeddings"),
        ([LLAMA, "--tensor-parallel-size", "3"], 2, "does not divide"),
        ([LLAMA, "--kv-cache-dtype", "fp7"], 2, "is not vLLM's"),
        ([LLAMA, "--block-size", "7"], 2, "on cuda; give a multiple of 16"),
        ([LLAMA, "--block-size", "48", "--platform", "cpu"], 2, "on cpu; give a multiple of 32"),
        ([LLAMA, "--exact", "--check"], 2, "cannot be combined"),
        ([LLAMA, "--exact", "--sweep", "block_size=16"], 2, "--sweep is answered by the fast"),
        ([LLAMA, "--exact", "--stage", "talker_config"], 2, "--stage is answered by the fast"),
        ([LLAMA, "--check", "--stage", "talker_config"], 2, "only an omni model's thinker"),
        ([LLAMA, "--length", "0"], 2, "--length is 0"),
        ([LLAMA, "--need-concurrency", "nan"], 2, "--need-concurrency is nan"),
        ([LLAMA, "--weights", "1GiB"], 2, "--weights says what a card holds"),
        ([LLAMA, "--gpu-memory-utilization", "0.5"], 2, "give --gpu or --gpu-memory too"),
        ([LLAMA, "--tensor-parallel-size", "32", "--dtype", ""], 2, "is not a model dtype"),
        ([LLAMA, "--gpu-memory", "24GiB"], 3, "no safetensors"),
        ([LLAMA, "--stage", "talker_config"], 3, "has no stage"),
        ([LLAMA, "--tensor-cache"], 2, "--tensor-cache needs"),
        ([LLAMA, "--platform", "abacus"], 2, "choose cuda or cpu"),
    ],
)
def test_a_refusal_is_one_line(arguments: list[str], code: int, message: str) -> None:
    ran = run(*arguments)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_everything_at_once_keeps_to_the_schema() -> None:
    found = result(
        *(str(CONFIGS / "qwen3-vl-2b"), "--gpu-memory", "24GiB", "--weights", "4.24GiB"),
        *("--explain", "--sweep", "max_model_len=4k..16k", "--sweep", "block_size=16,32"),
        *("--image", "512x512", "--video", "512x512x16", "--tensor-cache"),
        *("--modal-budget", "text=0.5,image=0.5", "--compression", "image=0.5"),
    )
    assert found["items"][0]["tokens"] == 256
    assert found["memory"]["requested_bytes"] == -(-(24 << 30) * 92 // 100)
    assert found["sweep"]["name"] == "block_size"
    assert found["what_if"]["shares"][1]["tokens"] == found["kv_cache_tokens"]
    assert found["tensor_cache"]["keys"][0]["key"] == "__hidden_states__"
    assert found["explain"]


def test_a_large_share_of_the_card_is_warned_of() -> None:
    found = result(LLAMA, "--gpu", "h200", "--weights", "14.96GiB")
    assert any("the KV cache takes" in warning for warning in found["warnings"])


def test_the_fast_path_loads_no_heavy_library() -> None:
    code = (
        "import sys; from omnicache_cli.kv_size.question import Question, answer; "
        "from omnicache_cli.kv_size.options import Options; "
        f"answer(Question({LLAMA!r}, Options()), None); "
        "print(*({'torch', 'vllm', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


def test_a_stage_of_an_omni_model_is_counted_by_itself(tmp_path: Path) -> None:
    layer = {"num_attention_heads": 16, "hidden_size": 1024, "max_position_embeddings": 4096}
    thinker = {"num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, **layer}
    talker = {"num_hidden_layers": 20, "num_key_value_heads": 2, "head_dim": 64, **layer}
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "dtype": "bfloat16",
        "thinker_config": {"text_config": thinker},
        "talker_config": {"text_config": talker},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    whole, stage = result(str(tmp_path)), result(str(tmp_path), "--stage", "talker_config")
    assert whole["bytes_per_token"] == 48 * 2 * 4 * 128 * 2
    assert stage["bytes_per_token"] == 20 * 2 * 2 * 64 * 2
    assert "choose with --stage" in whole["warnings"][0]


class FakeExact:
    """What vLLM would answer for an estimate, with one number of it changed."""

    vllm_version = "0.30.0"
    weight_bytes = 1
    notes = ()

    def __init__(self, found: Estimate, blocks: int) -> None:
        length = found.settings.max_model_len
        self.layers = {
            name: {
                "kind": page.kind.value,
                "block_size": page.block_size,
                "page_bytes": page.page_bytes,
            }
            for name, page in found.pages.items()
        }
        self.groups = [
            {
                "kind": group.kind.value,
                "layers": len(group.pages),
                "block_size": group.block_size,
                "page_bytes": group.first.page_bytes,
                "blocks_per_request": group.reserved(found.settings, length),
            }
            for group in found.pool.groups
        ]
        self.bytes_per_block = [worker.bytes_per_block for worker in found.pool.workers]
        self.block_size = found.sizes.attention
        self.num_blocks = blocks
        self.kv_cache_tokens = found.tokens
        self.max_concurrency = found.concurrency
        self.needed_bytes = [self.bytes_per_block[0] * found.reserved_blocks(length)]
        self.longest_context = found.longest_context(length)


def test_a_check_names_what_differs() -> None:
    found = estimate(read_model(open_config(LLAMA)), Options(max_model_len=4096), [40 << 30])
    _, _, agrees = check_sections(found, FakeExact(found, 20480))
    assert agrees

    sections, plain, agrees = check_sections(found, FakeExact(found, 20479))
    assert not agrees
    assert "they differ in: number of blocks" in sections[0].title
    assert [row["quantity"] for row in plain["check"]["rows"] if not row["equal"]] == [
        "number of blocks"
    ]


def test_vllms_own_answer_keeps_to_the_schema_and_the_names() -> None:
    def vllm(_: str, settings: Settings, available: Any, __: Any) -> FakeExact:
        found = estimate(read_model(open_config(LLAMA)), Options(), available)
        assert found.settings.max_model_len == settings.max_model_len
        blocks = found.pool.num_blocks
        return FakeExact(found, blocks if blocks is not None else 0)

    question = Question(LLAMA, Options(), gpu="h100", exact=True)
    text = render(answer(question, vllm).report, "json", None)
    found = json.loads(text)

    jsonschema.validate(found, SCHEMA)
    assert found["path"] == "exact"
    assert (found["fits"], found["refusal"]) == (True, None)
    low, high = found["memory"]["num_blocks"]
    assert low == found["num_blocks"] < high
    assert found["memory"]["parts"]["weights"]["bytes"] == [1, 1]


@pytest.mark.parametrize(
    ("options", "gib", "fits"),
    [
        (Options(max_model_len=8192), 1.01, True),
        (Options(max_model_len=8192), 1, False),
        (Options(max_model_len=8192, num_gpu_blocks_override=513), 1, True),
        (Options(max_model_len=8192, num_gpu_blocks_override=512), 40, False),
    ],
)
def test_both_paths_refuse_alike(options: Options, gib: float, fits: bool) -> None:
    found = estimate(read_model(open_config(LLAMA)), options, [int(gib * 2**30)])
    answered = FakeExact(found, 0)
    refused = exact_refusal(answered, found.settings, [int(gib * 2**30)])
    assert (refused is None) is fits
    assert refused == found.refusal()
