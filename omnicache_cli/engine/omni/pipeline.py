"""Runs a whole pipeline of vLLM-Omni with the cache off and on; keeps what passes between stages.

Each run is a child process with the stages below it; what crosses is kept by `wire` and the steps
are recorded by the probe, both inside the stage processes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnicache_cli.engine.environment import tracing_variables
from omnicache_cli.engine.omni.deploy import lint_deploy
from omnicache_cli.engine.omni.pipeline_child import RESULTS, STAGE_SECONDS
from omnicache_cli.engine.options import first_line
from omnicache_cli.engine.plugin import PAYLOADS_VARIABLE
from omnicache_cli.errors import BadInputError, EngineFailedError
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import summarize
from omnicache_cli.verify.crossings import Crossing, Direction, read_crossings
from omnicache_cli.verify.deploy import Caching, StageLint
from omnicache_cli.verify.pipeline_report import StageHits

TEXTS = (
    "A prefix cache keeps the keys and values of full blocks. When the same prompt comes again, "
    "how many of its tokens are computed, and where do the hidden states of the others come from?",
    "The talker speaks what the thinker thought: it needs a hidden state for every token of the "
    "prompt, also for those that were not computed. What would it say if a row were missing?",
)
"""What is sent unless prompts are given."""

ROUNDS = 2
"""The second round hits what the first one filled; without a cache it measures the difference from
run to run."""

_SHUTDOWN_SECONDS = 60
_LAST_LINES = 4000  # characters of a failed run's output that are searched for its reason


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One start of the pipeline: all prompts in every round."""

    folder: Path
    crossings: list[Crossing]
    outputs: list[dict[str, Any]]
    trace: Path


@dataclass(frozen=True, slots=True)
class PipelineRuns:
    """Without the cache and with it."""

    pipeline: str
    stages: list[StageLint]
    cached: tuple[str, ...]  # stages that have the cache on in `on`
    off: PipelineRun
    on: PipelineRun
    notes: list[str] = field(default_factory=list)


def run_pipeline(
    model: str,
    path: Path,
    prompts: Sequence[str],
    folder: Path,
    *,
    trust_remote_code: bool = False,
    on_run: Callable[[str], None] | None = None,
) -> PipelineRuns:
    """`folder` takes everything that is kept, a folder for each run.

    BadInputError: no stage could have the cache on. EngineFailedError: the pipeline does not run.
    """
    pipeline, stages = lint_deploy(model, path, trust_remote_code=trust_remote_code)
    cached = cached_stages(stages)
    runs = []
    for name, on in (("off", ()), ("on", cached)):
        if on_run is not None:
            on_run(name)
        runs.append(_run(model, path, stages, on, prompts, folder / name))
    names = tuple(one.stage for one in stages if one.stage_id in cached)
    return PipelineRuns(pipeline, stages, names, runs[0], runs[1])


def cached_stages(stages: Sequence[StageLint]) -> tuple[int, ...]:
    """Ids of the stages that the file turns the cache on for; where it does for none, of all that
    could have it. BadInputError: there is none."""
    on = [one.stage_id for one in stages if one.caching is Caching.ON]
    possible = [one.stage_id for one in stages if one.caching is Caching.POSSIBLE]
    if not on and not possible:
        raise BadInputError(
            "nothing verified: no stage could have a tensor cache; see --lint for the reasons"
        )
    return tuple(on or possible)


def _run(
    model: str,
    path: Path,
    stages: Sequence[StageLint],
    on: Sequence[int],
    prompts: Sequence[str],
    folder: Path,
) -> PipelineRun:
    trace, payloads = folder / "trace", folder / "payloads"
    for one in (folder, trace, payloads):
        one.mkdir(mode=0o700)
    deploy = folder / "deploy.yaml"
    deploy.write_text(overlay(path, stages, on), encoding="utf-8")
    spec = {
        "model": model,
        "deploy_config": str(deploy),
        "prompts": list(prompts),
        "rounds": ROUNDS,
        "folder": str(folder),
    }
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    _wait_for_child(folder, trace, payloads)
    outputs = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    failed = next((one["error"] for one in outputs if one["error"]), None)
    if failed is not None:
        raise EngineFailedError(f"the pipeline failed in a request: {failed}")
    crossings = [*read_crossings(payloads), *_given_out(folder, stages, outputs)]
    return PipelineRun(folder, crossings, outputs, trace)


