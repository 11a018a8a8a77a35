"""A Report as one JSON object: the envelope every command shares, then the command's result."""

import json
import math
from collections.abc import Mapping
from typing import Any

from omnicache_cli import __version__
from omnicache_cli.report.model import Report

SCHEMA_VERSION = 1


def as_json(report: Report) -> str:
    """ASCII only, so that a terminal or an old locale can show it."""
    return json.dumps(_enveloped(report), indent=2, allow_nan=False) + "\n"


def as_json_line(report: Report) -> str:
    """The same object on one line, for a stream of them."""
    return json.dumps(_enveloped(report), separators=(",", ":"), allow_nan=False) + "\n"


def _enveloped(report: Report) -> dict[str, Any]:
    envelope = {
        "schema_version": SCHEMA_VERSION,
        "tool_version": __version__,
        "vllm_version": report.vllm_version,
        "command": report.command,
    }
    if taken := envelope.keys() & report.result.keys():
        raise ValueError(f"{report.command}: result uses names of the envelope: {sorted(taken)}")
    return {**envelope, **_plain(report.result)}


def _plain(value: Any) -> Any:
    """The same value in what JSON has. NaN and the infinities have no JSON form: null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"a JSON name must be a string, not {key!r}")
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value  # json.dumps refuses what it does not know
