"""One rank file: JSON lines in, records out. Owns what a damaged line means.

Does not know how the files of a run belong together (see `run`).
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.records import SCHEMA_VERSION, AnyRecord, Header

SUFFIX = ".trace.jsonl"

_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


class _Version(msgspec.Struct):
    """The one field that is read before the rest of a header is believed."""

    schema_version: int | None = None
    type: str | None = None


def rank_files(folder: Path) -> list[Path]:
    """The rank files of a run folder, by name."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def is_traced(folder: Path) -> bool:
    """Some process has written into this run folder."""
    return bool(rank_files(folder))


def read_records(path: Path) -> Iterator[AnyRecord]:
    """Yield the records of one rank file, the header first.

    A last line without its newline is what a killed process leaves: it is dropped silently, the
    missing `End` record tells the reader. Any other line that does not decode is a BadTraceError
    naming file and line.
    """
    try:
        if not path.is_file():
            raise BadTraceError(f"{path} is no regular file; name a run folder of omnicache trace")
        with path.open("rb") as stream:
            yield from _decode_lines(path, stream)
    except OSError as error:
        raise BadTraceError(
            f"cannot read {path}: {error.strerror or error}; name a run folder of `omnicache trace`"
        ) from error


def read_header(path: Path) -> Header:
    """The header alone. BadTraceError: the file is no trace, or of another schema."""
    header = next(read_records(path))
    assert isinstance(header, Header)
    return header


def _decode_lines(path: Path, stream: Iterator[bytes]) -> Iterator[AnyRecord]:
    first = next(stream, b"")
    if not first.endswith(b"\n"):
        raise BadTraceError(
            f"{path} has no complete header line; the process that wrote it was stopped at its "
            "start, record the trace again"
        )
    yield _header(path, first)
    decode = _decoder.decode
    for number, line in enumerate(stream, start=2):
        try:
            record = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not line.endswith(b"\n"):
                return
            raise BadTraceError(
                f"{path}:{number}: not a trace record ({error}); the file is damaged, record the "
                "trace again"
            ) from error
        if not line.endswith(b"\n"):
            return
        if isinstance(record, Header):
            raise BadTraceError(f"{path}:{number}: a second header; two traces in one file?")
        yield record


def _header(path: Path, line: bytes) -> Header:
    try:
        version = msgspec.json.decode(line, type=_Version)
        if version.type == "header" and version.schema_version not in (None, SCHEMA_VERSION):
            raise BadTraceError(
                f"{path} has trace schema {version.schema_version}, this omnicache reads "
                f"{SCHEMA_VERSION}; use the omnicache that recorded it, or record the trace again"
            )
        return msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadTraceError(
            f"{path}:1: not an omnicache trace ({error}); name a run folder of `omnicache trace`"
        ) from error
