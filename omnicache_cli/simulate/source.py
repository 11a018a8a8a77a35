"""Opens a workload: a file or stdin, plain or compressed, as lines that are read once."""

import contextlib
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from omnicache_cli.errors import BadInputError, UsageError

STDIN = "-"
MAX_LINE_BYTES = 1 << 28
"""A longer line is no JSON line: a file of another kind must not fill the memory."""

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def open_lines(name: str) -> Iterator[Iterator[bytes]]:
    """Lines of a file, or of stdin where the name is "-"; compressed ones by their first bytes.

    BadInputError: it cannot be read. UsageError: zstandard is needed and not installed.
    """
    with contextlib.ExitStack() as stack:
        try:
            raw: IO[bytes] = (
                sys.stdin.buffer if name == STDIN else stack.enter_context(Path(name).open("rb"))
            )
            yield _lines(name, _plain(raw))
        except _damage() as error:
            raise BadInputError(f"{name} is damaged: {error}; compress it again") from error
        except OSError as error:
            raise BadInputError(
                f"cannot read {name}: {error.strerror or error}; name a file, a run, or -"
            ) from error


def _damage() -> tuple[type[Exception], ...]:
    """What the decompressors raise at bytes that are not theirs."""
    found = (zlib.error, gzip.BadGzipFile, EOFError)
    with contextlib.suppress(ImportError):
        import zstandard

        return (*found, zstandard.ZstdError)
    return found


def _lines(name: str, stream: IO[bytes]) -> Iterator[bytes]:
    while line := stream.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise BadInputError(
                f"{name} has a line of more than {MAX_LINE_BYTES:,} bytes; name JSON lines"
            )
        yield line


def _plain(raw: IO[bytes]) -> IO[bytes]:
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)  # type: ignore[type-var]
    head = stream.peek(4)[:4]
    if head.startswith(GZIP):
        return cast(IO[bytes], gzip.open(stream, "rb"))
    if head.startswith(ZSTD):
        return _zstd(stream)
    return stream


def _zstd(stream: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise UsageError(
            "the workload is compressed with zstd, which this Python cannot read; "
            "pip install zstandard, or pipe it: zstd -dc FILE | omnicache simulate -"
        ) from error
    reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    return io.BufferedReader(reader)
