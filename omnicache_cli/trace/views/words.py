"""Trace data in words: vectors as runs, events as sentences, times in milliseconds."""

from collections.abc import Sequence
from typing import Any

from omnicache_cli.trace.records import (
    NO_REQUEST,
    Allocated,
    AnyEvent,
    Cached,
    CachedPartial,
    CacheReset,
    Evicted,
    Finished,
    Freed,
    Hashed,
    HashesMoved,
    Preempted,
    WrongHash,
    from_runs,
)

SHORTEST_RUN = 3


def runs_text(values: Sequence[int], *, most: int | None = None) -> str:
    """`16 .. 1012`, `1024 .. 1028, then -1 x 3`: every value can be read back from it.

    With `most`, the middle of a longer list of runs is left out, and the text says so.
    """
    pieces: list[str] = []
    index = 0
    while index < len(values):
        value = values[index]
        same = _run_length(values, index, 0)
        stride, length = max(
            ((step, _run_length(values, index, step)) for step in (1, -1)), key=lambda run: run[1]
        )
        if same >= (1 if value == -1 else SHORTEST_RUN):
            pieces.append(f"{value} x {same}")
            index += same
        elif length >= SHORTEST_RUN:
            pieces.append(f"{value} .. {value + stride * (length - 1)}")
            index += length
        else:
            pieces.append(str(value))
            index += 1
    if len(pieces) > 1 and pieces[-1].startswith("-1 x"):
        pieces[-1] = f"then {pieces[-1]}"
    if most is not None and len(pieces) > most + 1:  # one left out would not be shorter
        pieces[most - 1 : -1] = [f"{len(pieces) - most} more runs"]
    return ", ".join(pieces) or "empty"


def _run_length(values: Sequence[int], index: int, stride: int) -> int:
    if isinstance(values, range):  # need not be counted, and may be long
        return len(values) - index if stride == values.step else 1
    length = 1
    while index + length < len(values) and values[index + length] == (
        values[index] + stride * length
    ):
        length += 1
    return length


def counted(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def milliseconds(nanoseconds: int | None) -> float | None:
    """Three significant digits: what a phase time is good for."""
    return None if nanoseconds is None else float(f"{nanoseconds / 1e6:.3g}")


def who(request: int) -> str:
    return "nobody" if request == NO_REQUEST else f"#{request}"


def blocks_text(blocks: Sequence[int]) -> str:
    return f"{'block' if len(blocks) == 1 else 'blocks'} {runs_text(blocks)}"


def freed_text(event: Freed) -> str:
    """`frees blocks 3, 4; lets go of block 1, which others hold`."""
    freed, held = from_runs(event.block_ids), from_runs(event.still_held)
    parts = [f"frees {blocks_text(freed)}"] if freed else []
    parts += [f"lets go of {blocks_text(held)}, which others hold"] if held else []
    return "; ".join(parts) or "frees nothing"


def event_text(event: AnyEvent) -> str:
    """One event as a sentence; requests by arrival number."""
    match event:
        case Allocated():
            return f"{who(event.request)} takes {blocks_text(from_runs(event.block_ids))}"
        case Cached():
            blocks, indices = from_runs(event.block_ids), from_runs(event.block_indices)
            return (
                f"{who(event.request)} caches {blocks_text(blocks)} "
                f"(its {blocks_text(indices)} of group {event.group})"
            )
        case CachedPartial():
            return (
                f"{who(event.request)} caches block {event.block_id} of group {event.group} "
                f"for a prefix of {counted(event.num_tokens, 'token')} that ends inside it"
            )
        case WrongHash():
            return (
                f"{who(event.request)} caches block {event.block_id} of group {event.group} under "
                f"the hash of other tokens: {event.found}, not {event.expected}"
            )
        case Evicted():
            taker = "" if event.request == NO_REQUEST else f"; {who(event.request)} takes it"
            owner = "" if event.owner == NO_REQUEST else f", cached by {who(event.owner)}"
            return (
                f"block {event.block_id} of group {event.group} is evicted "
                f"(hash {event.hash}{owner}){taker}"
            )
        case HashesMoved():
            return (
                f"block {event.target_block_id} is cached in place of block {event.source_block_id}"
            )
        case Freed():
            return f"{who(event.request)} {freed_text(event)}"
        case Hashed():
            more = counted(len(event.hashes), "more block")
            return f"{who(event.request)} has hashes of {more}, from index {event.first}"
        case Preempted():
            return f"{who(event.request)} is preempted"
        case Finished():
            output = counted(event.num_output_tokens, "output token")
            return f"{who(event.request)} finishes: {event.status}, {output}"
        case CacheReset():
            return "the prefix cache is reset" if event.successful else "a cache reset is refused"


_RUN_FIELDS = {"block_ids", "block_indices", "still_held"}


def event_data(event: AnyEvent) -> dict[str, Any]:
    """One event for scripts: its name as in the trace, its fields, vectors in full."""
    data: dict[str, Any] = {"event": event.__struct_config__.tag}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        data[name] = from_runs(value) if name in _RUN_FIELDS else value
    return data
