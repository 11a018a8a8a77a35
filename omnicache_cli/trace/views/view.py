"""The answer of one view, and which engine of the run it is about."""

from collections.abc import Iterator
from dataclasses import dataclass

from omnicache_cli.errors import EXIT_DONE, BadInputError
from omnicache_cli.report.model import Report
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Step


@dataclass(frozen=True, slots=True)
class View:
    """A report, what to type next, and the exit code that the finding deserves."""

    report: Report
    next_options: str | None = None  # behind `omnicache show RUN`; None: nothing to add
    exit_code: int = EXIT_DONE


def steps_of(run: Run, engine: str | None) -> Iterator[Step]:
    """The steps of one engine, by its id or by its number in the run; of all for None.

    BadInputError, once the run has been read: it has no such engine.
    """
    if engine is None:
        yield from run.steps()
        return
    found = False
    for step in run.steps():
        if is_engine(run, step.engine.engine, engine):
            found = True
            yield step
    if not found and not any(is_engine(run, one, engine) for one in run.engines):
        raise BadInputError(f"{run.folder} has no engine {engine}; choose: {engine_choices(run)}")


def is_engine(run: Run, name: str, wanted: str | None) -> bool:
    """Is this the engine that the user named, by id, number or the name of its stage? The first
    engine of a run is number 0."""
    known = (name, str(list(run.engines).index(name)), run.engines[name].stage)
    return wanted is None or wanted in known


def of_engine(run: Run, options: str, name: str) -> str:
    """Options that mean something of this engine: they name it where the run has others."""
    return (
        f"{options} --engine {list(run.engines).index(name)}" if len(run.engines) > 1 else options
    )


def engine_choices(run: Run) -> str:
    choices = (f"{number} ({_named(run, name)})" for number, name in enumerate(run.engines))
    return ", ".join(choices) or "none"


def engine_title(run: Run, name: str) -> str:
    """The heading of what is about one engine: empty where the run has no other."""
    if len(run.engines) < 2 and run.engines[name].stage is None:
        return ""
    return f"Engine {list(run.engines).index(name)}, {_named(run, name)}"


def stage_title(run: Run, name: str) -> str | None:
    """`0 thinker`; None: the engine is no stage of vLLM-Omni."""
    engine = run.engines[name]
    return None if engine.stage is None else f"{engine.stage_id} {engine.stage}"


def _named(run: Run, name: str) -> str:
    stage = stage_title(run, name)
    return name if stage is None else f"{name}, stage {stage}"
