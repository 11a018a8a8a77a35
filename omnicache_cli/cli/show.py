"""`omnicache show`: what a recorded run did, as tables."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from omnicache_cli.cli.options import Force, Output, OutputFormat, Quiet
from omnicache_cli.errors import EXIT_DONE, UsageError
from omnicache_cli.report.formats import format_for, render
from omnicache_cli.report.output import check_output, deliver, note


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of `omnicache trace -o`.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="This step as vLLM sees it, tensors in full.")
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The life of one request: its id, or #N by arrival."),
    ] = None,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="The first round beside the next ones.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check the invariants of every step; exit 1 if broken.")
    ] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Totals of the run.")] = False,
    engine: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this engine: its id, or its number.")
    ] = None,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Show a recorded run: its steps, requests and blocks.

    Without an option the steps are listed, one a line. Only one of --step, --request, --rounds,
    --check and --summary can be given.

    Example: omnicache show run --step 4
    """
    from omnicache_cli.trace.run import Run
    from omnicache_cli.trace.views import show_view

    modes = {
        "--step": step is not None,
        "--request": request is not None,
        "--rounds": rounds,
        "--check": check,
        "--summary": summary,
    }
    asked = [name for name, is_asked in modes.items() if is_asked]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} cannot be combined; give one of them")
    check_output(output, force=force)
    view = show_view(
        Run(run),
        mode=asked[0] if asked else None,
        step=step,
        request=request,
        engine=engine,
        every_step=format_for(format, output) == "json",
    )
    deliver(render(view.report, format, output), output, quiet=quiet)
    if view.next_options is not None and not quiet:
        note(f"next: omnicache show {quote(str(run))} {view.next_options}")
    if view.exit_code != EXIT_DONE:
        raise typer.Exit(view.exit_code)
