"""Records a workload on an engine of our own into a run folder."""

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnicache_cli import __version__
from omnicache_cli.engine.environment import Recording, tracing_variables
from omnicache_cli.engine.launch import Engine, Outcome, check_workload
from omnicache_cli.engine.options import (
    EngineOptions,
    check_engine_args,
    lora_args,
    prepare_environment,
    vllm_version,
)
from omnicache_cli.engine.plugin import ENVIRONMENT_VARIABLE
from omnicache_cli.trace.folder import finish_manifest, prepare_folder, write_manifest
from omnicache_cli.trace.manifest import Manifest
from omnicache_cli.trace.records import SCHEMA_VERSION
from omnicache_cli.trace.workload import Workload

if TYPE_CHECKING:
    from omnicache_cli.engine.probe.recorder import Recorder

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(token|key|secret|password)$", re.IGNORECASE)


@contextmanager
def tracing(folder: Path, what: Recording | None = None) -> Iterator["Recorder"]:
    """Trace this process, and the vLLM processes it starts, while the block runs.

    Enter it before the engine is made. Children end their files when they leave.
    """
    from omnicache_cli.engine.probe import install, recorder

    variables = tracing_variables(folder, os.environ, what)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    recording = install.install(variables[ENVIRONMENT_VARIABLE])
    try:
        yield recording
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        recorder.end()


@dataclass(frozen=True, slots=True)
class Traced:
    """What the launching process knows of a recording that the run folder may not say."""

    notes: list[str]  # about the engine's settings
    dropped_records: int  # of this process


def trace_workload(
    options: EngineOptions,
    workload: Workload,
    folder: Path,
    *,
    force: bool = False,
    what: Recording | None = None,
    on_finished: Callable[[Outcome], None] | None = None,
    around: AbstractContextManager[None] | None = None,
) -> Traced:
    """Record a workload into `folder`.

    `around` is entered when the engine is up, and left before it is stopped. The folder is made
    only when the engine's arguments have been accepted, and an earlier run in it is removed only
    when the engine is up. The manifest says whether the run ended in order.
    """
    check_workload(options, workload)
    prepare_environment(engine_process=options.engine_process)
    check_engine_args(options)
    args = {**lora_args(workload.prompts), **options.args}
    options = dataclasses.replace(options, args=args)
    new = prepare_folder(folder, force=force)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        tool_version=__version__,
        vllm_version=vllm_version(),
        created_unix_ns=time.time_ns(),
        model=options.model,
        layout="engine-process" if options.engine_process else "in-process",
        num_prompts=len(workload.prompts),
        num_rounds=workload.num_rounds,
        concurrency=workload.concurrency,
        max_tokens=workload.max_tokens,
        ignore_eos=workload.ignore_eos,
        engine_args=without_secrets(args),
    )
    try:
        write_manifest(folder, manifest)
        recorded = tracing(folder, what)
        with recorded as recording, Engine(options) as engine:
            new.keep()
            with around or nullcontext():
                engine.run(workload, on_finished)
            notes = engine.notes
    except BaseException as error:
        finish_manifest(folder, manifest, error=type(error).__name__)
        new.give_back()
        raise
    finish_manifest(folder, manifest, finished=True)
    return Traced(notes, recording.dropped)


def without_secrets(args: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments as they may stand in a file: values of tokens, keys and passwords hidden."""
    shown: dict[str, Any] = {}
    for name, value in args.items():
        if isinstance(value, Mapping):
            shown[name] = without_secrets(value)
        else:
            shown[name] = HIDDEN if value is not None and _SECRET.search(str(name)) else value
    return shown
