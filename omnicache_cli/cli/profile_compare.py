"""What `omnicache profile --compare-cache` does: the prefix cache on against off, in turns."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from omnicache_cli.cli.commands import COMMAND_TO_RUN
from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.progress import request_progress
from omnicache_cli.cli.trace import check_surroundings, model_and_workload
from omnicache_cli.errors import UsageError
from omnicache_cli.profile.compare import MIN_PAIRS
from omnicache_cli.report.formats import Format, format_for, render
from omnicache_cli.report.layout import quoted
from omnicache_cli.report.model import Cell
from omnicache_cli.report.output import check_output, deliver, note
from omnicache_cli.trace.folder import check_folder, prepare_folder
from omnicache_cli.trace.workload import Workload

if TYPE_CHECKING:
    from omnicache_cli.engine.options import EngineOptions

DEFAULT_PAIRS = 5


_OF_SAMPLING = (
    *("pid", "duration", "rate", "role", "timeline", "startup", "native", "idle", "gil"),
    *("with_token_ids", "check_hashes", "all_ranks", "live"),
)
"""Options that say nothing to a comparison."""


def compare_from_options(context: typer.Context) -> None:
    """`compare_cache` with what the command line says. UsageError: options that do not go along."""
    given = context.params
    if context.meta.get(COMMAND_TO_RUN) is not None:
        raise UsageError("--compare-cache starts two engines of its own; name a MODEL, no command")
    for name in _OF_SAMPLING:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            shown = name.replace("_", "-")
            raise UsageError(f"--{shown} cannot be combined with --compare-cache; leave it out")
    if given["stage"] is not None and given["engine_process"]:
        raise UsageError("a stage runs in this process; leave out --engine-process or --stage")
    if given["model"] is None:
        raise UsageError("nothing to compare; name a model folder, or a hub id")
    check_surroundings()
    options, workload = model_and_workload(given, context.info_name)
    compare_cache(
        options,
        workload,
        pairs=given["pairs"],
        stage=given["stage"],
        run=given["run"],
        output=given["report"],
        format=given["format"],
        force=given["force"],
        quiet=given["quiet"],
    )


def compare_cache(
    options: "EngineOptions",
    workload: Workload,
    *,
    pairs: int = DEFAULT_PAIRS,
    stage: str | None = None,
    run: Path | None = None,
    output: Path | None = None,
    format: Format | None = None,
    force: bool = False,
    quiet: bool = False,
) -> None:
    """Run the workload `pairs` times with caching and without, and deliver the comparison.

    `run`: where the trace of both engines is kept; `output`: a file for the report.
    UsageError: fewer pairs than say anything, or the options settle the question themselves.
    """
    from omnicache_cli.engine.comparison import run_in_turns
    from omnicache_cli.engine.options import vllm_version
    from omnicache_cli.profile.compare import compare
    from omnicache_cli.profile.compare_report import compare_report, sentence
    from omnicache_cli.trace.run import Run

    if pairs < MIN_PAIRS:
        raise UsageError(f"{pairs} pairs say nothing on a noisy machine; the least is {MIN_PAIRS}")
    check_output(output, force=force, option="--report")
    format_for(format, output)
    if run is not None:
        check_folder(run, force=force)
    total = 2 * (pairs + 1) * workload.num_requests
    with _run_folder(run, force=force) as folder:
        progress = request_progress(total, quiet=quiet, doing="comparing")
        with termination_as_interrupt(), progress as advance:
            ran = run_in_turns(
                options, workload, folder, pairs=pairs, stage=stage, on_finished=advance
            )
        comparison = compare(Run(folder), ran.repetitions, workload.num_requests)
    facts: dict[str, Cell] = {
        "model": options.model if stage is None else f"{options.model}, stage {stage}",
        "requests of one run": workload.num_requests,
        "at a time": "as they arrive" if workload.has_arrivals else workload.concurrency,
    }
    report = compare_report(comparison, facts, vllm_version=vllm_version())
    deliver(render(report, format, output), output, quiet=quiet)
    if not quiet:
        for line in ran.notes:
            note(line)
    if output is not None:
        note(sentence(comparison))
    if run is not None and not quiet:
        note("the trace has the run that warmed up each engine too, which is left out here")
        note(f"next: omnicache show {quoted(str(run))} --phases")


@contextmanager
def _run_folder(run: Path | None, *, force: bool) -> Iterator[Path]:
    """The folder of the trace; one for the time being where nobody wants to keep it."""
    if run is None:
        with tempfile.TemporaryDirectory(prefix="omnicache-") as scratch:
            yield Path(scratch)
        return
    new = prepare_folder(run, force=force)
    try:
        yield run
    except BaseException:
        new.give_back()
        raise
    new.keep()
