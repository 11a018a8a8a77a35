"""`run.json`: what `omnicache trace` was asked to do. Options and counts, never prompt text."""

from pathlib import Path
from typing import Any

import msgspec

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.records import SCHEMA_VERSION

MANIFEST_NAME = "run.json"
COMMAND_LAYOUT = "command"
"""Layout of a run whose engine somebody else's command started."""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Written when the run starts, replaced when it ends."""

    schema_version: int
    tool_version: str
    vllm_version: str | None
    created_unix_ns: int
    layout: str  # in-process, engine-process or command
    model: str | None = None  # None, as all that follows, where a command ran the engine
    num_prompts: int | None = None  # of one round
    num_rounds: int = 1
    concurrency: int | None = None
    max_tokens: int | None = None  # the option; a prompt may carry its own
    ignore_eos: bool = False
    engine_args: dict[str, Any] = {}
    program: str | None = None  # name of the command's program, without its arguments
    finished: bool = False
    error: str | None = None  # class of the error that ended the run
    exit_code: int | None = None  # of the command; negative: ended by that signal

    @property
    def shell_code(self) -> int | None:
        """The command's exit code as a shell tells it: 128 and the signal, where one ended it."""
        code = self.exit_code
        return code if code is None or code >= 0 else 128 - code


def request_name(prompt: int, round_number: int, num_rounds: int) -> str:
    """External request id of one prompt in one round, both from 0: p3, or p3-r1 (rounds from 1)."""
    return f"p{prompt}" if num_rounds == 1 else f"p{prompt}-r{round_number + 1}"


def parse_request_name(name: str, num_rounds: int) -> tuple[int, int] | None:
    """(prompt, round), both from 0; None when `omnicache trace` did not give this id."""
    head, _, tail = name.partition("-r")
    if not head.startswith("p") or not head[1:].isdecimal():
        return None
    if not tail:
        return (int(head[1:]), 0) if num_rounds == 1 else None
    return (int(head[1:]), int(tail) - 1) if tail.isdecimal() else None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a run folder; None where another launcher made the run."""
    path = folder / MANIFEST_NAME
    if path.exists() and not path.is_file():
        raise BadTraceError(f"{path} is no regular file; remove it")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadTraceError(
            f"cannot read {path}: {error}; remove {path.name} to read the run without its rounds"
        ) from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise BadTraceError(
            f"{path} has trace schema {manifest.schema_version}, this omnicache reads "
            f"{SCHEMA_VERSION}; use the omnicache that recorded it"
        )
    return manifest
