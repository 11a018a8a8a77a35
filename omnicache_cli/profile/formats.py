"""A recording in the formats of other tools, each made from the same stacks."""

import json
from collections import Counter

from omnicache_cli import __version__
from omnicache_cli.profile.hottest import short_file
from omnicache_cli.profile.recording import Frame, StackRecording

SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def as_raw(recording: StackRecording) -> str:
    """One line per stack, as `py-spy record --format raw` writes it: frames from the outermost,
    between semicolons, then the weight. The first frame is the thread."""
    lines: Counter[str] = Counter()
    shown = [
        _one_word(f"{one.name} ({short_file(one.file)}:{one.line})") for one in recording.frames
    ]
    for thread in recording.threads:
        for stack, weight in thread.stacks:
            if stack:
                frames = [_one_word(thread.name), *(shown[one] for one in stack)]
                lines[";".join(frames)] += weight
    return "".join(f"{line} {weight}\n" for line, weight in lines.items())


def _one_word(frame: str) -> str:
    """A frame must not end the frame or the line."""
    return "".join(char if char.isprintable() and char != ";" else "?" for char in frame)


def as_speedscope(recording: StackRecording, name: str) -> str:
    """https://www.speedscope.app: a profile per thread."""
    profiles = []
    for thread in recording.threads:
        weights = [weight for _, weight in thread.stacks]
        profiles.append(
            {
                "type": "sampled",
                "name": thread.name if thread.os_id is None else f"{thread.name} {thread.os_id}",
                "unit": "microseconds" if recording.unit == "microseconds" else "none",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [stack for stack, _ in thread.stacks],
                "weights": weights,
            }
        )
    frames = [_speedscope_frame(frame) for frame in recording.frames]
    return json.dumps(
        {
            "$schema": SPEEDSCOPE_SCHEMA,
            "name": name,
            "exporter": f"omnicache@{__version__}",
            "activeProfileIndex": 0,
            "shared": {"frames": frames},
            "profiles": profiles,
        }
    )


def _speedscope_frame(frame: Frame) -> dict[str, str | int]:
    return {"name": frame.name, "file": frame.file, "line": frame.line}


def as_chrome_trace(recording: StackRecording, pid: int, name: str) -> str:
    """py-spy's events, one a line, with names for the process and its threads.

    ts = 0 is `started_unix_ns` of profile.json.
    """
    process = {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
    lines = ",\n".join(map(json.dumps, [process, *recording.events]))
    return f"[\n{lines}\n]\n"
