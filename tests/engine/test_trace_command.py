"""The commands that start an engine, in this process: `trace` and `demo`, and what they refuse."""

import json
import stat
from pathlib import Path

import pytest

from omnicache_cli.cli.app import app
from omnicache_cli.errors import BadInputError, EngineFailedError, RefusedOutputError, UsageError
from omnicache_cli.trace.manifest import read_manifest
from omnicache_cli.trace.run import Run

SMALL = [
    *("--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "4"),
    *("--num-gpu-blocks-override", "65", "--enforce-eager"),
]
PROMPT = "The cache remembers what the prompt has said before. "

DEMO = """\
2 rounds of 1 prompt, 40 output tokens
40 output tokens fill the last block of the first round, and it enters the cache. The
second round reuses the blocks that its prompt shares and gets a new one for its tail.
80 steps, 992 of 1994 queried tokens hit, 0 broken invariants

Prompt 0: 997 tokens
round  pass             num_actual_tokens  seq_lens  hit  slot_mapping  block_table
    1  first, step 0                  997       997    0  32 .. 1028    1 .. 32
    1  decode, step 1                   1       998    -  1029          1 .. 32
    2  first, step 40                   5       997  992  1056 .. 1060  1 .. 31 reused; 33 new
    2  decode, step 41                  1       998    -  1061          1 .. 31 reused; 33 new

round 2: 5 tokens computed: vLLM reuses full blocks of 32 and always computes the last token

2 rounds of 1 prompt, 4 output tokens
4 output tokens leave the last block of the first round unfilled. It is not cached, vLLM
frees it to the front of the free queue, and the second round gets the same block again.
8 steps, 992 of 1994 queried tokens hit, 0 broken invariants

Prompt 0: 997 tokens
round  pass            num_actual_tokens  seq_lens  hit  slot_mapping  block_table
    1  first, step 0                 997       997    0  32 .. 1028    1 .. 32
    1  decode, step 1                  1       998    -  1029          1 .. 32
    2  first, step 4                   5       997  992  1024 .. 1028  1 .. 31 reused; 32 new
    2  decode, step 5                  1       998    -  1029          1 .. 31 reused; 32 new

round 2: 5 tokens computed: vLLM reuses full blocks of 32 and always computes the last token
round 2: new block 32 was in the table of the first round too: freed in between and taken again

Tensors that a hit restores, against a run without a cache
builtin: equal: 1216 hit tokens in 38 blocks of 17 requests; 190 pairs: 190 equal
vllm-omni: equal: 1216 hit tokens in 38 blocks of 17 requests; 190 pairs: 190 equal
"""


def omnicache(*arguments: str | Path) -> int:
    """One command line, as `main` runs it, without its handling of errors."""
    import typer

    try:
        typer.main.get_command(app)([str(one) for one in arguments], standalone_mode=False)
    except typer.Exit as stop:
        return int(stop.exit_code)
    return 0


def test_the_demo_shows_reuse_and_the_new_or_old_tail_block(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert omnicache("demo", "--keep", tmp_path / "demo", "--quiet") == 0
    assert capfd.readouterr().out == DEMO


def test_trace_prints_the_totals_and_leaves_a_private_run_folder(
    tiny_text_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = ("--prompt", PROMPT, "--rounds", "2", "--ignore-eos", "--max-tokens", "4")
    code = omnicache("trace", tiny_text_model, *arguments, *SMALL, "-o", run, "--format", "json")
    printed = capfd.readouterr()
    result = json.loads(printed.out)
    assert code == 0
    assert {
        name: result[name] for name in ("command", "steps", "hit_tokens", "queried_tokens")
    } == {
        "command": "trace",
        "steps": 8,
        "hit_tokens": 32,
        "queried_tokens": 2 * len(PROMPT),
    }
    assert (result["broken_invariants"], result["dropped_records"]) == (0, 0)
    assert printed.err.splitlines()[-1] == f"next: omnicache show {run}"
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    manifest = Run(run).manifest
    assert manifest is not None
    assert (manifest.finished, manifest.num_rounds, manifest.layout) == (True, 2, "in-process")
    assert omnicache("show", run, "--check", "--quiet") == 0


def test_a_prompts_file_with_lora_salt_and_token_ids_is_traced(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny_models["lora"]
    (tmp_path / "adapter").symlink_to(model / "adapter-a")
    lines = [
        {"prompt_token_ids": list(range(10, 80)), "lora": "adapter"},
        {"prompt_token_ids": list(range(10, 80))},
        {"prompt_token_ids": list(range(10, 80)), "lora": {"path": "adapter", "name": "other"}},
        {"prompt_token_ids": list(range(10, 80)), "lora": "adapter", "max_tokens": 3},
        {"prompt_token_ids": list(range(10, 80)), "cache_salt": "pepper"},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(one) for one in lines) + "\n")
    run = tmp_path / "run"
    assert omnicache("trace", model, "--prompts", prompts, *SMALL, "-o", run) == 0
    requests = {
        one.request.external_id: (one.hit_tokens, one.request.record)
        for step in Run(run).steps()
        for one in step.scheduled
        if one.hit_tokens is not None
    }
    assert {name: (hit, record.lora_name) for name, (hit, record) in requests.items()} == {
        "p0": (0, "adapter"),
        "p1": (0, None),
        "p2": (0, "other"),
        "p3": (64, "adapter"),
        "p4": (0, None),
    }
    assert requests["p0"][1].extra_keys == [(0, ["lora:adapter"]), (1, ["lora:adapter"])]
    assert requests["p3"][1].max_tokens == 3


def test_an_unknown_engine_argument_is_refused_with_the_nearest_name(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        UsageError, match=r"no engine argument 'blok_size'; did you mean block_size"
    ):
        omnicache("trace", tiny_text_model, "--prompt", "x", "--engine", "blok-size=32", "-o", run)
    assert not run.exists()


def test_a_value_that_vllm_refuses_is_one_line_with_its_reason(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineFailedError, match=r"vLLM did not start: .*max_model_len"):
        omnicache(
            *("trace", tiny_text_model, "--prompt", "x", "--max-model-len", "9999999"),
            *("-o", tmp_path / "run"),
        )
    manifest = read_manifest(tmp_path / "run")
    assert manifest is not None
    assert (manifest.finished, manifest.error) == (False, "EngineFailedError")


def test_a_prompt_that_vllm_refuses_is_named_and_the_engine_is_gone(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 99999]}\n')
    with pytest.raises(BadInputError, match=r"vLLM refuses request p0: .*99999"):
        omnicache("trace", tiny_text_model, "--prompts", prompts, *SMALL, "-o", tmp_path / "run")


def test_a_run_folder_in_use_is_refused_before_the_engine_starts(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RefusedOutputError, match=r"holds 'notes.txt', which is not part of a run"):
        omnicache("trace", tiny_text_model, "--prompt", "x", "-o", tmp_path, "--force")
    assert (tmp_path / "notes.txt").read_text() == "mine"
