"""The Trace Event Format, as far as a timeline uses it: what is wrong with a file, field by field.

Written from the public description of the format: the fields of each phase, which of them are
required, how slices nest, how nestable async events and duration events balance.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Event = dict[str, Any]

REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "B": {"name", "ts", "pid", "tid"},
    "E": {"ts", "pid", "tid"},
    "b": {"name", "cat", "id", "ts", "pid", "tid"},
    "e": {"name", "cat", "id", "ts", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "M": {"name", "pid", "args"},
}
OPTIONAL = {
    "X": {"cat", "args"},
    "B": {"cat", "args"},
    "E": {"name", "cat", "args"},
    "b": {"args"},
    "e": {"args"},
    "C": {"cat", "id"},
    "i": {"cat", "args"},
    "M": {"tid"},
}
TYPES: dict[str, Callable[[Any], bool]] = {
    "ph": lambda value: isinstance(value, str) and len(value) == 1,
    "name": lambda value: isinstance(value, str) and value != "",
    "cat": lambda value: isinstance(value, str) and value != "",
    "id": lambda value: isinstance(value, str) and value != "",
    "pid": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "tid": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "ts": lambda value: is_number(value),  # noqa: PLW0108 - it is defined below
    "dur": lambda value: is_number(value) and value >= 0,
    "s": lambda value: value in ("g", "p", "t"),
    "args": lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value),
}
METADATA: dict[str, tuple[str, type]] = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
OF_THE_FILE: dict[str, Callable[[Any], bool]] = {
    "traceEvents": lambda value: isinstance(value, list),
    "displayTimeUnit": lambda value: value in ("ms", "ns"),
    "otherData": lambda value: isinstance(value, dict),
}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def problems(data: Any) -> list[str]:
    """Everything that the format forbids, a line each."""
    if not isinstance(data, dict) or "traceEvents" not in data:
        return ["no object with traceEvents"]
    found = [
        f"{key} of the file is {value!r:.80}"
        for key, value in data.items()
        if key not in OF_THE_FILE or not OF_THE_FILE[key](value)
    ]
    events = data["traceEvents"]
    for number, event in enumerate(events):
        found += [f"event {number}: {one}" for one in _of_event(event)]
    if found:
        return found
    return [*_names(events), *_nesting(events), *_duration(events), *_async(events)]


def _of_event(event: Event) -> Iterator[str]:
    phase = event.get("ph")
    if phase not in REQUIRED:
        yield f"ph is {phase!r}"
        return
    fields = event.keys() - {"ph"}
    for name in sorted(REQUIRED[phase] - fields):
        yield f"{phase} without {name}"
    for name in sorted(fields - REQUIRED[phase] - OPTIONAL[phase]):
        yield f"{phase} with {name}"
    for name, value in event.items():
        if name in TYPES and not TYPES[name](value):
            yield f"{name} is {value!r}"
    if phase == "C" and not (event["args"] and all(map(is_number, event["args"].values()))):
        yield f"values of a counter are {event['args']!r}"
    if phase == "M":
        key, kind = METADATA.get(event["name"], ("", object))
        if event["args"].keys() != {key} or not isinstance(event["args"][key], kind):
            yield f"metadata {event['name']} is {event['args']!r}"
        if event["name"].startswith("thread") != ("tid" in event):
            yield f"metadata {event['name']} with tid {event.get('tid')}"


def _names(events: Iterable[Event]) -> Iterator[str]:
    """Every process and thread that is used has one name, and it has it before it is used."""
    named: set[tuple[str, int, int | None]] = set()
    for event in events:
        pid, tid = event["pid"], event.get("tid")
        if event["ph"] == "M":
            key = (event["name"], pid, tid)
            if key in named:
                yield f"two times {event['name']} of pid {pid}, tid {tid}"
            named.add(key)
            continue
        if ("process_name", pid, None) not in named:
            yield f"pid {pid} has no name yet"
        if tid is not None and ("thread_name", pid, tid) not in named:
            yield f"tid {tid} of pid {pid} has no name yet"


def nanoseconds(value: float) -> int:
    """As readers have it that cut off; those that round must get the same."""
    cut = int(value * 1000)
    assert cut == round(value * 1000)
    return cut


def _nesting(events: Iterable[Event]) -> Iterator[str]:
    """Complete events of one thread lie inside each other or apart."""
    tracks: defaultdict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            end = start + nanoseconds(event["dur"])
            tracks[event["pid"], event["tid"]].append((start, -end, event["name"]))
    for track, slices in tracks.items():
        open_ends: list[int] = []
        for start, end, name in sorted(slices):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if open_ends and -end > open_ends[-1]:
                yield f"{name} at {start} of {track} ends after the slice that it begins in"
            open_ends.append(-end)


def _duration(events: Iterable[Event]) -> Iterator[str]:
    """B and E of one thread balance, in order of time, and of the file where times are equal."""
    tracks: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    slices = [event for event in events if event["ph"] in "BE"]
    for event in sorted(slices, key=lambda one: nanoseconds(one["ts"])):
        track = event["pid"], event["tid"]
        if event["ph"] == "B":
            tracks[track].append(event)
        elif not tracks[track] or tracks[track].pop()["name"] != event.get("name"):
            yield f"E {event.get('name')} at {event['ts']} of {track} ends nothing"
    yield from (f"B of {track} without E" for track, stack in tracks.items() if stack)


def _async(events: Iterable[Event]) -> Iterator[str]:
    """b and e of one category and id balance, in order of time and of the file."""
    stacks: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
    last: dict[tuple[str, str], float] = {}
    for event in events:
        if event["ph"] not in "be":
            continue
        key = event["cat"], event["id"]
        if event["ts"] < last.get(key, -math.inf):
            yield f"{event['ph']} {event['name']} of {key} goes back in time"
        last[key] = event["ts"]
        if event["ph"] == "b":
            if key in stacks and not stacks[key]:
                yield f"{key} is used again"
            stacks[key].append(event)
        elif not stacks[key] or stacks[key].pop()["name"] != event["name"]:
            yield f"e {event['name']} of {key} ends nothing"
    yield from (f"b of {key} without e" for key, stack in stacks.items() if stack)
