"""What `omnicache profile --compare-cache` does: the prefix cache on against off, in turns."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.progress import request_progress
from omnicache_cli.errors import UsageError
from omnicache_cli.profile.compare import MIN_PAIRS
from omnicache_cli.report.formats import Format, render
from omnicache_cli.report.model import Cell
from omnicache_cli.report.output import check_output, deliver, note
from omnicache_cli.trace.workload import Workload

if TYPE_CHECKING:
    from omnicache_cli.engine.options import EngineOptions

DEFAULT_PAIRS = 5


def compare_cache(
    options: "EngineOptions",
    workload: Workload,
    *,
    pairs: int = DEFAULT_PAIRS,
    stage: str | None = None,
    output: Path | None = None,
    format: Format | None = None,
    force: bool = False,
    quiet: bool = False,
) -> None:
    """Run the workload `pairs` times with caching and without, and deliver the comparison.

    UsageError: fewer pairs than say anything, or the options settle the question themselves.
    """
    from omnicache_cli.engine.comparison import run_in_turns
    from omnicache_cli.engine.options import vllm_version
    from omnicache_cli.profile.compare import compare
    from omnicache_cli.profile.compare_report import compare_report, sentence
    from omnicache_cli.trace.run import Run

    if pairs < MIN_PAIRS:
        raise UsageError(f"{pairs} pairs say nothing on a noisy machine; the least is {MIN_PAIRS}")
    check_output(output, force=force)
    total = 2 * (pairs + 1) * workload.num_requests
    progress = request_progress(total, quiet=quiet, doing="comparing")
    with tempfile.TemporaryDirectory(prefix="omnicache-") as folder:
        with termination_as_interrupt(), progress as advance:
            ran = run_in_turns(
                options, workload, Path(folder), pairs=pairs, stage=stage, on_finished=advance
            )
        comparison = compare(Run(Path(folder)), ran.repetitions, workload.num_requests)
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
