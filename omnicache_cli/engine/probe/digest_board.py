"""Where the ranks of one pipeline stage compare what they saw, without ever waiting.

The first tensor-parallel rank leaves the digest of each step in a small ring, a file of the run
folder; the others look there. It works between processes of one machine. Where it does not, the
digests still meet in the reader. Plain reads and writes: a mapped file whose disk is full would
kill the engine.
"""

import contextlib
import os
import struct
from pathlib import Path

from omnicache_cli.trace.digest import BOARD_MAGIC, BOARD_PREFIX

_ENTRY = struct.Struct("<q8s")  # step, digest
_NUM_ENTRIES = 256
_FIRST_ENTRY = len(BOARD_MAGIC)


def _board_path(folder: Path, engine: str, stage: int) -> Path:
    return folder / f"{BOARD_PREFIX}{engine}.{stage}"


def _offset(step: int) -> int:
    return _FIRST_ENTRY + step % _NUM_ENTRIES * _ENTRY.size


class DigestBoard:
    """The first rank's side. OSError: the file cannot be made; then there is no board."""

    def __init__(self, folder: Path, engine: str, stage: int) -> None:
        self._path = _board_path(folder, engine, stage)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        os.pwrite(self._fd, BOARD_MAGIC + _ENTRY.pack(-1, b"") * _NUM_ENTRIES, 0)

    def publish(self, step: int, digest: str) -> None:
        with contextlib.suppress(OSError):  # no room: the others keep to their digests
            os.pwrite(self._fd, _ENTRY.pack(step, bytes.fromhex(digest)), _offset(step))

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


class DigestReader:
    """A further rank's side. The file is looked for until it is there."""

    def __init__(self, folder: Path, engine: str, stage: int) -> None:
        self._path = _board_path(folder, engine, stage)
        self._fd = -1

    def digest_of(self, step: int) -> str | None:
        """The first rank's digest of a step; None: not there yet, not any more, or no board."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            entry = os.pread(self._fd, _ENTRY.size, _offset(step))
        except OSError:
            return None
        if len(entry) < _ENTRY.size:
            return None
        found, digest = _ENTRY.unpack(entry)
        return digest.hex() if found == step else None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
