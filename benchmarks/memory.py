"""Does the memory of a traced engine grow with the trace?

A tiny text model serves request after request, 8 at a time, in one process, first traced and then
not. Prints one JSON object: resident memory after a tenth of the steps and at the end, in MB.

Run: python benchmarks/memory.py [--steps N]
"""

import argparse
import json
import os
import platform
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
CONCURRENCY = 8
OUTPUT_TOKENS = 100


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * PAGE / 1e6, 1)


def serve(model: Path, num_steps: int, run: Path | None) -> dict[str, Any]:
    from omnicache_cli.engine.launch import Engine
    from omnicache_cli.engine.options import EngineOptions
    from omnicache_cli.engine.tracing import tracing
    from omnicache_cli.trace.workload import Prompt, Workload

    args = {
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_seqs": CONCURRENCY,
        "num_gpu_blocks_override": 200,
    }
    rounds = num_steps // OUTPUT_TOKENS
    prompts = tuple(
        Prompt(None, [1 + (seed * 31 + index * 7) % 250 for index in range(64)])
        for seed in range(CONCURRENCY)
    )
    workload = Workload(
        prompts, rounds, concurrency=CONCURRENCY, max_tokens=OUTPUT_TOKENS, ignore_eos=True
    )
    finished = 0
    early = 0.0

    def count(_: Any) -> None:
        nonlocal finished, early
        finished += 1
        if finished == workload.num_requests // 10:
            early = resident_mb()

    with (
        nullcontext() if run is None else tracing(run),
        Engine(EngineOptions(str(model), args)) as e,
    ):
        e.run(workload, count)
        end = resident_mb()
    return {"after_a_tenth_mb": early, "at_the_end_mb": end, "growth_mb": round(end - early, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    num_steps = parser.parse_args().steps

    from omnicache_cli.engine.options import prepare_environment

    prepare_environment(engine_process=False)
    from omnicache_cli.engine.tiny_models import build_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        model, run = Path(scratch) / "model", Path(scratch) / "run"
        build_tiny_model("text", model)
        run.mkdir()
        serve(model, num_steps // 10, None)  # what grows at first grows for both
        traced = serve(model, num_steps, run)
        untraced = serve(model, num_steps, None)
        size = sum(one.stat().st_size for one in run.iterdir())
    result = {
        "benchmark": "memory",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "steps": num_steps,
        "trace_mb": round(size / 1e6, 2),
        "traced": traced,
        "untraced": untraced,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
