"""What tracing costs a decode step, beside what people do by hand today.

A tiny text model on the CPU decodes with 64 running requests. In one process and one engine the
conditions take turns, BLOCK steps each, so that a noisy machine disturbs all of them alike:

    off       the probe is there and does nothing
    off_again the same, to measure the noise (A/A)
    on        tracing
    repr      no tracing; repr(attn_metadata) in every step, as a print statement would
    profiler  no tracing; torch.profiler records every step

Prints one JSON object: probe_share and probe_share_p99, time inside our wrappers over the median
step without tracing; step_ratio, median of on/off over neighbouring blocks, with aa_spread, the
5th and 95th percentile of the same ratio for off_again/off; bytes_per_request_step.

Run: python benchmarks/trace_overhead.py [--turns N]
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from omnicache_cli.engine.probe.wrapping import PROBE_ATTRIBUTE

NUM_REQUESTS = 64
PROMPT_TOKENS = 64
BLOCK = 20
CONDITIONS = ("off", "on", "off_again", "repr", "profiler")


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextmanager
def repr_of_metadata() -> Iterator[None]:
    """What a print statement in the runner costs, without the terminal."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._model_forward

    def speaking(self: Any, *args: Any, **kwargs: Any) -> Any:
        repr(get_forward_context().attn_metadata)
        return original(self, *args, **kwargs)

    GPUModelRunner._model_forward = speaking
    try:
        yield
    finally:
        GPUModelRunner._model_forward = original


class Switch:
    """Takes the probe off the traced objects of an in-process engine, and puts it back."""

    def __init__(self, llm: Any) -> None:
        core = llm.engine_core.engine_core
        manager = core.scheduler.kv_cache_manager
        runner = core.model_executor.driver_worker.worker.model_runner
        self._traced = (core.scheduler, manager, manager.block_pool, runner)
        self._probes = [traced.__dict__[PROBE_ATTRIBUTE] for traced in self._traced]

    def turn(self, *, on: bool) -> None:
        for traced, probe in zip(self._traced, self._probes, strict=True):
            traced.__dict__.pop(PROBE_ATTRIBUTE, None)
            if on:
                setattr(traced, PROBE_ATTRIBUTE, probe)


def profiler() -> AbstractContextManager[Any]:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=8, help="blocks of each condition")
    turns = parser.parse_args().turns

    from omnicache_cli.engine.launch import Engine
    from omnicache_cli.engine.options import EngineOptions, prepare_environment

    prepare_environment(engine_process=False)
    from omnicache_cli.engine.probe import recorder
    from omnicache_cli.engine.tiny_models import build_tiny_model
    from omnicache_cli.engine.tracing import tracing
    from omnicache_cli.trace.workload import Prompt, Workload

    num_steps = BLOCK * len(CONDITIONS) * turns
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
            recording = recorder.current()
            assert recording is not None
            result = measure(engine, workload, recording, turns, run)
    print(json.dumps(result))


def measure(engine: Any, workload: Any, recording: Any, turns: int, run: Path) -> dict[str, Any]:
    import torch
    import vllm

    for index, prompt in enumerate(workload.prompts):
        engine._add(f"p{index}", prompt, workload, {})
    llm = engine._engine
    for _ in range(20):  # prefill, and the first decode steps
        llm.step()
    blocks: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    probe_ns: list[int] = []
    traced_bytes = 0
    around: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "repr": repr_of_metadata,
        "profiler": profiler,
    }
    switch = Switch(llm)
    (rank_file,) = run.glob("*.trace.jsonl")
    for _ in range(turns):
        for name in CONDITIONS:
            switch.turn(on=name == "on")
            size = rank_file.stat().st_size
            steps = []
            with around.get(name, nullcontext)():
                for _ in range(BLOCK):
                    inside = recording.probe_ns
                    started = time.perf_counter_ns()
                    llm.step()
                    steps.append(time.perf_counter_ns() - started)
                    if name == "on":
                        probe_ns.append(recording.probe_ns - inside)
            if name == "on":
                traced_bytes += rank_file.stat().st_size - size
            blocks[name].append(statistics.median(steps))
    step_ns = statistics.median(blocks["off"])
    ratios = {
        name: [one / off for one, off in zip(blocks[name], blocks["off"], strict=True)]
        for name in CONDITIONS
    }
    return {
        "benchmark": "trace_overhead",
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "running_requests": NUM_REQUESTS,
        "steps_per_condition": BLOCK * turns,
        "median_step_ms": round(step_ns / 1e6, 3),
        "median_probe_us": round(statistics.median(probe_ns) / 1e3, 1),
        "probe_share": round(statistics.median(probe_ns) / step_ns, 5),
        "probe_share_p99": round(quantile([float(one) for one in probe_ns], 0.99) / step_ns, 5),
        "step_ratio": round(statistics.median(ratios["on"]), 4),
        "aa_spread": [round(quantile(ratios["off_again"], share), 4) for share in (0.05, 0.95)],
        "repr_ratio": round(statistics.median(ratios["repr"]), 4),
        "profiler_ratio": round(statistics.median(ratios["profiler"]), 4),
        "bytes_per_request_step": round(traced_bytes / (BLOCK * turns * NUM_REQUESTS), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
