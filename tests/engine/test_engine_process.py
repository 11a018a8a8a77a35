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
        *("--num-gpu-blocks-override", "65", "-o", str(run), "--format", "json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
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
