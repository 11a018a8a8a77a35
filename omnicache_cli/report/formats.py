"""The formats a Report can be written in. A new one is a name in Format and a line in FORMATS."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from omnicache_cli.report.json import as_json
from omnicache_cli.report.model import Report
from omnicache_cli.report.text import as_text

Format = Literal["text", "json"]

FORMATS: dict[Format, Callable[[Report], str]] = {
    "text": as_text,
    "json": as_json,
}


def format_for(requested: Format | None, output: Path | None) -> Format:
    """The format asked for, else the one the file name suggests, else text."""
    if requested is not None:
        return requested
    suffix = output.suffix.lstrip(".").lower() if output else ""
    return next((name for name in get_args(Format) if name == suffix), "text")


def render(report: Report, requested: Format | None, output: Path | None) -> str:
    """The report, written in the format that `format_for` picks."""
    return FORMATS[format_for(requested, output)](report)
