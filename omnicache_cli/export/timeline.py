"""A run as the events of one timeline, made while the run is read.

Every track is in order by itself; the tracks follow each other step by step. Memory is bounded as
that of the reader is: by the live requests and by how far the files run apart.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from omnicache_cli.export.clock import join_clocks
from omnicache_cli.export.engine_track import EngineTrack
from omnicache_cli.export.event import TraceEvent, microseconds
from omnicache_cli.export.samples import Samples
from omnicache_cli.export.tracks import Tracks
from omnicache_cli.trace.records import EngineSource
from omnicache_cli.trace.run import RankFile, Run, missing_parts, without_scheduler

FORMAT = "omnicache timeline"
FORMAT_VERSION = 1


def without_folder(run: Run, remarks: list[str]) -> list[str]:
    """Remarks for a file that is passed on: where the run lay is nobody's business."""
    return [one.removeprefix(f"{run.folder}: ") for one in remarks]


class Timeline:
    """Reads a run once. `other_data` is complete once `events` has ended."""

    def __init__(self, run: Run, samples: Samples | None) -> None:
        self._run, self._samples = run, samples
        self._clocks = join_clocks({file.path.name: file.header for file in run.files})
        starts = [clock.zero_unix_ns for clock in self._clocks.values()]
        if samples is not None and samples.first_unix_ns is not None:
            starts.append(samples.first_unix_ns)
        self.origin_unix_ns = min(starts)
        self.tracks = Tracks(run.files)
        self.num_steps = 0
        self._engines: dict[str, EngineTrack] = {}
        self._with_engine: set[Path] = set()  # files whose process has one already
        self._ids = count(1)

    def events(self) -> Iterator[TraceEvent]:
        """BadTraceError: the run is damaged, or has neither a scheduler's records nor samples."""
        yield from self.tracks.take_metadata()
        for step in self._run.steps():
            self.num_steps += 1
            engine = self._engine(step.engine)
            for event in engine.of_step(step):
                yield from self.tracks.take_metadata()
                yield event
        if not self._run.engines and self._samples is None:
            raise without_scheduler(self._run)
        for name, source in self._run.engines.items():
            engine = self._engine(source)
            for event in engine.rest(self._run.never_scheduled_on.get(name, [])):
                yield from self.tracks.take_metadata()
                yield event
        if self._samples is not None:
            yield from self._samples.events(self.tracks, self.origin_unix_ns)
        yield from self.tracks.take_metadata()

    def other_data(self) -> dict[str, Any]:
        """What a reader must know of the file as a whole, for `otherData`."""
        run = self._run
        files = [
            {
                "file": file.path.name,
                "host": file.header.host,
                "pid": file.header.pid,
                "track_pid": self.tracks.process_of(file),
                "joined_by": self._clocks[file.path.name].joined_by,
                "starts_at_us": microseconds(
                    self._clocks[file.path.name].zero_unix_ns - self.origin_unix_ns
                ),
            }
            for file in run.files
        ]
        data: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "tool_version": run.files[0].header.tool_version,
            "vllm_version": run.vllm_version,
            "num_steps": self.num_steps,
            "origin_unix_ns": str(self.origin_unix_ns),  # more digits than a double has
            "clock": "ts counts from origin_unix_ns. Files of one host are joined by its monotonic "
            "clock, hosts by their wall clocks, and as well as these agree.",
            "files": files,
        }
        if self._samples is not None:
            manifest = self._samples.manifest
            data["samples"] = {
                "py_spy_version": manifest.py_spy_version,
                "rate_hz": manifest.rate_hz,
                "processes": [
                    {
                        "pid": one.pid,
                        "role": one.role,
                        "samples": one.samples,
                        "start_uncertainty_us": microseconds(one.start_uncertainty_ns),
                    }
                    for one in manifest.processes
                ],
            }
        data["incomplete"] = without_folder(run, self.remarks())
        return data

    def remarks(self) -> list[str]:
        """What the timeline lacks, a line each; once `events` has ended."""
        run = self._run
        lines = missing_parts(run)
        if not self.num_steps:
            lines.append(f"{run.folder}: no step was recorded")
        if run.unjoined_forwards:
            lines.append(f"{run.folder}: {run.unjoined_forwards:,} forward passes have no step")
        return lines + (self._samples.remarks if self._samples is not None else [])

    def _engine(self, source: EngineSource) -> EngineTrack:
        engine = self._engines.get(source.engine)
        if engine is None:
            file = self._run.file_of(source)
            counter_id = source.engine if file.path in self._with_engine else None
            self._with_engine.add(file.path)
            engine = EngineTrack(
                self._run, self.tracks, self._origin_of, source, self._ids, counter_id
            )
            self._engines[source.engine] = engine
        return engine

    def _origin_of(self, file: RankFile) -> int:
        return self.origin_unix_ns - self._clocks[file.path.name].zero_unix_ns
