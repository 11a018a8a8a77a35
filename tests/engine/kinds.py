"""One workload per kind of tiny model, and what an engine says while it runs traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnicache_cli.engine.launch import Engine, Outcome
from omnicache_cli.engine.options import EngineOptions
from omnicache_cli.engine.tracing import tracing
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.workload import Lora, Prompt, Workload
from tests.engine.live import live_steps

KINDS = ("sliding", "mla", "hybrid", "lora")
"""The kinds beside text and image."""

COMMON = {
    "enforce_eager": True,
    "block_size": 32,
    "enable_prefix_caching": True,  # a CPU may turn it off again: see the engine's record
    "max_num_seqs": 4,
    "disable_log_stats": False,
}


@dataclass(frozen=True)
class Case:
    """What is sent to a model of one kind, and to what engine."""

    args: dict[str, Any]
    workload: Workload


def ids(seed: int, length: int) -> list[int]:
    return [10 + (seed * 7 + index * 3) % 200 for index in range(length)]


def case(kind: str, model: Path) -> Case:
    """Small pools, so that there are evictions and preemptions; batches; chunks where allowed."""
    prompts, args = {
        "sliding": (
            [Prompt(None, ids(*one)) for one in ((0, 300), (0, 200), (1, 90), (2, 90), (3, 90))],
            {"max_model_len": 512, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 33},
        ),
        "mla": (
            [Prompt(None, ids(*one)) for one in ((0, 300), (1, 300), (2, 290), (0, 200), (3, 17))],
            {"max_model_len": 512, "num_gpu_blocks_override": 61},
        ),
        "hybrid": (
            [Prompt(None, ids(*one)) for one in ((0, 1980), (0, 1300), (1, 1100), (2, 40))],
            {
                "max_model_len": 2112,
                "max_num_batched_tokens": 1536,
                "num_gpu_blocks_override": 21,
            },
        ),
        "lora": (
            [
                Prompt(None, ids(*one), lora=Lora(str(model / adapter), adapter))
                for one in ((0, 300), (1, 200))
                for adapter in ("adapter-a", "adapter-b")
            ],
            {"max_model_len": 512, "num_gpu_blocks_override": 49, "enable_lora": True}
            | {"max_loras": 2},
        ),
    }[kind]
    workload = Workload(tuple(prompts), num_rounds=2, concurrency=4, max_tokens=40, ignore_eos=True)
    return Case({**COMMON, **args}, workload)


class Traced:
    """One traced workload and what the engine itself said about it."""

    def __init__(self, model: Path, folder: Path, one: Case) -> None:
        self.folder = folder
        folder.mkdir()
        options = EngineOptions(str(model), one.args)
        with (
            tracing(folder),
            live_steps() as self.live,
            scheduler_tables() as self.tables,
            Engine(options) as engine,
        ):
            before = counters(engine)
            self.outcomes = engine.run(one.workload)
            after = counters(engine)
        self.counted = {name: after[name] - before[name] for name in after}
        self.steps = list(Run(folder).steps())


@contextmanager
def scheduler_tables() -> Iterator[list[dict[str, list[list[int]]]]]:
    """The scheduler's own block tables after each step that scheduled tokens, by request id."""
    from vllm.v1.core.sched.scheduler import Scheduler

    seen: list[dict[str, list[list[int]]]] = []
    original = Scheduler.schedule

    def copying(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            manager = self.kv_cache_manager
            seen.append(
                {
                    one: [list(ids) for ids in manager.get_block_ids(one)]
                    for one in output.num_scheduled_tokens
                }
            )
        return output

    Scheduler.schedule = copying
    try:
        yield seen
    finally:
        Scheduler.schedule = original


def counters(engine: Engine) -> dict[str, int]:
    """vLLM's own counters; the registry is one for the process, so only differences count."""
    names = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
    values = {metric.name: getattr(metric, "value", None) for metric in engine.metrics()}
    return {name: int(values.get(f"vllm:{name}") or 0) for name in names}


def tokens(outcomes: list[Outcome]) -> dict[str, tuple[int, ...]]:
    return {outcome.request_id: outcome.token_ids for outcome in outcomes}
