"""Opens a workload: a file or stdin, plain or compressed, as lines that are read once."""

import contextlib
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from omnicache_cli import advice
from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.trace.lines import bounded_lines

STDIN = "-"

_CHUNK = 1 << 12
"""Bytes unpacked at a time: zstd makes at most 128 MiB of them."""

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
            yield bounded_lines(_plain(raw), name)
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
            f"{advice.install_extra('simulate')}, or pipe it: zstd -dc FILE | omnicache simulate -"
        ) from error
    return io.BufferedReader(_Frames(stream, zstandard.ZstdDecompressor()))


class _Frames(io.RawIOBase):
    """zstd frames, one after the other; zstandard's own reader takes a cut one for a whole one."""

    def __init__(self, stream: IO[bytes], decompressor: Any) -> None:
        self._stream, self._decompressor = stream, decompressor
        self._frame = decompressor.decompressobj()
        self._rest = b""  # of the input, behind the end of a frame
        self._plain = b""
        self._at_start = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """EOFError: the last frame is cut."""
        while not self._plain:
            packed = self._rest or self._stream.read(_CHUNK)
            if not packed:
                if self._at_start:
                    return 0
                raise EOFError("it ends in the middle of a zstd frame")
            self._plain = self._frame.decompress(packed)
            self._rest, self._at_start = b"", False
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
                self._at_start = True
        size = min(len(buffer), len(self._plain))
        buffer[:size] = self._plain[:size]
        self._plain = self._plain[size:]
        return size
