"""The files in examples/ do what the documentation says of them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.engine.test_trace_command import SMALL, omnicache

EXAMPLES = Path(__file__).parents[2] / "examples"


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
