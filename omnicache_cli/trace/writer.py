"""Writes one rank file. Whole lines or nothing, and never an exception to the caller.

A record is one `write` call on an append-only file, so a killed process keeps every record that
was written. What cannot be written is counted; the next record that can be is preceded by a
`Gap`, and `generation` has moved on so that sources know to restate their state in full.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from omnicache_cli.trace.files import SUFFIX
from omnicache_cli.trace.records import AnyRecord, End, Gap, Header

FILE_MODE = 0o600

CHECK_EVERY = 16
"""Records between two looks whether the file still has a name."""


class RankFileWriter:
    """Owns one open rank file of this process."""

    def __init__(self, folder: Path, header: Header) -> None:
        """Create the file and write its header. OSError: it cannot be created or written."""
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._held: list[AnyRecord] = []
        self._lock = threading.Lock()
        self._size = 0
        self._gap = 0
        self.generation = 0  # moves on whenever a record is lost
        self.num_records = 0
        self.num_dropped = 0
        self.path, self._fd = _create(folder, f"{header.host}.{header.pid}")
        try:
            self._append(header)
        except OSError:
            self._close_and_remove()
            raise

    def hold(self, record: AnyRecord) -> None:
        """Keep one record until the next `write` or `flush`, which then is one call for both."""
        with self._lock:
            if self._fd < 0:
                return
            self._held.append(record)

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            self._write_all(())

    def write(self, record: AnyRecord) -> None:
        """Append one record, and before it those that are held, or count them as dropped."""
        self._write_all((record,))

    def _write_all(self, records: Sequence[AnyRecord]) -> None:
        with self._lock:
            if self._fd < 0:
                return
            records = (*self._held, *records)
            self._held.clear()
            try:
                if self.num_records % CHECK_EVERY == 0 and os.fstat(self._fd).st_nlink == 0:
                    self.num_dropped += self.num_records  # all that was written is gone with it
                    self.num_records = 0
                    raise FileNotFoundError("the rank file was removed")
                if self._gap:
                    self._append(Gap(self._gap))
                    self._gap = 0
                self._append(*records)
                self.num_records += len(records)
            except Exception:  # no room, or a value that JSON cannot hold
                self._gap += len(records)
                self.num_dropped += len(records)
                self.generation += 1

    def close(self, end: End) -> None:
        """Append the last record and close. Harmless when called again."""
        self.write(end)
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def forget(self) -> None:
        """In a forked child: let go of the parent's file without touching it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, *records: AnyRecord) -> None:
        end = 0
        for record in records:
            self._encoder.encode_into(record, self._buffer, end)
            self._buffer += b"\n"
            end = len(self._buffer)
        written = os.write(self._fd, self._buffer)
        if written != len(self._buffer):  # a full disk takes half a line: take it back
            os.ftruncate(self._fd, self._size)
            raise OSError(f"only {written} of {len(self._buffer)} bytes written")
        self._size += written

    def _close_and_remove(self) -> None:
        os.close(self._fd)
        self._fd = -1
        self.path.unlink(missing_ok=True)


def _create(folder: Path, stem: str) -> tuple[Path, int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    number = 0
    while True:
        path = folder / (f"{stem}.{number}{SUFFIX}" if number else f"{stem}{SUFFIX}")
        try:
            return path, os.open(path, flags, FILE_MODE)
        except FileExistsError:  # the same process number, used again
            number += 1
