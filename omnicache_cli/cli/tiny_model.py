"""`omnicache tiny-model`: a model small enough for a laptop and for continuous integration."""

from pathlib import Path
from typing import Annotated

import typer

from omnicache_cli.cli.options import Force, Output, OutputFormat, Quiet
from omnicache_cli.errors import UsageError
from omnicache_cli.report.formats import format_for, render
from omnicache_cli.report.layout import quoted
from omnicache_cli.report.model import Facts, Report
from omnicache_cli.report.output import check_output, deliver, note

FIRST_TRACE = {
    "text": '--block-size 32 --rounds 2 --prompt "The cache remembers every full block." -o run',
    "image": "--block-size 32 --rounds 2 --prompts prompts.jsonl -o run (the file: docs/trace.md)",
    "sliding": '--block-size 32 --rounds 2 --prompt "$(yes full blocks | head -c 600)" -o run',
    "mla": '--rounds 2 --prompt "The cache remembers every full block." -o run',
    "hybrid": '--block-size 32 --rounds 2 --prompt "$(yes full blocks | head -c 1200)" -o run',
    "wide": '--block-size 32 --rounds 2 --prompt "The cache remembers every full block." -o run',
    "lora": "--block-size 32 --rounds 2 --prompts prompts.jsonl -o run (the file: docs/trace.md)",
    "omni": '--block-size 32 --rounds 2 --prompt "The cache remembers every full block." -o run',
}
"""Per kind, options with which the second round hits a block (a token is a character), where the
engine caches the kind at all."""


def _kinds() -> dict[str, str]:
    from omnicache_cli.engine.tiny_kinds import TINY_MODEL_KINDS

    return TINY_MODEL_KINDS


def tiny_model(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=" ".join(f"{kind}: {purpose}" for kind, purpose in _kinds().items()),
            autocompletion=lambda: list(_kinds().items()),
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The folder to write, made if need be.")
    ] = None,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write a tiny model with random weights that vLLM really loads.

    About a megabyte (wide: 30, omni: 59), the same bytes every time: good for trying omnicache
    without a GPU or a download, and for the tests of your own project. Nearly all its time goes
    into importing torch and transformers. Without arguments the kinds are listed.

    Example: omnicache tiny-model text tiny
    """
    if kind is None or directory is None:
        if kind is not None:
            raise UsageError(
                f"no folder named for a model of kind {kind}; "
                f"type one, such as: omnicache tiny-model {kind} tiny-{kind}"
            )
        report = Report(
            "tiny-model",
            "Kinds of tiny model",
            {"kinds": _kinds()},
            (Facts("", _kinds()),),
        )
        check_output(output, force=force)
        deliver(render(report, format, output), output, quiet=quiet)
        return
    if kind not in _kinds():
        raise UsageError(f"no kind of tiny model is called {kind}; choose: {', '.join(_kinds())}")
    from omnicache_cli.engine.tiny_models import build_tiny_model

    check_output(output, force=force)
    format_for(format, output)  # a name that it refuses is refused before the work
    build_tiny_model(kind, directory, force=force)
    facts = {"kind": kind, "directory": str(directory)}
    report = Report("tiny-model", "Tiny model", facts, (Facts("", facts),))
    deliver(render(report, format, output), output, quiet=quiet)
    if not quiet:
        note(f"next: omnicache trace {quoted(str(directory))} {FIRST_TRACE.get(kind, '--help')}")
