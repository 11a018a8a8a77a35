"""`omnicache verify` with the options for stages of vLLM-Omni: what does not go together."""

import sys
from pathlib import Path

import pytest

from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.cli.verify_omni import own_texts
from omnicache_cli.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lint"], "--lint reads a deploy file; name it with --deploy-config"),
        (
            ["--deploy-config", "d.yaml", "--stage", "thinker"],
            "--deploy-config is about all stages; leave out --stage",
        ),
        (
            ["--stage", "thinker", "--cache", "builtin", "--layers", "0"],
            "a stage of vLLM-Omni brings its own cache and keys; leave out --cache and --layers",
        ),
        (
            ["--deploy-config", "d.yaml", "--baseline", "in-engine"],
            "the deploy file says the rest; leave out --baseline",
        ),
        (
            ["--deploy-config", "d.yaml", "--block-size", "32", "--scenario", "repeat"],
            "the deploy file says the rest; leave out --block-size and --scenario",
        ),
        (
            ["--deploy-config", "d.yaml", "--lint", "--prompts", "p.jsonl"],
            "the deploy file says the rest; leave out --prompts",
        ),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["omnicache", "verify", "model", *options])
    assert exit_code_of_run() == 2
    assert f"omnicache: {message}\n" in capsys.readouterr().err


def test_prompts_of_a_pipeline_are_texts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert own_texts(file) == ["one", "two"]
    assert own_texts(None) == []
    file.write_text('{"prompt_token_ids": [1, 2]}\n')
    with pytest.raises(UsageError, match=r"^a pipeline is verified with prompts of text; "):
        own_texts(file)
