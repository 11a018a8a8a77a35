"""The same workload on two engines of one model, one with prefix caching and one without, in turns.

Both live at the same time and are traced alike. Before every run the prefix cache is reset, so that
hits are those of the workload itself and not of the run before.
"""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnicache_cli.engine.launch import Engine, Outcome, check_workload
from omnicache_cli.engine.options import (
    EngineOptions,
    check_engine_args,
    lora_args,
    prepare_environment,
)
from omnicache_cli.engine.tracing import tracing
from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.profile.compare import Repetition
from omnicache_cli.trace.workload import Workload

DEVICE_SHARE = 0.45
"""Of a device's memory for each of the two engines, where the user says nothing."""

_MEMORY_ARGS = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})


@dataclass(frozen=True, slots=True)
class Ran:
    """What was run, in order, and what is to be said of it."""

    repetitions: list[Repetition]
    notes: list[str]


def run_in_turns(
    options: EngineOptions,
    workload: Workload,
    folder: Path,
    *,
    pairs: int,
    stage: str | None = None,
    on_finished: Callable[[Outcome], None] | None = None,
) -> Ran:
    """Trace `pairs` runs of the workload on each engine into `folder`, after one that warms up.

    `stage`: of an omni model, on vLLM-Omni's own runner with its tensor cache.
    BadInputError: this model or device has no prefix cache. UsageError: the options say already
    whether there is one. EngineMissingError, EngineFailedError: there is no engine.
    """
    if "enable_prefix_caching" in options.args:
        raise UsageError("the cache is compared on and off; leave out enable_prefix_caching")
    check_workload(options, workload)
    prepare_environment(engine_process=options.engine_process)
    args_class, stage_args = (None, {}) if stage is None else _stage(options, stage)
    args = {**stage_args, **lora_args(workload.prompts), **options.args}
    check_engine_args(dataclasses.replace(options, args=args), args_class)
    notes: list[str] = []
    repetitions: list[Repetition] = []
    with tracing(folder), contextlib.ExitStack() as stack:
        args |= _device_memory(args, notes)
        engines = {}
        for caching in (True, False):
            asked = dataclasses.replace(options, args={**args, "enable_prefix_caching": caching})
            engines[caching] = stack.enter_context(Engine(asked, args_class))
        notes += engines[True].notes
        if not engines[True].caches_prefixes:
            raise BadInputError(
                "vLLM turns prefix caching off for this model on this device: nothing to compare"
            )
        for number in range(pairs + 1):
            order = (True, False) if number % 2 == 0 else (False, True)
            for caching in order:
                ran = _run(engines[caching], workload, caching, on_finished)
                repetitions.append(ran)
    return Ran(repetitions, notes)


def _run(
    engine: Engine, workload: Workload, caching: bool, on_finished: Callable[[Outcome], None] | None
) -> Repetition:
    if caching:
        engine.reset_prefix_cache()
    gc.collect()
    started = time.perf_counter_ns()
    outcomes = engine.run(workload, on_finished)
    ended = time.perf_counter_ns()
    num_tokens = sum(one.num_prompt_tokens + len(one.token_ids) for one in outcomes)
    return Repetition(caching, ended - started, num_tokens, tensor_cache_bytes(engine))


def tensor_cache_bytes(engine: Engine) -> int | None:
    """CPU memory of vLLM-Omni's tensor cache; None: there is none, or it is in another process."""
    if engine.options.engine_process:
        return None
    cache = vars(engine.model_runner).get("omni_prefix_cache")
    if cache is None:
        return None
    return sum(tensor.nbytes for tensor in cache._pool._caches.values())


def _stage(options: EngineOptions, name: str) -> tuple[Any, dict[str, Any]]:
    """The class of engine arguments of a stage, and what makes an engine of it."""
    from omnicache_cli.engine.omni.session import DEFAULTS, omni_args_class, stage_args
    from omnicache_cli.engine.omni.upstream import pipeline_of, stage_named, stages_of

    trust = bool(options.args.get("trust_remote_code"))
    pipeline = pipeline_of(options.model, trust_remote_code=trust)
    args = {**stage_args(pipeline, stage_named(stages_of(pipeline), name)), **DEFAULTS}
    del args["enable_prefix_caching"]
    return omni_args_class(), args


def _device_memory(args: dict[str, Any], notes: list[str]) -> dict[str, float]:
    """Two engines on one device: neither may take what vLLM would give to one."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or not _MEMORY_ARGS.isdisjoint(args):
        return {}
    notes.append(
        f"both engines share the device: gpu_memory_utilization {DEVICE_SHARE} each; change it "
        "with --gpu-memory-utilization"
    )
    return {"gpu_memory_utilization": DEVICE_SHARE}
