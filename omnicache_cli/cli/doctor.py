"""`omnicache doctor`: what works on this machine, and the line that mends the rest."""

import difflib
import os
from typing import Annotated

import typer

from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.options import Force, Output, OutputFormat, Quiet
from omnicache_cli.errors import EXIT_DIFFERS, UsageError
from omnicache_cli.report.formats import format_for, render
from omnicache_cli.report.output import check_output, deliver, note


def doctor(
    commands: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="Only these commands of omnicache."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Import vLLM itself too, half a minute.")
    ] = False,
    limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="An import that takes longer hangs.", min=0.1, max=3600
        ),
    ] = 60.0,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Say what works on this machine, and the line to type that mends the rest.

    Whatever has to be imported is imported in a process of its own. Exit code 1 when one of the
    commands asked for (without names: of all) does not work. The JSON is for bug reports: it holds
    no names of hosts, users or folders of theirs, and no secrets.

    Example: omnicache doctor
    """
    from omnicache_cli.cli.commands import COMMANDS
    from omnicache_cli.doctor.commands import judge_all
    from omnicache_cli.doctor.diagnosis import checks_of
    from omnicache_cli.doctor.report import report_of, works
    from omnicache_cli.engine.doctor.gather import gather
    from omnicache_cli.engine.doctor.system import names_to_hide
    from omnicache_cli.engine.versions import is_tested

    for name in commands or ():
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose of: {', '.join(COMMANDS)}"
            raise UsageError(f"omnicache has no command {name!r}; {hint}")
    check_output(output, force=force)
    format_for(format, output)
    if deep and not quiet:
        note("importing vLLM; this takes half a minute")
    with termination_as_interrupt():
        facts = gather(is_deep=deep, limit_s=limit)
    checks = checks_of(facts, is_tested)
    judged = judge_all(list(dict.fromkeys(commands or COMMANDS)), checks)
    report = report_of(facts, checks, judged, names_to_hide(os.environ))
    deliver(render(report, format, output), output, quiet=quiet)
    if not works(judged):
        raise typer.Exit(EXIT_DIFFERS)
