"""What sampling, following and other profilers cost a decode step, on one engine.

A tiny text model on the CPU decodes with 64 running requests, traced throughout, as a profiled run
is. In one process and one engine the conditions take turns, BLOCK steps each, so that a noisy
machine disturbs all of them alike:

    off        tracing alone
    off_again  the same, to measure the noise (A/A)
    profile    py-spy samples this process 100 times a second, as `omnicache profile` does
    timeline   the same with --timeline: all threads
    live       `omnicache show RUN --follow` reads the run's files in a process of its own
    profiler   torch.profiler records every step
    viztracer  viztracer records every call; absent where it is not installed

Prints one JSON object: for each a ratio, the median over the turns of the time of its block to that
of the "off" block beside it, with aa_spread, the 5th and 95th percentile of the same for off_again.

Run: python benchmarks/profile_overhead.py [--turns N]
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

NUM_REQUESTS = 64
PROMPT_TOKENS = 64
BLOCK = 60


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextmanager
def py_spy(scratch: Path, counts: list[int], *, timeline: bool) -> Iterator[None]:
    from omnicache_cli.profile.pyspy import Recorder, find_py_spy
    from omnicache_cli.profile.sampling import Sampling

    recorder = Recorder(
        find_py_spy(), os.getpid(), Sampling(timeline=timeline), scratch / "recording"
    )
    try:
        while recorder.is_starting:
            time.sleep(0.01)
            recorder.poll()
        yield
        recorder.tell_to_end()
        recorder.wait(60)
        counted = recorder.counts
        if counted is None:
            raise RuntimeError(recorder.failure)
        counts.append(counted[0])
    finally:
        recorder.kill()


@contextmanager
def follower(run: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "omnicache_cli.cli", "show", str(run), "--follow"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(3)  # its imports, and the run so far
        if process.poll() is not None:
            raise RuntimeError(f"the follower ended with {process.returncode}")
        yield
    finally:
        process.terminate()
        process.wait()


def profiler() -> AbstractContextManager[Any]:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU])


@contextmanager
def viztracer() -> Iterator[None]:
    from viztracer import VizTracer

    tracer = VizTracer(verbose=0)
    tracer.start()
    try:
        yield
    finally:
        tracer.stop()
        tracer.clear()


def can_follow() -> bool:
    from omnicache_cli.cli.app import load_command

    return any("--follow" in one.opts for one in load_command("show").params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=8, help="blocks of each condition")
    turns = parser.parse_args().turns

    from omnicache_cli.engine.launch import Engine
    from omnicache_cli.engine.options import EngineOptions, prepare_environment

    prepare_environment(engine_process=False)
    from omnicache_cli.engine.tiny_models import build_tiny_model
    from omnicache_cli.engine.tracing import tracing
    from omnicache_cli.trace.workload import Prompt, Workload

    num_steps = BLOCK * 8 * turns
    with tempfile.TemporaryDirectory() as scratch:
        model, run = Path(scratch) / "model", Path(scratch) / "run"
        build_tiny_model("text", model)
        run.mkdir()
        options = EngineOptions(
            str(model),
            {
                "enforce_eager": True,
                "block_size": 32,
                "max_num_seqs": NUM_REQUESTS,
                "max_model_len": PROMPT_TOKENS + num_steps + 64,
                "max_num_batched_tokens": NUM_REQUESTS * PROMPT_TOKENS,
            },
        )
        prompts = tuple(
            Prompt(None, [1 + (seed * 31 + index * 7) % 250 for index in range(PROMPT_TOKENS)])
            for seed in range(NUM_REQUESTS)
        )
        workload = Workload(
            prompts, concurrency=NUM_REQUESTS, max_tokens=num_steps + 40, ignore_eos=True
        )
        with tracing(run), Engine(options) as engine:
            result = measure(engine, workload, turns, run, Path(scratch))
    print(json.dumps(result))


def measure(engine: Any, workload: Any, turns: int, run: Path, scratch: Path) -> dict[str, Any]:
    import torch
    import vllm

    for index, prompt in enumerate(workload.prompts):
        engine._add(f"p{index}", prompt, workload, {})
    llm = engine._engine
    for _ in range(20):  # prefill, and the first decode steps
        llm.step()
    samples: list[int] = []
    stacks: list[int] = []
    conditions: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "off": nullcontext,
        "profile": lambda: py_spy(scratch, samples, timeline=False),
        "timeline": lambda: py_spy(scratch, stacks, timeline=True),
        "off_again": nullcontext,
        "profiler": profiler,
    }
    if can_follow():
        conditions["live"] = lambda: follower(run)
    if importlib.util.find_spec("viztracer"):
        conditions["viztracer"] = viztracer
    blocks: dict[str, list[float]] = {name: [] for name in conditions}
    medians: dict[str, list[float]] = {name: [] for name in conditions}
    for _ in range(turns):
        for name, around in conditions.items():
            steps = []
            with around():
                for _ in range(BLOCK):
                    started = time.perf_counter_ns()
                    llm.step()
                    steps.append(time.perf_counter_ns() - started)
            blocks[name].append(sum(steps))
            medians[name].append(statistics.median(steps))

    def ratios(name: str, of: dict[str, list[float]]) -> list[float]:
        return [one / off for one, off in zip(of[name], of["off"], strict=True)]

    result: dict[str, Any] = {
        "benchmark": "profile_overhead",
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "running_requests": NUM_REQUESTS,
        "steps_per_condition": BLOCK * turns,
        "median_step_ms": round(statistics.median(medians["off"]) / 1e6, 3),
        "aa_spread": [round(quantile(ratios("off_again", blocks), one), 4) for one in (0.05, 0.95)],
        "samples": sum(samples),
    }
    for name in ("profile", "timeline", "live", "profiler", "viztracer"):
        seen = ratios(name, blocks) if name in blocks else None
        result[f"{name}_ratio"] = None if seen is None else round(statistics.median(seen), 4)
        seen = ratios(name, medians) if name in medians else None
        result[f"{name}_ratio_of_medians"] = (
            None if seen is None else round(statistics.median(seen), 4)
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
