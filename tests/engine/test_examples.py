"""The files in examples/ do what their page says, command by command, and what the docs say."""

import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from omnicache_cli.engine.tracing import tracing
from omnicache_cli.prefix.explain import Explanation, explain_run
from omnicache_cli.trace.invariants import InvariantChecker
from omnicache_cli.trace.records import CacheReset
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Step
from omnicache_cli.trace.summary import Summary, summarize
from tests.engine.test_trace_command import SMALL, omnicache
from tests.engine.test_why_did_it_miss import shown

EXAMPLES = Path(__file__).parents[2] / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
COMMANDS = {
    command.partition(" -o run-")[2].split()[0]: command
    for command in re.findall(r"`(omnicache trace [^`]+)`", README)
}
"""By the name of their runs."""


class Ran:
    """A run that a command of the page has recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[Step] = list(Run(folder).steps())
        checker = InvariantChecker()
        self.summary: Summary = summarize(Run(folder), checker=checker)
        assert (self.summary.broken_invariants, self.summary.probe_errors) == (0, {})
        self.explained: dict[str, Explanation] = {}
        for one in explain_run(Run(folder), None):
            assert one.predicted_tokens == one.hit_tokens, one
            self.explained.setdefault(one.external_id, one)

    @property
    def hits(self) -> dict[str, int]:
        """Hit tokens at the first admission."""
        return {
            one.request.external_id: one.hit_tokens
            for step in self.steps
            for one in step.scheduled
            if one.hit_tokens is not None and not one.resumed
        }

    @property
    def starts(self) -> list[int]:
        """Steps in which a request starts to run."""
        return [
            step.number
            for step in self.steps
            for one in step.scheduled
            if one.hit_tokens is not None and not one.resumed
        ]

    def computed(self, name: str) -> list[tuple[int, int, int]]:
        """Of a request: step, first position, tokens."""
        return [
            (step.number, one.num_computed_tokens, one.num_scheduled_tokens)
            for step in self.steps
            for one in step.scheduled
            if one.request.external_id == name
        ]


@pytest.fixture
def run_command(
    tiny_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],  # an engine wants a stdout with a file descriptor
) -> Callable[[str], Ran]:
    """Runs a command of the page, in this process, where a reader would."""
    for kind, model in tiny_models.items():
        (tmp_path / f"tiny-{kind}").symlink_to(model)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> Ran:
        command, _, stdin = COMMANDS[name].partition(" < ")
        if stdin:
            lines = io.BytesIO(Path(stdin).read_bytes())
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines))
        assert omnicache(*shlex.split(command)[1:], "--quiet") == 0
        check_page(name, tmp_path / f"run-{name}", capfd)
        return Ran(tmp_path / f"run-{name}")

    return run


def check_page(name: str, run: Path, capture: Any) -> None:
    """What docs/why-did-it-miss.md says of this run is what `explain` says of it."""
    capture.readouterr()
    for command, output in shown(f"run-{name}"):
        options = shlex.split(command)[3:]
        assert omnicache("explain", run, *options, "--quiet") == 0
        assert capture.readouterr().out == output


def tables(step: Step, name: str) -> list[list[int]]:
    """What a request's rows of the worker's block tables were in this step, by group."""
    (forward,) = step.forwards
    names = {one.request.record.request_id: one.request.external_id for one in step.scheduled}
    row = [names[one] for one in forward.request_ids].index(name)
    return [group.block_table[row] for group in forward.groups]


def test_sliding(run_command: Callable[[str], Ran]) -> None:
    ran = run_command("sliding")
    assert ran.hits == {
        **{"p0-r1": 0, "p1-r1": 0, "p2-r1": 320},
        **{"p0-r2": 576, "p1-r2": 352, "p2-r2": 352},
    }
    (again,) = (step for step in ran.steps if ran.computed("p0-r2")[0][0] == step.number)
    window, full = tables(again, "p0-r2")
    assert window[:18] == [0] * 16 + [17, 18]
    assert len(window) == len(full) == 19
    assert 0 not in full
    assert run_command("retained").hits == {"p0": 0, "p1": 320, "p2": 320}


def test_hybrid(run_command: Callable[[str], Ran]) -> None:
    ran = run_command("hybrid")
    assert ran.hits == {
        **{"p0-r1": 0, "p1-r1": 0, "p2-r1": 1056, "p3-r1": 0},
        **{"p0-r2": 2112, "p1-r2": 1056, "p2-r2": 1056, "p3-r2": 0},
    }
    (engine,) = {step.engine.engine: step.engine for step in ran.steps}.values()
    assert [(one.spec, one.block_size, one.maps_slots) for one in engine.groups] == [
        *[("MambaSpec", 1056, False)] * 3,
        ("FullAttentionSpec", 1056, True),
    ]
    assert [one[1:] for one in ran.computed("p0-r1")[:4]] == [
        *[(0, 1056), (1056, 1056), (2112, 88), (2200, 1)],
    ]


def test_mla(run_command: Callable[[str], Ran]) -> None:
    ran = run_command("mla")
    (engine,) = {step.engine.engine: step.engine for step in ran.steps}.values()
    (group,) = engine.groups
    full_blocks = (200 - 1) // group.block_size * group.block_size
    assert ran.hits == {"p0-r1": 0, "p0-r2": full_blocks if engine.enable_prefix_caching else 0}
    assert (ran.summary.kv_cache_hit_rate is None) != engine.enable_prefix_caching


def test_lora(run_command: Callable[[str], Ran]) -> None:
    ran = run_command("lora")
    adapters = {one.external_id: one.record.lora_name for one in arrived(ran)}
    assert list(adapters.values()) == ["adapter-a"] * 2 + ["adapter-b"] * 2 + [None] * 2
    assert list(ran.hits.values()) == [0, 192] * 3
    assert all(len(step.scheduled) == 1 for step in ran.steps)


def arrived(ran: Ran) -> list[Any]:
    return [request for step in ran.steps for request in step.arrived]


def test_salt(run_command: Callable[[str], Ran]) -> None:
    assert list(run_command("salt").hits.values()) == [0, 96, 0, 0, 96]


def test_images(run_command: Callable[[str], Ran]) -> None:
    ran = run_command("images")
    assert list(ran.hits.values()) == [0, 192, 64, 0]
    spans = [one.record.multimodal for one in arrived(ran)]
    assert [(one.offset, one.length) for one in spans[0]] == [(1, 64), (67, 64)]
    hashes = [[one.hash for one in span] for span in spans]
    assert hashes[0] == hashes[1] == hashes[3][::-1]
    assert (hashes[2][0], hashes[2][1] in hashes[0]) == (hashes[0][0], False)
    assert ran.summary.hit_tokens_by_modality == {"image": 64 + 61 + 63 + 3, "text": 65}


def test_chunked(run_command: Callable[[str], Ran]) -> None:
    ran = run_command("chunked")
    assert ran.computed("p0")[:3] == [(0, 0, 128), (1, 128, 128), (2, 256, 44)]
    assert ran.computed("p1")[0] == (2, 256, 26)
    assert ran.hits == {"p0": 0, "p1": 256}


def test_preemption(run_command: Callable[[str], Ran]) -> None:
    ran = run_command("preemption")
    assert (ran.summary.preemptions, ran.summary.resumed_hit_tokens) == (1, 64)
    assert ran.hits == {"p0": 0, "p1": 0}
    resumed = [
        (step.number, one.request.external_id, one.hit_tokens, one.num_scheduled_tokens)
        for step in ran.steps
        for one in step.scheduled
        if one.resumed
    ]
    assert resumed == [(35, "p1", 64, 1)]
    assert [one[0] for one in ran.computed("p1")] == [*range(31), *range(35, 39)]


def test_eviction(run_command: Callable[[str], Ran]) -> None:
    ran = run_command("eviction")
    assert list(ran.hits.values()) == [0, 128, 0, 32, 128]
    assert ran.summary.evicted_blocks == 6


def test_pipeline(run_command: Callable[[str], Ran]) -> None:
    ran = run_command("pipeline")
    assert ran.starts == [0, 2, 8, 10, 16, 18]
    assert list(ran.hits.values()) == [0, *[96] * 5]
    assert [one.record.arrival_step for one in arrived(ran)] == [0, 2, 4, 6, 8, 10]


def test_reset(tiny_text_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The script in this process, under the probe that `omnicache trace --` puts around it."""
    assert COMMANDS["reset"].endswith("-- python examples/reset_cache.py tiny-text")
    script = module_of(EXAMPLES / "reset_cache.py")
    (tmp_path / "run").mkdir()
    with tracing(tmp_path / "run"):
        script.ask(str(tiny_text_model))
    ran = Ran(tmp_path / "run")
    assert list(ran.hits.values()) == [0, 128, 0, 128]
    assert ran.summary.resets == 1
    events = [(step.number, event) for step in ran.steps for event in step.after]
    assert [(n, one) for n, one in events if isinstance(one, CacheReset)] == [(7, CacheReset(True))]
    said = [line for line in capfd.readouterr().out.splitlines() if line.endswith("tokens hit")]
    assert said == ["0 of 150 tokens hit", "128 of 150 tokens hit"] * 2
    check_page("reset", tmp_path / "run", capfd)


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FORKED = """
import multiprocessing, runpy, sys
import vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor
fork = lambda: multiprocessing.get_context("fork")
vllm.v1.engine.utils.get_mp_context = fork
vllm.v1.executor.multiproc_executor.get_mp_context = fork
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script whose engine forks its processes: they need not import vLLM again."""


