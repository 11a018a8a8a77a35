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
    """Is this the engine that the user named? The first engine of a run is number 0."""
    return wanted is None or wanted in (name, str(list(run.engines).index(name)))


def engine_choices(run: Run) -> str:
    return ", ".join(f"{number} ({name})" for number, name in enumerate(run.engines)) or "none"


def engine_title(run: Run, name: str) -> str:
    """The heading of what is about one engine: empty where the run has no other."""
    if len(run.engines) < 2:
        return ""
    return f"Engine {list(run.engines).index(name)}, {name}"
