"""Options that more than one command has, declared once."""

from pathlib import Path
from typing import Annotated

import typer

from omnicache_cli.report.formats import Format

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write here instead of stdout."),
]
OutputFormat = Annotated[
    Format | None, typer.Option("--format", "-f", help="Default: from the file name, else text.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress and no hints; errors still show.")
]

# Engine arguments by vLLM's names; without one vLLM's own default counts.
EngineText = Annotated[str | None, typer.Option()]
EngineInteger = Annotated[int | None, typer.Option()]
EngineFraction = Annotated[float | None, typer.Option()]
EnforceEager = Annotated[bool | None, typer.Option("--enforce-eager/--no-enforce-eager")]
TrustRemoteCode = Annotated[
    bool | None, typer.Option("--trust-remote-code", help="Run code that the model brings.")
]
EngineArgument = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="KEY=VALUE", help="Any other engine argument; repeatable."),
]
