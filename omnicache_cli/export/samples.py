"""py-spy's samples of a run, as slices on the run's clock.

Their file is a JSON array of `B` and `E` events, and of `M` events that name threads, perhaps on
one line. It is read a piece at a time. What does not nest (a file that was cut, an end without a
beginning) is mended, and said.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from omnicache_cli.export.event import NS_PER_US, TraceEvent, microseconds
from omnicache_cli.export.tracks import Tracks
from omnicache_cli.profile.manifest import ProfileManifest, SampledProcess

CATEGORY = "py-spy"
PIECE_BYTES = 1 << 18
BETWEEN = " \t\r\n,"
MAX_EVENT_CHARS = 1 << 22
"""Longest single event that is waited for: a damaged file must not fill the memory."""


class _Sample(msgspec.Struct, frozen=True):
    """An event of that file; `ts` in microseconds since the sampling began."""

    ph: str
    tid: int
    name: str
    ts: float = 0  # `M` has none
    args: dict[str, Any] | None = None

    @property
    def thread_name(self) -> str | None:
        """What it calls its thread, if that is what it says."""
        if self.ph != "M" or self.name != "thread_name" or self.args is None:
            return None
        return str(self.args.get("name", "")) or None


class Samples:
    """The sampled processes of one run. `remarks` is complete once `events` has ended."""

    def __init__(self, folder: Path, manifest: ProfileManifest) -> None:
        self.manifest = manifest
        self.remarks: list[str] = []
        self._folder = folder

    @property
    def first_unix_ns(self) -> int | None:
        return min((one.started_unix_ns for one in self.manifest.processes), default=None)

    def events(self, tracks: Tracks, origin_unix_ns: int) -> Iterator[TraceEvent]:
        """The slices of all sampled processes, those of each thread in order."""
        for process in self.manifest.processes:
            name = process.files.get("chrometrace")
            if name is None:
                self.remarks.append(
                    f"pid {process.pid} was sampled without its times; omnicache profile --timeline"
                    " records them"
                )
                continue
            ended_ns = process.started_unix_ns + process.duration_ns
            pid = tracks.sampled_process(process.host, process.pid, process.role, ended_ns)
            start_ns = process.started_unix_ns - origin_unix_ns
            yield from self._of_process(
                self._folder / Path(name).name, process, pid, start_ns, tracks
            )

    def _of_process(
        self, path: Path, process: SampledProcess, pid: int, start_ns: int, tracks: Tracks
    ) -> Iterator[TraceEvent]:
        open_frames: dict[int, list[TraceEvent]] = {}
        threads: dict[int, str] = {}
        num_dropped = 0
        last_ns = start_ns
        try:
            with path.open("rb") as stream:
                for item in array_items(stream):
                    sample = msgspec.convert(item, _Sample)
                    if sample.thread_name is not None:
                        threads[sample.tid] = sample.thread_name
                    if sample.ph not in ("B", "E"):
                        continue
                    at_ns = start_ns + round(sample.ts * NS_PER_US)
                    last_ns = max(last_ns, at_ns)
                    thread = f"py-spy: {threads.get(sample.tid, f'thread {sample.tid}')}"
                    tid = tracks.thread(pid, (CATEGORY, process.pid, sample.tid), thread)
                    event = TraceEvent(
                        *("B" if sample.ph == "B" else "E", pid, tid, microseconds(at_ns)),
                        cat=CATEGORY,
                        name=sample.name,
                        args=sample.args,
                    )
                    frames = open_frames.setdefault(tid, [])
                    if sample.ph == "B":
                        frames.append(event)
                    elif frames and frames[-1].name == sample.name:
                        frames.pop()
                    else:
                        num_dropped += 1
                        continue
                    yield from tracks.take_metadata()
                    yield event
        except (OSError, ValueError, msgspec.ValidationError, OverflowError) as error:
            self.remarks.append(f"{path.name}: read up to a damaged place ({_words(error)})")
        end = microseconds(last_ns)
        for frame in [frame for frames in open_frames.values() for frame in reversed(frames)]:
            num_dropped += 1
            yield msgspec.structs.replace(frame, ph="E", ts=end)
        if num_dropped:
            self.remarks.append(f"{path.name}: {num_dropped} frames had no beginning or no end")


def array_items(stream: BinaryIO) -> Iterator[Any]:
    """The objects of a JSON array, one by one. ValueError: it is none, or it is cut."""
    decode = json.JSONDecoder().raw_decode
    to_text = codecs.getincrementaldecoder("utf-8")().decode
    text, place = "", 0
    is_begun = is_over = False
    while True:
        while place < len(text) and text[place] in BETWEEN:
            place += 1
        if place < len(text):
            if not is_begun and text[place] != "[":
                raise ValueError("no JSON array")
            if not is_begun:
                is_begun, place = True, place + 1
                continue
            if text[place] == "]":
                return
            try:
                item, place = decode(text, place)
            except json.JSONDecodeError as error:
                if is_over or len(text) - place > MAX_EVENT_CHARS:
                    raise ValueError("cut inside an event") from error
            else:
                yield item
                continue
        if is_over:
            raise ValueError("cut: the array has no end")
        piece = stream.read(PIECE_BYTES)
        is_over = not piece
        text, place = text[place:] + to_text(piece, is_over), 0


def _words(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
