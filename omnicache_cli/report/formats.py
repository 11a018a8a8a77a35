"""The formats a Report can be written in. A new one is a name in Format and a line in FORMATS."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from omnicache_cli.errors import UsageError
from omnicache_cli.report.html import as_html
from omnicache_cli.report.json import as_json
from omnicache_cli.report.model import Report
from omnicache_cli.report.text import as_text, width_here

Format = Literal["text", "json", "html"]

FORMATS: dict[Format, Callable[[Report], str]] = {
    "text": as_text,
    "json": as_json,
    "html": as_html,
}

OTHER_FORMATS = {".csv", ".pdf", ".htm", ".parquet", ".md", ".xml", ".yaml"}
"""Suffixes that promise a format which no report is written in."""


def format_for(requested: Format | None, output: Path | None) -> Format:
    """The format asked for, else the one the file name suggests, else text.

    UsageError: the file name promises a format that is not there.
    """
    if requested is not None:
        return requested
    suffix = output.suffix.lower() if output else ""
    names = get_args(Format)
    if suffix in OTHER_FORMATS:
        raise UsageError(
            f"{output} names a format that is not there; formats: {', '.join(names)}; "
            "choose one with --format, or name a .txt, .json or .html file"
        )
    return next((name for name in names if suffix == f".{name}"), "text")


def render(report: Report, requested: Format | None, output: Path | None) -> str:
    """The report, written in the format that `format_for` picks."""
    chosen = format_for(requested, output)
    if chosen == "text" and output is None:  # a file is as wide on every terminal
        return as_text(report, width_here())
    return FORMATS[chosen](report)