def test_streaming(
    tiny_text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMANDS["streaming"].endswith("-- python examples/streaming_input.py tiny-text")
    run = tmp_path / "run"
    script = [sys.executable, "-c", FORKED, EXAMPLES / "streaming_input.py", tiny_text_model]
    command = [sys.executable, "-m", "omnicache_cli.cli", "trace", "-o", run, "--", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-4:] == ["4 tokens", "8 tokens", "12 tokens", ""]
    ran = Ran(run)
    assert ran.computed("session") == [
        *[(0, 0, 49), (1, 49, 1), (2, 50, 1), (3, 51, 1)],
        *[(4, 52, 17), (5, 69, 1), (6, 70, 1), (7, 71, 1)],
        *[(8, 72, 14), (9, 86, 1), (10, 87, 1), (11, 88, 1)],
    ]
    assert ran.hits == {"session": 0}
    assert (ran.summary.queried_tokens, ran.summary.external_tokens) == (49, 0)
    parts = [one.session_prompt_tokens for step in ran.steps for one in step.record.admitted]
    assert parts == [None, 69, 86]
    check_page("streaming", run, capsys)


def test_every_command_of_the_page_has_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals()} | {"retained"}
    assert COMMANDS.keys() <= tested


def test_the_example_workload_is_traced_and_the_example_program_reads_it(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("--prompts", EXAMPLES / "prompts.jsonl", "--rounds", "2", "--max-tokens", "8")
    assert omnicache("trace", tiny_text_model, *options, *SMALL, "-o", run, "--quiet") == 0
    read = subprocess.run(
        [sys.executable, EXAMPLES / "read_a_run.py", run],
        capture_output=True,
        text=True,
        check=True,
    )
    hits = [line.split() for line in read.stdout.splitlines()]
    assert {words[0]: words[2] for words in hits if words[0].startswith("p")} == {
        **{"p0-r1": "0", "p1-r1": "128", "p2-r1": "128", "p3-r1": "0", "p4-r1": "96"},
        **{"p0-r2": "128", "p1-r2": "128", "p2-r2": "128", "p3-r2": "128", "p4-r2": "96"},
    }


def test_the_example_script_runs_from_any_folder(tmp_path: Path) -> None:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", EXAMPLES / "shared_prefix.sh"],
        cwd=tmp_path,
        env={**os.environ, "PATH": tools, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "all hold" in done.stdout
    assert list(tmp_path.iterdir()) == []
