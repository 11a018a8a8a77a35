"""`omnicache show`: what a recorded run did, as tables."""

from pathlib import Path
from typing import Annotated

import typer

from omnicache_cli.cli.options import Force, Output, OutputFormat, Quiet
from omnicache_cli.errors import EXIT_DONE, UsageError
from omnicache_cli.report.formats import Format, format_for, render
from omnicache_cli.report.layout import quoted
from omnicache_cli.report.output import check_output, deliver, note


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of `omnicache trace -o`.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="RUN2", help="Another one, to see beside the first.")
    ] = None,
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
    requests: Annotated[
        bool, typer.Option("--requests", help="Every request in one line.")
    ] = False,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Who owned which block when, and the pool over time.")
    ] = False,
    block: Annotated[
        int | None, typer.Option(metavar="N", help="The life of one block of the pool.")
    ] = None,
    evictions: Annotated[
        bool, typer.Option("--evictions", help="Every eviction, and whether it was regretted.")
    ] = False,
    phases: Annotated[
        bool, typer.Option("--phases", help="Where the time of the steps goes; the slowest steps.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Totals while the run is written, until it ends.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="With --follow: seconds between two looks.")
    ] = 1.0,
    engine: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this engine: its id, number or stage.")
    ] = None,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Show a recorded run: its steps, requests and blocks.

    Without an option the steps are listed, one a line; with a second run, what the two have
    different. Of the options up to --follow only one can be given, and none with two runs.

    Example: omnicache show run --step 4
    """
    from omnicache_cli.profile.phase_report import show_phases
    from omnicache_cli.trace.run import Run, missing_parts
    from omnicache_cli.trace.views import show_two, show_view

    modes = {
        "--step": step is not None,
        "--request": request is not None,
        "--rounds": rounds,
        "--check": check,
        "--summary": summary,
        "--requests": requests,
        "--blocks": blocks,
        "--block": block is not None,
        "--evictions": evictions,
        "--phases": phases,
        "--follow": follow,
    }
    asked = [name for name, is_asked in modes.items() if is_asked]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} cannot be combined; give one of them")
    if other is not None and asked:
        raise UsageError(f"{asked[0]} is about one run; leave out {other}, or the option")
    if follow:
        _follow(run, interval, engine, output, format, quiet=quiet)
        return
    check_output(output, force=force)
    shown = [Run(one) for one in (run, other) if one is not None]
    if other is not None:
        view = show_two(shown[0], shown[1], engine)
    elif phases:
        view = show_phases(shown[0], engine)
    else:
        view = show_view(
            shown[0],
            mode=asked[0] if asked else None,
            step=step,
            request=request,
            block=block,
            engine=engine,
            every_row=format_for(format, output) == "json",
        )
    deliver(render(view.report, format, output), output, quiet=quiet)
    for one in shown:
        for line in missing_parts(one):
            note(line)
    if view.next_options is not None and not quiet:
        note(f"next: omnicache show {quoted(str(run))} {view.next_options}")
    if view.exit_code != EXIT_DONE:
        raise typer.Exit(view.exit_code)


def _follow(
    run: Path,
    interval: float,
    engine: str | None,
    output: Path | None,
    format: Format | None,
    *,
    quiet: bool,
) -> None:
    from omnicache_cli.cli.live import show_follow
    from omnicache_cli.trace.run import Run, missing_parts
    from omnicache_cli.trace.summary import summarize

    if engine is not None or output is not None or format is not None:
        raise UsageError(
            "--follow shows all engines as text on stdout; leave out --engine, --output and "
            "--format"
        )
    show_follow(run, interval)
    whole = Run(run)
    summarize(whole)  # refuses what the views of a run refuse, before the hint leads there
    for line in missing_parts(whole):
        note(line)
    if not quiet:
        note(f"next: omnicache show {quoted(str(run))} --summary")
