"""The process that asks vLLM, by a stand-in: whom it asks, how often, and what ends."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.engine.kv_size import apart
from omnicache_cli.engine.kv_size.accounting import ExactAnswer, ExactOptions
from omnicache_cli.engine.kv_size.apart import VllmApart
from omnicache_cli.engine.kv_size.lean import LeanFinder
from omnicache_cli.errors import EngineFailedError, EngineMissingError
from omnicache_cli.kv_size.estimate import estimate
from omnicache_cli.kv_size.model import open_config, read_model
from omnicache_cli.kv_size.options import Options
from tests.unit.kv_size_truth import CONFIGS

ANSWER = ExactAnswer(
    vllm_version="0.30.0",
    layers={"one": {"kind": "full_attention", "block_size": 16, "page_bytes": 65536}},
    groups=[{"kind": "full_attention", "layers": 1}],
    bytes_per_block=[65536],
    block_size=16,
    num_blocks=10,
    kv_cache_tokens=160,
    max_concurrency=2.5,
    needed_bytes=[131072],
    longest_context=144,
    weight_bytes=7,
    notes=("a note",),
)

CHILD = """
import json, os, sys
folder = {folder!r}
with open(os.path.join(folder, "pids"), "a") as file:
    file.write(f"{{os.getpid()}} {{sys.argv[1]}}\\n")
for line in sys.stdin:
    asked, options = json.loads(line)
    print(json.dumps(json.load(open(os.path.join(folder, sys.argv[1] + ".json")))), flush=True)
"""


def options() -> ExactOptions:
    settings = estimate(read_model(open_config(str(CONFIGS / "llama-3.1-8b"))), Options()).settings
    names = {field.name for field in dataclasses.fields(ExactOptions)}
    given = {one.name for one in dataclasses.fields(settings)} & names
    return ExactOptions(**{name: getattr(settings, name) for name in given})


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the lean and the whole process answer."""
    (tmp_path / "child.py").write_text(CHILD.format(folder=str(tmp_path)))
    command = (sys.executable, str(tmp_path / "child.py"))
    monkeypatch.setattr(apart, "COMMAND", command)
    say(tmp_path, "lean", {"answer": dataclasses.asdict(ANSWER)})
    return tmp_path


def say(folder: Path, which: str, reply: dict[str, Any]) -> None:
    (folder / f"{which}.json").write_text(json.dumps(reply))


def started(folder: Path) -> list[str]:
    lines = (folder / "pids").read_text().splitlines()
    for line in lines:
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[0]), 0)
    return [line.split()[1] for line in lines]


def test_one_process_answers_every_question_and_is_gone_after_it(stand_in: Path) -> None:
    with VllmApart() as vllm:
        first = vllm.ask("a", options())
        second = vllm.ask("b", options())

    assert first == second == ANSWER
    assert started(stand_in) == ["lean"]


def test_no_question_starts_no_process(stand_in: Path) -> None:
    with VllmApart():
        pass
    assert not (stand_in / "pids").exists()


def test_what_the_lean_process_cannot_count_the_whole_one_may(stand_in: Path) -> None:
    say(stand_in, "lean", {"failed": "a name is missing"})
    say(stand_in, "whole", {"answer": dataclasses.asdict(ANSWER)})
    with VllmApart() as vllm:
        assert vllm.ask("a", options()).num_blocks == 10
        assert vllm.ask("a", options()).num_blocks == 10
    assert started(stand_in) == ["lean", "whole"]


def test_the_whole_process_has_the_last_word(stand_in: Path) -> None:
    say(stand_in, "lean", {"failed": "a name is missing"})
    say(stand_in, "whole", {"failed": "vLLM 0.30.0 cannot count a"})
    with (
        VllmApart() as vllm,
        pytest.raises(EngineFailedError, match="cannot count a"),
    ):
        vllm.ask("a", options())
    assert started(stand_in) == ["lean", "whole"]


def test_a_missing_vllm_is_not_looked_for_twice(stand_in: Path) -> None:
    say(stand_in, "lean", {"missing": "--exact needs vLLM"})
    with VllmApart() as vllm, pytest.raises(EngineMissingError, match="--exact needs vLLM"):
        vllm.ask("a", options())
    assert started(stand_in) == ["lean"]


def test_a_process_that_dies_is_a_failure_in_one_line(stand_in: Path) -> None:
    (stand_in / "child.py").write_text("raise SystemExit(9)")
    with VllmApart() as vllm, pytest.raises(EngineFailedError) as caught:
        vllm.ask("a", options())
    assert "ended with status 9 and no answer" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_module_that_is_left_out_has_every_name() -> None:
    """As decorator, decorator with arguments, base class, and something that is never there."""
    spec = LeanFinder().find_spec("vllm.entrypoints.openai")
    assert spec is not None
    module: Any = LeanFinder().create_module(spec)

    def function() -> int:
        return 5

    assert module.disable(function)() == 5
    assert module.register("name", key=1)(function)() == 5
    assert type("Mine", (module.Base,), {"size": 3}).size == 3
    assert not module.config.enabled
    assert module.sym_eq(3, 3) is True
    assert LeanFinder().find_spec("vllm.model_executor") is None
    assert LeanFinder().find_spec("torch") is None
