"""What py-spy recorded of one process, read into stacks with weights.

Of samples a weight is one, and only their order is known. Of a timeline it is the time until the
thread was next seen with another stack; a thread that ended is not seen any more, so its last stack
counts up to the moment when the system still listed the thread.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from omnicache_cli.errors import EngineFailedError

Unit = Literal["samples", "microseconds"]
MAIN_THREAD = "MainThread"

_SPEEDSCOPE_THREAD = re.compile(r'^(?:.*)Thread \S+(?: "(.*)")?$', re.DOTALL)
_THREAD_FRAME = re.compile(r"^thread \((\w+)\)(?:: (.*))?$", re.DOTALL)


class Frame(msgspec.Struct, frozen=True):
    """A place in a program; `line` is the one that ran, not the function's first."""

    name: str
    file: str
    line: int


@dataclass(slots=True)
class ThreadStacks:
    """One thread's stacks in the order in which they were seen: frames from the outermost, and
    weights. An empty stack is time before the thread was seen."""

    name: str
    os_id: int | None = None
    stacks: list[tuple[tuple[int, ...], int]] = field(default_factory=list)


@dataclass(slots=True)
class StackRecording:
    """All threads of one process."""

    unit: Unit
    frames: list[Frame]
    threads: list[ThreadStacks]
    events: list[dict[str, Any]] = field(default_factory=list)  # of a timeline: Chrome trace

    @property
    def total(self) -> int:
        """Weight of all stacks."""
        return sum(weight for one in self.threads for stack, weight in one.stacks if stack)


# -- samples ----------------------------------------------------------------------------------


class _SpeedscopeFrame(msgspec.Struct):
    name: str
    file: str | None = None
    line: int | None = None


class _SpeedscopeProfile(msgspec.Struct):
    name: str
    samples: list[tuple[int, ...]]


class _SpeedscopeShared(msgspec.Struct):
    frames: list[_SpeedscopeFrame]


class _Speedscope(msgspec.Struct):
    profiles: list[_SpeedscopeProfile]
    shared: _SpeedscopeShared


def read_samples(path: Path) -> StackRecording:
    """py-spy's speedscope file. EngineFailedError: it is none."""
    file = _decode(path, _Speedscope)
    frames = [Frame(one.name, one.file or "", one.line or 0) for one in file.shared.frames]
    threads = []
    for profile in file.profiles:
        named = _SPEEDSCOPE_THREAD.match(profile.name)
        name = (named[1] if named else None) or profile.name
        threads.append(ThreadStacks(name, None, [(stack, 1) for stack in profile.samples]))
    return StackRecording("samples", frames, threads)


# -- timeline ---------------------------------------------------------------------------------


class _Args(msgspec.Struct):
    filename: str = ""
    line: int | None = None


class _Event(msgspec.Struct):
    name: str
    ph: str
    pid: int
    tid: int  # pthread's, which may be used again; not the system's
    ts: int  # microseconds
    args: _Args


class Timeline:
    """py-spy's Chrome trace, recorded with thread names."""

    def __init__(self, path: Path) -> None:
        """EngineFailedError: it is none."""
        self._by_thread: defaultdict[int, list[_Event]] = defaultdict(list)
        self.end_us = 0  # its last instant: when py-spy wrote it
        for event in _decode(path, list[_Event]):
            self.end_us = max(self.end_us, event.ts)
            if event.ph in "BE":
                self._by_thread[event.tid].append(event)

    def replay(self, last_seen_us: Mapping[int, int]) -> StackRecording:
        """Its stacks. The events of the recording are py-spy's own with the system's thread
        numbers, and a name for each thread.

        `last_seen_us`: of each thread, by the system's number, when it was still there.
        """
        recording = StackRecording("microseconds", [], [])
        index: dict[Frame, int] = {}
        for of_thread in self._by_thread.values():
            _replay(of_thread, recording, index, last_seen_us, self.end_us)
        recording.frames = list(index)
        return recording


def _replay(
    events: Sequence[_Event],
    recording: StackRecording,
    index: dict[Frame, int],
    last_seen_us: Mapping[int, int],
    end_us: int,
) -> None:
    """The events that one pthread number stands in: one thread, or several after one another."""
    thread: ThreadStacks | None = None
    stack: list[int] = []
    since = 0
    until = end_us
    for number, event in enumerate(events):
        root = _THREAD_FRAME.match(event.name) if not event.args.filename else None
        at = min(event.ts, until)
        if thread is not None and stack and at > since:
            thread.stacks.append((tuple(stack), at - since))
        since = max(since, at)
        if root is not None and event.ph == "B":
            os_id = int(root[1], 0)
            thread = ThreadStacks(root[2] or f"thread {os_id}", os_id, [((), event.ts)])
            recording.threads.append(thread)
            stack, since = [], event.ts
            until = _clip(events, number, os_id, end_us, last_seen_us)
            recording.events.append(_thread_name(event, thread))
        elif root is not None:
            thread, until = None, end_us
        elif thread is not None and thread.os_id is not None:
            if event.ph == "B":
                frame = Frame(event.name, event.args.filename, event.args.line or 0)
                stack.append(index.setdefault(frame, len(index)))
            else:
                stack.pop()
            recording.events.append(_slice_event(event, thread.os_id, at))


def _clip(
    events: Sequence[_Event], first: int, os_id: int, end: int, last_seen_us: Mapping[int, int]
) -> int:
    """Up to when a thread's last stack counts: the system listed it, or its stack still changed."""
    seen = last_seen_us.get(os_id)
    if seen is None or seen >= end:
        return end
    changed = events[first].ts
    for event in events[first + 1 :]:
        if event.ph == "B":
            if not event.args.filename and _THREAD_FRAME.match(event.name):
                break
            changed = event.ts
    return max(seen, changed)


def _slice_event(event: _Event, os_id: int, at: int) -> dict[str, Any]:
    args = {"filename": event.args.filename, "line": event.args.line}
    return {
        "name": event.name,
        "cat": "py-spy",
        "ph": event.ph,
        "pid": event.pid,
        "tid": os_id,
        "ts": at,
        "args": args,
    }


def _thread_name(event: _Event, thread: ThreadStacks) -> dict[str, Any]:
    return {
        "name": "thread_name",
        "ph": "M",
        "pid": event.pid,
        "tid": thread.os_id,
        "args": {"name": thread.name},
    }


def _decode(path: Path, form: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineFailedError(
            f"py-spy left no recording that can be read ({error}); profile again"
        ) from error
