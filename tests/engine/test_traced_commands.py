"""`omnicache trace -- COMMAND` around real engines: a server on two ranks, a forked engine core."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.trace.invariants import InvariantChecker
from omnicache_cli.trace.manifest import read_manifest
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import summarize

STARTING_SECONDS = 240
SMALL = {"block_size": 32, "max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True}
PREFIX = "Everything that these requests share stands in front. " * 3


def traced(run: Path, *command: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "omnicache_cli.cli", "trace", "-o", str(run), "--", *command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until(ready: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the command did not get that far:\n{process.communicate()[0][-4000:]}")
        time.sleep(0.2)


def ended(process: "subprocess.Popen[str]") -> str:
    """What the command printed; it and all it started are gone."""
    printed, _ = process.communicate(timeout=120)
    deadline = time.monotonic() + 30  # multiprocessing's resource tracker leaves a moment later
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return printed
        time.sleep(0.2)
    pytest.fail(f"processes are left behind:\n{printed[-4000:]}")


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def metric(page: str, name: str) -> int:
    (line,) = (line for line in page.splitlines() if line.startswith(f"vllm:{name}_total{{"))
    return int(float(line.rpartition(" ")[2]))


def test_a_server_on_two_ranks_with_concurrent_clients(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = [
        part
        for name, value in SMALL.items()
        for part in (f"--{name.replace('_', '-')}", *(() if value is True else (str(value),)))
    ]
    process = traced(
        tmp_path / "run",
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(tiny_text_model), "--host", "127.0.0.1", "--port", str(port)),
        *("--tensor-parallel-size", "2", *options),
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )

    def healthy() -> bool:
        try:
            fetch(f"{url}/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    wait_until(healthy, process)

    def ask(number: int) -> None:
        body = {
            "model": str(tiny_text_model),
            "prompt": f"{PREFIX}{number}",
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        fetch(f"{url}/v1/completions", body)

    ask(0)
    clients = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    page = fetch(f"{url}/metrics")
    process.send_signal(signal.SIGTERM)
    printed = ended(process)

    run = Run(tmp_path / "run")
    checker = InvariantChecker()
    summary = summarize(run, checker=checker)
    assert (summary.num_arrived, summary.broken_invariants) == (9, 0), printed
    assert summary.hit_tokens == metric(page, "prefix_cache_hits") > 0
    assert summary.queried_tokens == metric(page, "prefix_cache_queries")
    assert checker.coverage[11].checked == summary.num_steps  # the second rank, every step
    assert {worker.tp_rank for worker in run.workers} == {0, 1}
    assert len(run.files) == 3  # the engine core and two workers; the API server has nothing
    manifest = read_manifest(tmp_path / "run")
    assert manifest is not None
    assert (manifest.finished, manifest.exit_code) == (True, process.returncode)


FORKED = """
import multiprocessing, sys
import vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor
fork = lambda: multiprocessing.get_context("fork")
vllm.v1.engine.utils.get_mp_context = fork
vllm.v1.executor.multiproc_executor.get_mp_context = fork
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], num_gpu_blocks_override=65, block_size=32, max_model_len=1024,
          max_num_seqs=4, enforce_eager=True)
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
while True:
    llm.generate([{"prompt_token_ids": list(range(10, 110))}], params, use_tqdm=False)
"""


def test_a_forked_engine_core_is_traced_and_a_kill_keeps_every_finished_step(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = traced(
        run,
        *(sys.executable, "-c", FORKED, str(tiny_text_model)),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )

    def scheduler_file() -> Path | None:
        files = run.glob("*.trace.jsonl") if run.is_dir() else ()
        return next((one for one in files if '"type":"schedule"' in one.read_text()), None)

    def has_run_a_while() -> bool:
        file = scheduler_file()
        return file is not None and file.read_text().count("\n") > 150

    wait_until(has_run_a_while, process)
    file = scheduler_file()
    assert file is not None
    core = json.loads(file.read_text().partition("\n")[0])["pid"]
    os.kill(core, signal.SIGKILL)
    try:
        process.wait(timeout=30)  # vLLM's client may wait for ever for its engine core
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    printed = ended(process)

    traced_run = Run(run)
    assert core in {one.header.pid for one in traced_run.files}
    steps = list(traced_run.steps())
    assert len(steps) > 100, printed
    assert all(step.forwards for step in steps[:-1])
    checker = InvariantChecker()
    assert [one for step in steps for one in checker.check(step)] == []
    assert process.returncode != 0
