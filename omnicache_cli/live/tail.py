"""What was appended to the files of a run folder since it was looked at last.

Owns the place in each file. Only whole lines count: a line that is being written, or that a full
disk took back, is read again the next time. Memory: one piece of one file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.files import rank_files
from omnicache_cli.trace.records import SCHEMA_VERSION, AnyRecord, Header

PIECE_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 26
"""A longer line is no record: the rest of its file is left alone."""

NOT_COUNTED = (b'{"type":"forward"', b'{"type":"rank"')
"""Lines of the workers, which are most of a run. The scheduler's side says all that is shown."""

_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


class FileTail:
    """One rank file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_damaged = 0  # lines that are no record
        self._place = 0  # behind the last whole line
        self._is_given_up = False

    def read(self) -> Iterator[AnyRecord]:
        """The records that were appended. A file that is gone has none."""
        if self._is_given_up:
            return
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._place)
                yield from self._read_from(stream)
        except OSError:  # removed, or not ours: the run goes on in the others
            return

    def _read_from(self, stream: BinaryIO) -> Iterator[AnyRecord]:
        rest = b""
        while piece := stream.read(PIECE_BYTES):
            lines = (rest + piece).split(b"\n")
            rest = lines.pop()
            for line in lines:
                self._place += len(line) + 1
                if line.startswith(NOT_COUNTED):
                    continue
                try:
                    record = _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    self.num_damaged += 1
                    continue
                if isinstance(record, Header):
                    self._check(record)
                yield record
            if len(rest) > MAX_LINE_BYTES:
                self.num_damaged += 1
                self._is_given_up = True
                return

    def _check(self, header: Header) -> None:
        if header.schema_version != SCHEMA_VERSION:
            raise BadTraceError(
                f"{self.path} has trace schema {header.schema_version}, this omnicache reads "
                f"{SCHEMA_VERSION}; use the omnicache that records it"
            )


class FolderTail:
    """All rank files of a folder, those that come later too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, FileTail] = {}

    @property
    def num_damaged(self) -> int:
        return sum(one.num_damaged for one in self.files.values())

    def read(self) -> Iterator[tuple[str, AnyRecord]]:
        """The appended records, each with the name of its file.

        BadTraceError: one is no regular file, or of another schema.
        """
        for path in rank_files(self._folder):
            file = self.files.get(path.name)
            if file is None:
                if path.exists() and not path.is_file():  # a pipe would be waited for
                    raise BadTraceError(
                        f"{path} is no regular file; name a run folder of omnicache trace"
                    )
                file = self.files[path.name] = FileTail(path)
            for record in file.read():
                yield path.name, record