def _given_out(
    folder: Path, stages: Sequence[StageLint], outputs: Sequence[dict[str, Any]]
) -> list[Crossing]:
    """What the pipeline gave to its user, as crossings of the stages that it came from."""
    import torch
    from safetensors.torch import load_file

    names = {one.stage_id: one.stage for one in stages}
    counts: Counter[int] = Counter()
    found = []
    for one in outputs:
        stage_id = int(one["stage_id"])
        tensors = {} if one["tensors"] is None else load_file(folder / one["tensors"])
        for index, ids in enumerate(one["token_ids"]):
            if ids:
                tensors[f"token_ids.{index}"] = torch.tensor(ids)
        number = counts[stage_id]
        counts[stage_id] += 1
        found.append(
            Crossing(stage_id, names[stage_id], Direction.OUTPUT, number, str(number), tensors)
        )
    return found


def stage_hits(runs: PipelineRuns) -> list[StageHits]:
    """From the trace of the run with the cache on: what each stage's scheduler put out."""
    by_stage = {one.stage: one for one in summarize(Run(runs.on.trace)).stages.values()}
    found = []
    for stage in runs.stages:
        totals = by_stage.get(stage.stage)
        found.append(
            StageHits(
                stage.stage_id,
                stage.stage,
                stage.stage in runs.cached,
                0 if totals is None else totals.queried_tokens,
                0 if totals is None else totals.hit_tokens,
            )
        )
    return found


def chat_prompts(model: str, texts: Sequence[str], *, trust_remote_code: bool) -> list[str]:
    """Each text as a user's message in the model's chat template.

    BadInputError: the model has none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
        return [
            str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
            )
            for text in texts
        ]
    except Exception as error:
        raise BadInputError(
            f"no chat template for {model}: {first_line(error)}; bring prompts with --prompts"
        ) from error


def overlay(path: Path, stages: Sequence[StageLint], on: Sequence[int]) -> str:
    """A deploy file on top of another, with the cache on for these stages only. JSON is YAML."""
    return json.dumps(
        {
            "base_config": str(path.absolute()),
            "stages": [
                {"stage_id": one.stage_id, "enable_prefix_caching": one.stage_id in on}
                for one in stages
                if one.kind == "llm_ar"
            ],
        },
        indent=2,
    )


def _wait_for_child(folder: Path, trace: Path, payloads: Path) -> None:
    """In a session of its own, so that all its processes can be ended together."""
    variables = {**tracing_variables(trace, os.environ), PAYLOADS_VARIABLE: str(payloads)}
    environment = {**os.environ, **variables}
    # Of this process: a stage is two processes, whatever an engine of ours would be.
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    environment.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(STAGE_SECONDS))
    log = folder / "log.txt"
    command = [sys.executable, "-m", "omnicache_cli.engine.omni.pipeline_child"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, str(folder / "spec.json")],
            env=environment,
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            _end(process)
    if code != 0:
        raise EngineFailedError(f"the pipeline did not run: {_reason(log)}; see {_kept(log)}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number, seconds in ((signal.SIGTERM, _SHUTDOWN_SECONDS), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            if number is signal.SIGKILL or not _group_lives(process.pid):
                return


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def _kept(log: Path) -> str:
    """A copy of a run's output that stays, and where it is."""
    handle, name = tempfile.mkstemp(prefix="omnicache-pipeline-", suffix=".log")
    with os.fdopen(handle, "wb") as stream:
        stream.write(log.read_bytes())
    return name


def _reason(log: Path) -> str:
    """The last line of a run's output that names an error."""
    lines = log.read_text(encoding="utf-8", errors="replace")[-_LAST_LINES:].splitlines()
    named = [line.strip() for line in lines if "Error" in line]
    said = [line.strip() for line in lines if line.strip()]
    return (named or said or ["it said nothing"])[-1]
