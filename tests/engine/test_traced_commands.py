"""`omnicache trace -- COMMAND` around real engines: a server on two ranks, a forked engine core."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

from omnicache_cli.trace.invariants import InvariantChecker
from omnicache_cli.trace.manifest import read_manifest
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import summarize
from tests.engine.commands import ended, fetch, free_port, metric, traced, wait_until

SMALL = {"block_size": 32, "max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True}
PREFIX = "Everything that these requests share stands in front. " * 3


PLANTED = """
from functools import wraps

def register():
    from vllm.distributed import parallel_state
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._build_attention_metadata

    @wraps(original)
    def build(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if parallel_state.get_tp_group().rank_in_group == 1 and isinstance(result[0], dict):
            for metadata in result[0].values():
                if metadata.num_actual_tokens == 77 and metadata.slot_mapping[76] % 32 == 12:
                    metadata.slot_mapping[76] += 5
        return result

    GPUModelRunner._build_attention_metadata = build
"""
"""A vLLM plugin: the second rank writes the last of 77 tokens five slots too far."""


def plant(folder: Path) -> str:
    """Installs the plugin for who has this PYTHONPATH."""
    (folder / "planted.py").write_text(PLANTED)
    metadata = folder / "planted-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    entry_point = "[vllm.general_plugins]\nplanted = planted:register\n"
    (metadata / "entry_points.txt").write_text(entry_point)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


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
        # Without a timeout vLLM kills its engine core and workers as soon as it is told to end.
        *("--tensor-parallel-size", "2", "--shutdown-timeout", "60", *options),
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        PYTHONPATH=plant(tmp_path),
    )

    def healthy() -> bool:
        try:
            fetch(f"{url}/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    wait_until(healthy, process)

    def ask(prompt: str | list[int]) -> None:
        body = {
            "model": str(tiny_text_model),
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        fetch(f"{url}/v1/completions", body)

    ask(f"{PREFIX}0")
    clients = [threading.Thread(target=ask, args=(f"{PREFIX}{number}",)) for number in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    ask(list(range(100, 177)))  # where the second rank differs
    page = fetch(f"{url}/metrics")
    process.send_signal(signal.SIGTERM)
    printed = ended(process)

    run = Run(tmp_path / "run")
    checker = InvariantChecker()
    steps, found = [], []
    for step in run.steps():
        found += checker.check(step)
        steps.append(step)
    (differs,) = (step for step in steps if step.num_scheduled_tokens == 77)
    slots = [view.groups[0].slot_mapping for view in differs.forwards]
    assert [(one.invariant, one.rank, one.step, one.what) for one in found] == [
        (1, 1, differs.number, "slot_mapping[76], position 76"),
        (11, 1, differs.number, "slot_mapping[76]"),
    ], printed
    assert slots[0] is not None
    assert slots[1] == [*slots[0][:76], slots[0][76] + 5]
    assert [len(step.forwards) for step in steps if step is not differs] == [1] * (len(steps) - 1)
    assert not list((tmp_path / "run").glob(".*"))  # where the ranks compared is gone
    summary = summarize(Run(tmp_path / "run"))
    assert summary.num_arrived == 10
    assert summary.hit_tokens == metric(page, "prefix_cache_hits") > 0
    assert summary.queried_tokens == metric(page, "prefix_cache_queries")
    assert checker.coverage[11].checked == summary.num_steps  # the second rank, every step
    assert {worker.tp_rank for worker in run.workers} == {0, 1}
    assert len(run.files) == 3  # the engine core and two workers; the API server has nothing
    manifest = read_manifest(tmp_path / "run")
    assert manifest is not None
    assert (manifest.finished, manifest.exit_code) == (True, 0)
    assert process.returncode == 1  # invariants are broken
    assert all(file.end is not None for file in run.files), printed


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
    checker = InvariantChecker()
    steps, found = [], []
    for step in traced_run.steps():
        found += checker.check(step)  # now: a request's table grows with the steps behind it
        steps.append(step)
    assert len(steps) > 100, printed
    assert all(step.forwards for step in steps[:-1])
    assert found == []
    assert process.returncode != 0
