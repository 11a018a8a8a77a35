"""From what the py-spys recorded to the files of a profile, and its manifest."""

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnicache_cli import __version__
from omnicache_cli.errors import EngineFailedError, OmnicacheError
from omnicache_cli.profile.flamegraph import as_flamegraph
from omnicache_cli.profile.formats import as_chrome_trace, as_raw, as_speedscope
from omnicache_cli.profile.manifest import (
    PROFILE_SCHEMA_VERSION,
    FileKind,
    ProfileManifest,
    SampledProcess,
    write_profile_manifest,
)
from omnicache_cli.profile.recording import StackRecording, Timeline, read_samples
from omnicache_cli.profile.sampling import Sampling
from omnicache_cli.profile.watch import Sampled
from omnicache_cli.report.output import deliver

CLOCK_TICK_NS = 10_000_000
"""A file's time is that of the kernel's last tick, at most this much ago."""

SUFFIXES: dict[FileKind, str] = {
    "flamegraph": ".flamegraph.svg",
    "speedscope": ".speedscope.json",
    "raw": ".raw.txt",
    "chrometrace": ".chrometrace.json",
}


@dataclass(frozen=True, slots=True)
class ProcessProfile:
    """One process with samples."""

    process: SampledProcess
    recording: StackRecording


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile found, and what it could not find."""

    manifest: ProfileManifest
    processes: list[ProcessProfile]
    failures: list[str]  # of processes without a recording


def write_profile(
    folder: Path, found: Sequence[Sampled], sampling: Sampling, py_spy_version: str
) -> Profile:
    """Read the recordings, write the files and profile.json.

    EngineFailedError: there is no sample in any. RefusedOutputError: a file cannot be written.
    """
    failures = [one.recorder.failure for one in found]
    profiles = []
    for one in found:
        counts = one.recorder.counts
        if counts is not None and counts[0]:
            profiles.append(_process_profile(one, counts))
    profiles = [one for one in profiles if one.recording.total]
    if not profiles:
        raise _empty(found, [one for one in failures if one is not None], sampling)
    manifest = ProfileManifest(
        schema_version=PROFILE_SCHEMA_VERSION,
        tool_version=__version__,
        py_spy_version=py_spy_version,
        rate_hz=sampling.rate_hz,
        native=any(one.recorder.sampling.native for one in found),  # it may have failed
        idle=sampling.has_waiting_threads,
        gil=sampling.gil,
        processes=[one.process for one in profiles],
    )
    try:
        for profile in profiles:
            for kind, name in profile.process.files.items():
                deliver(WRITERS[kind](profile), folder / name, quiet=True)
        write_profile_manifest(folder, manifest)
    except BaseException:  # without profile.json nobody would know whose files they are
        for profile in profiles:
            for name in profile.process.files.values():
                with contextlib.suppress(OSError):
                    os.unlink(folder / name)
        raise
    return Profile(manifest, profiles, [str(one) for one in failures if one is not None])


def _title(one: ProcessProfile) -> str:
    return f"{one.process.role}, process {one.process.pid}"


WRITERS: dict[FileKind, Callable[[ProcessProfile], str]] = {
    "flamegraph": lambda one: as_flamegraph(one.recording, _title(one)),
    "speedscope": lambda one: as_speedscope(one.recording, _title(one)),
    "raw": lambda one: as_raw(one.recording),
    "chrometrace": lambda one: as_chrome_trace(one.recording, one.process.pid, _title(one)),
}


def _process_profile(one: Sampled, counts: tuple[int, int]) -> ProcessProfile:
    recorder = one.recorder
    start = recorder.spawned_ns
    latest = recorder.sampling_ns or recorder.ended_ns or start
    if recorder.sampling.timeline:
        timeline = Timeline(recorder.path)  # it ends at the moment in which it was written
        length = timeline.end_us * 1000
        written = recorder.path.stat().st_mtime_ns + CLOCK_TICK_NS
        start = max(start, (recorder.told_to_end_ns or 0) - length)
        latest = max(start, min(latest, written - length))
    middle = (start + latest) // 2
    ended = recorder.told_to_end_ns or recorder.ended_ns or middle
    if recorder.sampling.timeline:
        seen = {tid: max(0, (at - middle) // 1000) for tid, at in one.alive_until_ns.items()}
        recording = timeline.replay(seen)
    else:
        recording = read_samples(recorder.path)
    kinds = [kind for kind in SUFFIXES if recorder.sampling.timeline or kind != "chrometrace"]
    host = socket.gethostname()
    process = SampledProcess(
        pid=one.pid,
        host=host,
        role=one.role,
        command=one.command,
        samples=counts[0],
        started_unix_ns=middle,
        start_uncertainty_ns=(latest - start + 1) // 2,
        duration_ns=max(0, ended - middle),
        files={kind: f"{host}.{one.pid}{SUFFIXES[kind]}" for kind in kinds},
        errors=counts[1],
    )
    return ProcessProfile(process, recording)


def _empty(
    found: Sequence[Sampled], failures: Sequence[OmnicacheError], sampling: Sampling
) -> OmnicacheError:
    """Why there is no sample in any recording."""
    if not found:
        return EngineFailedError(
            "no process of the wanted roles was found, so nothing was sampled; name others with "
            "--role, or --role all"
        )
    if failures:
        return type(failures[0])(f"no sample was taken: {failures[0]}")
    if all(one.recorder.told_to_end_ns is None for one in found):
        return EngineFailedError(
            "no sample was taken: the process ended as soon as py-spy looked at it; give the "
            "engine more to do"
        )
    if not sampling.has_waiting_threads:
        return EngineFailedError(
            "no sample was taken: every thread was waiting whenever py-spy looked; send the engine "
            "requests, sample for longer, or add --idle"
        )
    return EngineFailedError("no sample was taken; sample for longer, or raise --rate")
