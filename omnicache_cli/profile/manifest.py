"""`profile.json`: which processes were sampled, how, and which files py-spy left. No arguments of a
command, no prompt text.

Instants are of the wall clock, as `Header.started_unix_ns` of a trace is, so that samples and steps
of one machine stand on one axis.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.folder import PROFILE_NAME, write_whole

PROFILE_SCHEMA_VERSION = 1

FileKind = Literal["flamegraph", "speedscope", "raw", "chrometrace"]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class SampledProcess(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process of the engine, and what py-spy saw of it."""

    pid: Count
    host: str
    role: str  # engine core, worker, ...: profile/roles.py
    command: str  # name of the process or of its program; never its arguments
    samples: Count  # stacks in the files: several threads give several at one instant
    started_unix_ns: Nanoseconds  # instant of ts = 0 in the Chrome trace
    start_uncertainty_ns: Nanoseconds  # it is not further from the true one than this
    duration_ns: Nanoseconds  # from that instant until py-spy was told to end, or the process ended
    files: dict[FileKind, str]  # names in the folder of profile.json
    errors: Count = 0  # instants at which py-spy could not read the process


class ProfileManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Written once, when the last py-spy has ended."""

    schema_version: int
    tool_version: str
    py_spy_version: str
    rate_hz: Count
    native: bool
    idle: bool  # threads that wait are sampled too
    gil: bool  # only threads that hold the GIL are sampled
    processes: list[SampledProcess]


def write_profile_manifest(folder: Path, manifest: ProfileManifest) -> None:
    """Replace profile.json as a whole. RefusedOutputError: it cannot be written."""
    write_whole(folder, PROFILE_NAME, manifest)


def read_profile_manifest(folder: Path) -> ProfileManifest | None:
    """The manifest beside a run; None where nothing was sampled. BadTraceError: it is damaged."""
    path = folder / PROFILE_NAME
    if path.exists() and not path.is_file():
        raise BadTraceError(f"{path} is no regular file; remove it")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=ProfileManifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadTraceError(
            f"cannot read {path}: {error}; remove {path.name} to read the run without its samples"
        ) from error
    if manifest.schema_version != PROFILE_SCHEMA_VERSION:
        raise BadTraceError(
            f"{path} has profile schema {manifest.schema_version}, this omnicache reads "
            f"{PROFILE_SCHEMA_VERSION}; use the omnicache that recorded it"
        )
    return manifest
