"""`omnicache explain`: why a prefix hit ended where it did."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from omnicache_cli.cli.options import Force, Output, OutputFormat, Quiet
from omnicache_cli.errors import EXIT_DONE, UsageError
from omnicache_cli.report.formats import format_for, render
from omnicache_cli.report.output import check_output, deliver, note


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of `omnicache trace -o`.")],
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only this request, in full: its id, or #N by arrival."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this engine: its id, or its number.")
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", metavar="REASON", help="Exit 1 if a hit ended so; repeatable."),
    ] = None,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Explain why each prefix hit ended where it did, with the evidence.

    Without --request every lookup is listed, one a line.

    Example: omnicache explain run --request p1
    """
    from omnicache_cli.prefix.report import explain_request, explain_requests
    from omnicache_cli.trace.run import Run

    reasons = check_reasons(fail_on or [])
    check_output(output, force=force)
    if request is not None:
        view = explain_request(Run(run), request, engine, reasons)
    else:
        every = format_for(format, output) == "json"
        view = explain_requests(Run(run), engine, every_request=every, fail_on=reasons)
    deliver(render(view.report, format, output), output, quiet=quiet)
    if view.next_options is not None and not quiet:
        note(f"next: omnicache explain {quote(str(run))} {view.next_options}")
    if view.exit_code != EXIT_DONE:
        raise typer.Exit(view.exit_code)


def check_reasons(names: list[str]) -> list[str]:
    """UsageError: one of them is no reason."""
    from omnicache_cli.prefix.reasons import REASONS

    for name in names:
        if name not in REASONS:
            raise UsageError(f"--fail-on {name}: no such reason; choose of {', '.join(REASONS)}")
    return names
