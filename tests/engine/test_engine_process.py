"""The layout of a server: the engine core and its worker are child processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnicache_cli.trace.phases import step_ns
from omnicache_cli.trace.run import Run

PROMPT = "The cache remembers what the prompt has said before. "


def test_children_are_traced_joined_and_gone_at_the_end(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "omnicache_cli.cli", "trace", str(tiny_text_model)),
        *("--engine-process", "--prompt", PROMPT, "--rounds", "2", "--max-tokens", "4"),
        *("--block-size", "32", "--max-model-len", "1024", "--enforce-eager"),
        *("--num-gpu-blocks-override", "65", "-o", str(run), "--format", "json", "--live"),
    ]
    run.mkdir()
    following = [sys.executable, "-m", "omnicache_cli.cli", "show", str(run), "--follow", "--quiet"]
    with subprocess.Popen(following, stdout=subprocess.PIPE, text=True) as follower:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        followed, _ = follower.communicate(timeout=60)
    for lines in (done.stderr.splitlines(), followed.splitlines()):  # --live, and show --follow
        views = [line for line in lines if line.startswith("step ")]
        assert views[-1].startswith("step 7, steps/s ")
        assert views[-1].endswith(
            ", run 0, wait 0, done 2/2, hit % 30.2, pool % 0.0, evict 0, preempt 0"
        )
    assert follower.returncode == 0
    assert followed.splitlines()[0] == "no step yet"
    result = json.loads(done.stdout)
    assert {name: result[name] for name in ("steps", "forwards", "hit_tokens")} == {
        "steps": 8,
        "forwards": 8,
        "hit_tokens": 32,
    }
    assert (result["broken_invariants"], result["unjoined_forwards"]) == (0, 0)
    assert result["unfinished_files"] == []

    traced = Run(run)
    for step in traced.steps():
        assert len(step.forwards) == 1
        whole = step_ns(step.record)
        assert whole is not None
        assert step.record.schedule_ns < whole
        assert all((request.record.hash_ns or 0) > 0 for request in step.arrived)
    pids = {file.header.pid for file in traced.files}
    assert len(pids) == 2  # the engine core and the worker; the launching process has neither
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
