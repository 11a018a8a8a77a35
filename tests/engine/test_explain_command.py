"""`omnicache explain` without a run: text prompts, groups that vLLM refuses, engine arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.errors import UsageError
from tests.engine.test_trace_command import omnicache


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    options = ("--format", "json", "--quiet")
    assert omnicache("explain", *map(str, arguments), *options) == 0
    out = capsys.readouterr().out
    return json.loads(out[out.index("{\n") :])  # vLLM may log before it


def test_prompts_that_are_text_are_tokenized_as_the_model_does(
    tiny_text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token of the tiny model is a character."""
    lines = [{"prompt": "x" * 40}, {"prompt": "x" * 40}, {"prompt": "x" * 20 + "y" * 20}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))

    result = answer(capsys, "--prompts", path, "--tokenizer", tiny_text_model)

    found = [(one["request"], one["hit_tokens"], one["reason"]) for one in result["requests"]]
    assert found == [
        ("p0", 0, "nothing-shared"),
        ("p1", 32, "full-blocks"),
        ("p2", 16, "tokens-differ"),
    ]
    assert result["requests"][2]["facts"]["agreed_tokens"] == 20
    assert result["prompts"] == str(path)


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "secret"}')
    with pytest.raises(UsageError, match="name a model folder with --tokenizer") as error:
        omnicache("explain", "--prompts", path)
    assert "secret" not in str(error.value)


def test_a_match_unit_that_vllm_refuses(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2]}')
    groups = ("--group", "full:64", "--group", "mamba:64", "--match-unit", "48")
    with pytest.raises(UsageError, match="vLLM refuses these KV cache groups: Invalid prefix"):
        omnicache("explain", "--prompts", path, *groups, "--quiet")


def test_the_chain_has_a_digest_in_place_of_the_salt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    line = {"prompt_token_ids": list(range(40)), "cache_salt": "our-secret", "lora": "sql"}
    path.write_text(json.dumps(line))

    result = answer(capsys, "--prompts", path, "--request", "p0", "--chain")

    first, second = result["chain"]
    assert (first["parent_hash"], first["token_ids"]) == (None, list(range(16)))
    assert first["extra_keys"][0] == "lora:sql"
    assert first["extra_keys"][1].startswith("salt:")
    assert (second["parent_hash"], second["extra_keys"]) == (first["hash"], ["lora:sql"])
    assert "our-secret" not in json.dumps(result)


def test_lint_of_engine_arguments(
    tiny_models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A hybrid model's blocks are those that the real engine has (see test_examples.py)."""
    lint = ("--lint", "--model")
    hybrid = answer(capsys, *lint, tiny_models["hybrid"], "--engine-arg", "block_size=32")
    assert [one["finding"] for one in hybrid["findings"]] == ["large-unit", "sparse-retention"]
    assert "a block has 1056 tokens" in hybrid["findings"][0]["detail"]

    text = answer(capsys, *lint, tiny_models["text"], "--engine-arg", "block_size=32")
    assert text["findings"] == []
    off = "enable_prefix_caching=false"
    text = answer(capsys, *lint, tiny_models["text"], "--engine-arg", off)
    assert [one["finding"] for one in text["findings"]] == ["caching-off"]
