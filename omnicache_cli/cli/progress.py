"""A progress bar on stderr: only on a terminal, never with --quiet."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from omnicache_cli.report.output import note


@contextmanager
def request_progress(
    total: int, *, quiet: bool, noun: str = "requests", doing: str = "tracing"
) -> Iterator[Callable[[Any], None]]:
    """Yields what to call for each finished request, or whatever else is counted."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        if not quiet:
            note(f"starting vLLM for {total} {noun}; its imports take half a minute on two cores")
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(noun),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting vLLM", total=total)

        def advance(_: Any) -> None:
            progress.update(task, description=doing, advance=1)

        yield advance
