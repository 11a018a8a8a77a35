"""`omnicache profile` on a real engine whose core and worker are children, ended by SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnicache_cli.profile.manifest import read_profile_manifest
from omnicache_cli.trace.files import rank_files
from omnicache_cli.trace.manifest import read_manifest
from omnicache_cli.trace.run import Run

psutil = pytest.importorskip("psutil", reason="the extra `profile` is not installed")

PROMPT = "The cache remembers what the prompt has said before. "
FOR_EVER = 100_000
ENOUGH = 400_000
"""Bytes of records: by then the engine has stepped some thousand times."""

FUNCTIONS = {
    "engine core": {"EngineCore.step", "Scheduler.schedule"},
    "worker": {"GPUModelRunner.execute_model", "GPUModelRunner.sample_tokens"},
}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For sockets too, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="o-") as folder:
        yield Path(folder)


def test_core_and_worker_are_found_sampled_and_ended(
    tiny_text_model: Path, tmp_path: Path, scratch: Path
) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "omnicache_cli.cli", "profile", str(tiny_text_model)),
            *("--engine-process", "--prompt", PROMPT, "--rounds", str(FOR_EVER)),
            *("--max-tokens", "64", "--ignore-eos", "--block-size", "32", "--enforce-eager"),
            *("--max-model-len", "1024", "--num-gpu-blocks-override", "65"),
            *("--timeline", "-o", str(run), "--format", "json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        below = until_recorded(process, run)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert [one for one in below if one.is_running()] == []
    assert list(scratch.iterdir()) == []

    manifest = read_profile_manifest(run)
    assert manifest is not None
    assert {one.role: one.command for one in manifest.processes} == {
        "engine core": "VLLM::EngineCore",
        "worker": "VLLM::Worker",
    }
    recorded = read_manifest(run)
    assert recorded is not None
    assert (recorded.finished, recorded.error) == (False, "KeyboardInterrupt")
    traced = Run(run)
    steps = [step for step in traced.steps() if step.forwards]
    core = next(one.pid for one in manifest.processes if one.role == "engine core")
    (clock,) = [file.header for file in traced.files if file.header.pid == core]
    first = clock.started_unix_ns + steps[0].record.start_ns
    for sampled in manifest.processes:
        seen = functions(run / sampled.files["raw"])
        assert FUNCTIONS[sampled.role] <= seen, sorted(seen)
        # Samples and steps are on one clock: the workload began when py-spy had come to sample.
        assert sampled.started_unix_ns - sampled.start_uncertainty_ns < first
        assert first < sampled.started_unix_ns + sampled.duration_ns

    result = json.loads(out)
    assert result["steps"] >= len(steps)
    assert result["phases"]["forward"]["steps"] >= len(steps)
    hot = {(one["role"], one["function"]): one["total_share"] for one in result["hottest"]}
    assert hot["worker", "GPUModelRunner.execute_model"] > 0


def until_recorded(process: "subprocess.Popen[str]", run: Path) -> list["psutil.Process"]:
    """The processes below it, once the engine has stepped for a while."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if sum(path.stat().st_size for path in rank_files(run)) > ENOUGH:
            return list(psutil.Process(process.pid).children(recursive=True))
        time.sleep(0.1)
    raise AssertionError(f"no steps: {process.communicate(timeout=1)}")


def functions(raw: Path) -> set[str]:
    stacks = (line.rpartition(" ")[0] for line in raw.read_text().splitlines())
    return {frame.partition(" (")[0] for stack in stacks for frame in stack.split(";")}
