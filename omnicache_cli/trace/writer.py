"""Writes one rank file. Whole lines or nothing, and never an exception to the caller.

Records go out in `write` calls on an append-only file, so a killed process keeps every record that
was written. A record that is not whole yet is held, and what comes after it too, until it is
settled: order is kept, and no line is ever written twice. What cannot be written is counted; the
next record that can be is preceded by a `Gap`, and `generation` has moved on so that sources know
to restate their state in full.
"""

import os
import threading
from pathlib import Path

import msgspec

from omnicache_cli.trace.files import SUFFIX
from omnicache_cli.trace.records import AnyRecord, End, Gap, Header

FILE_MODE = 0o600

CHECK_EVERY = 16
"""Records between two looks whether the file still has a name."""

MAX_HELD = 256
"""Records that may wait behind one that is not whole; with more, all are written as they are."""


class RankFileWriter:
    """Owns one open rank file of this process."""

    def __init__(self, folder: Path, header: Header) -> None:
        """Create the file and write its header. OSError: it cannot be created or written."""
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._held: list[AnyRecord] = []
        self._open: list[AnyRecord] = []  # those of the held that are not whole, in their order
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
        """Keep a record that is not whole yet, until it is settled and `write` or `flush` comes."""
        with self._lock:
            if self._fd >= 0:
                self._held.append(record)
                self._open.append(record)

    def settle(self, record: AnyRecord) -> None:
        """A held record is whole now; what was held before it becomes no more so."""
        with self._lock:
            for index, one in enumerate(self._open):
                if one is record:
                    del self._open[: index + 1]
                    return

    def flush(self) -> None:
        """Write what waits for nothing."""
        with self._lock:
            self._write_held()

    def write(self, record: AnyRecord) -> None:
        """Append one record, behind those that are held, or count it as dropped."""
        with self._lock:
            if self._fd >= 0:
                self._held.append(record)
                self._write_held()

    def _write_held(self) -> None:
        """Those before the first that is not whole, in one call."""
        if self._open and len(self._held) > MAX_HELD:
            self._open.clear()
        records = self._held
        if self._open:
            first = next(index for index, one in enumerate(records) if one is self._open[0])
            records, self._held = records[:first], records[first:]
        else:
            self._held = []
        if self._fd < 0 or not records:
            return
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
            lost = len(records) + len(self._held)  # what waits behind them builds upon them
            self._held = []
            self._open.clear()
            self._gap += lost
            self.num_dropped += lost
            self.generation += 1

    def close(self, end: End) -> None:
        """Append what is held and the last record, and close. Harmless when called again."""
        with self._lock:
            self._open.clear()
            self._held.append(end)
            self._write_held()
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
