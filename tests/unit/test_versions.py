"""A vLLM that omnicache was never tried with: said once, and tracing goes on."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from omnicache_cli.engine.plugin import ENVIRONMENT_VARIABLE
from omnicache_cli.engine.versions import TESTED_VLLM, is_tested
from omnicache_cli.trace.files import SUFFIX, read_records
from omnicache_cli.trace.records import AfterStep, End, Header
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import summarize
from omnicache_cli.trace.views.totals import summary_report, version_remark
from tests.unit.run_builder import header, two_rounds

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.30.0", True),
        ("0.30.0+cpu", True),
        ("0.30.0+cu129", True),
        ("0.30.1", False),
        ("0.30.0rc1", False),
        ("0.31.0", False),
        ("0.30", False),
        ("", False),
    ],
)
def test_a_version_was_tried_or_it_was_not(version: str, tested: bool) -> None:
    assert is_tested(version) is tested


def test_every_version_that_was_tried_is_in_the_table() -> None:
    table = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    for version in TESTED_VLLM:
        assert f"| vLLM {version}" in table


def run_of(folder: Path, head: Header, end: End | None) -> Run:
    """A run whose first and last line are these."""
    two_rounds().write(folder, is_finished=False)
    (path,) = folder.glob(f"*{SUFFIX}")
    _, *lines = path.read_bytes().splitlines(keepends=True)
    ends = [] if end is None else [msgspec.json.encode(end) + b"\n"]
    path.write_bytes(b"".join([msgspec.json.encode(head) + b"\n", *lines, *ends]))
    return Run(folder)


UNKNOWN = header(vllm_version="0.31.0", vllm_tested=False)
MISSING = {"missing Scheduler._free_request": 1, "missing BlockPool.free_blocks": 1}


@pytest.mark.parametrize(
    ("head", "end", "remark"),
    [
        (header(), End(9, 0, {}, 0), None),
        (header(), End(9, 0, MISSING, 0), None),  # named among what the trace lacks
        (
            UNKNOWN,
            End(9, 0, {}, 0),
            "omnicache was not tried with vLLM 0.31.0; it has all hook points that were looked for",
        ),
        (
            UNKNOWN,
            End(9, 0, {"Scheduler.schedule": 3}, 0),
            "omnicache was not tried with vLLM 0.31.0; it has all hook points that were looked "
            "for, and the probe failed in Scheduler.schedule",
        ),
        (
            UNKNOWN,
            End(9, 0, MISSING, 0),
            "omnicache was not tried with vLLM 0.31.0; it lacks BlockPool.free_blocks, "
            "Scheduler._free_request",
        ),
        (
            UNKNOWN,
            None,
            "omnicache was not tried with vLLM 0.31.0; whether it has all hook points is not "
            "known: a file has no end record",
        ),
    ],
)
def test_the_summary_says_what_is_known_of_an_unknown_version(
    tmp_path: Path, head: Header, end: End | None, remark: str | None
) -> None:
    run = run_of(tmp_path / "run", head, end)
    summary = summarize(run)

    assert version_remark(summary) == remark
    data = summary_report(run, summary).result
    assert data["untested_vllm"] == (None if remark is None else "0.31.0")
    assert data["missing_hooks"] == (
        ["BlockPool.free_blocks", "Scheduler._free_request"]
        if end and end.probe_errors == MISSING
        else []
    )


def test_trace_says_it_on_stderr_and_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from omnicache_cli.cli.trace import report_run

    folder = run_of(tmp_path / "run", UNKNOWN, End(9, 0, {}, 0)).folder
    said = "omnicache was not tried with vLLM 0.31.0; it has all hook points that were looked for"

    report_run(folder, None)
    out, err = capsys.readouterr()
    assert said in out.splitlines()
    assert err == f"omnicache: {said}\n"

    report_run(folder, None, to_stderr=True)  # the summary of a command goes there anyway
    out, err = capsys.readouterr()
    assert (out, err.count(said)) == ("", 1)


SCRIPT = """
from omnicache_cli.engine import plugin
plugin.register()
from vllm.v1.core.block_pool import BlockPool
from omnicache_cli.engine.probe import recorder
from omnicache_cli.trace.records import AfterStep
recorder.current().write(AfterStep(0, -1, 0, []))
print(BlockPool().get_new_blocks(3))
recorder.end()
"""


def test_a_vllm_without_a_hook_point_runs_on_and_its_file_names_it(tmp_path: Path) -> None:
    pytest.importorskip("numpy", reason="the probe runs beside vLLM, which brings numpy")
    package = tmp_path / "vllm" / "v1" / "core"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package.parent.parent / "__init__.py").write_text("__version__ = '0.99.0'\n")
    (package / "block_pool.py").write_text(
        "class BlockPool:\n    def get_new_blocks(self, num_blocks):\n        return [num_blocks]\n"
    )
    run = tmp_path / "run"
    run.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PYTHONPATH": str(tmp_path),
            ENVIRONMENT_VARIABLE: json.dumps({"folder": str(run), "salt_key": "00"}),
        },
    )
    (path,) = run.glob(f"*{SUFFIX}")
    head, event, end = read_records(path)

    assert (ran.stdout, ran.stderr) == ("[3]\n", "")
    assert isinstance(head, Header)
    assert (head.vllm_version, head.vllm_tested) == ("0.99.0", False)
    assert isinstance(event, AfterStep)
    assert isinstance(end, End)
    assert end.probe_errors == {
        f"missing BlockPool.{method}": 1
        for method in (
            "_maybe_evict_cached_block",
            "cache_full_blocks",
            "cache_partial_block",
            "move_block_hashes",
            "free_blocks",
            "reset_prefix_cache",
        )
    }
    assert replace(end, probe_errors={}).dropped == 0
