"""Invariant 3: what one row writes belongs to no other request.

Keeps who holds which block: the scheduler's tables by its events, the workers' tables by row.
Memory is bounded by the pool.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from omnicache_cli.trace.invariants.rows import Row, SlotRuns, blocks_under
from omnicache_cli.trace.records import (
    Allocated,
    AnyEvent,
    CacheGroup,
    Finished,
    Freed,
    Preempted,
    from_runs,
)
from omnicache_cli.trace.steps import Step

Finding = tuple[Row, str, str, str]
"""Row, what, expected, found."""


class SchedulerOwners:
    """Which live requests hold which block of the pool, by the scheduler's events."""

    def __init__(self) -> None:
        self._holders: dict[int, set[int]] = {}
        self._held: defaultdict[int, set[int]] = defaultdict(set)  # by request
        self.names: dict[int, str] = {}  # external id of the requests that hold blocks

    def forget_all(self) -> None:
        """Records were lost: nothing that was known holds any more."""
        self._holders.clear()
        self._held.clear()

    def schedule(self, step: Step) -> None:
        """What `schedule()` did, in order: events, then the tables it handed out."""
        self.apply(step.record.events)
        for one in step.scheduled:
            self.names[one.request.number] = one.request.external_id
        for admission in step.record.admitted:
            for runs in admission.block_ids:
                self._hold(admission.request, from_runs(runs))
        for request, additions in step.record.new_block_ids:
            for runs in additions:
                self._hold(request, from_runs(runs))

    def apply(self, events: Sequence[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, Allocated):
                blocks = from_runs(event.block_ids)
                self._release(blocks)
                if event.request >= 0:
                    self._hold(event.request, blocks)
            elif isinstance(event, Freed):
                self._release(from_runs(event.block_ids))
                self._let_go(event.request, from_runs(event.still_held))
            elif isinstance(event, Preempted | Finished):
                for block in self._held.pop(event.request, set()):
                    holders = self._holders[block]
                    holders.discard(event.request)
                    if not holders:
                        del self._holders[block]
                self.names.pop(event.request, None)

    def others(self, block: int, request: int) -> set[int]:
        """The other live requests that hold this block."""
        return self._holders.get(block, set()) - {request}

    def _hold(self, request: int, blocks: Sequence[int]) -> None:
        held = self._held[request]
        for block in blocks:
            if block:
                self._holders.setdefault(block, set()).add(request)
                held.add(block)

    def _let_go(self, request: int, blocks: Sequence[int]) -> None:
        """Others hold them still."""
        for block in blocks:
            self._holders.get(block, set()).discard(request)
            self._held[request].discard(block)

    def _release(self, blocks: Sequence[int]) -> None:
        """Reference count 0: nobody holds them."""
        for block in blocks:
            for request in self._holders.pop(block, ()):
                self._held[request].discard(block)


class WorkerOwners:
    """Which rows of one rank's block table of one group name which kernel block."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._holders: dict[int, set[int]] = {}

    def update(self, table: Sequence[list[int]]) -> None:
        """Rows are replaced, never changed: a row that is the same object needs no work."""
        for number in range(max(len(table), len(self._rows))):
            old = self._rows[number] if number < len(self._rows) else []
            new = table[number] if number < len(table) else []
            if old is new:
                continue
            if new[: len(old)] != old:
                for block in old:
                    self._discard(block, number)
                old = []
            for block in new[len(old) :]:
                self._holders.setdefault(block, set()).add(number)
        self._rows = list(table)

    def others(self, block: int, row: int) -> list[int]:
        return sorted(self._holders.get(block, set()) - {row})

    def _discard(self, block: int, number: int) -> None:
        holders = self._holders.get(block)
        if holders is not None:
            holders.discard(number)
            if not holders:
                del self._holders[block]


def overlaps(rows: Sequence[Row], parts: Sequence[SlotRuns]) -> Iterator[Finding]:
    """Slots that two rows of one step write, one finding per pair of neighbouring runs."""
    runs = sorted(
        (start, length, index)
        for index, part in enumerate(parts)
        for start, length in part
        if start >= 0
    )
    reported: set[tuple[int, int]] = set()
    end, holder = -1, 0  # the furthest slot written so far, and who wrote it
    for start, length, index in runs:
        if start < end and (holder, index) not in reported:
            reported.add((holder, index))
            first = rows[holder]
            many = min(end, start + length) - start
            slots = f"slot {start}" if many == 1 else f"slots {start} .. {start + many - 1}"
            yield (
                rows[index],
                f"{slots} written in this step",
                "written by this row only",
                f"also written by row {first.number} ({first.name})"
                if holder != index
                else "written twice by this row",
            )
        if start + length > end:
            end, holder = start + length, index


def foreign_writes(
    rows: Sequence[Row],
    parts: Sequence[SlotRuns],
    *,
    table: Sequence[list[int]],
    group: CacheGroup,
    kernel_block_size: int,
    workers: WorkerOwners,
    scheduler: SchedulerOwners,
    hits: Mapping[int, set[int]],
) -> Iterator[Finding]:
    """Blocks that a row writes and another live request holds, one finding per row.

    `hits`: block -> requests that found it in the cache in this very step. They may read what
    this step writes (whether the writer is placed before them is invariant 6).
    """
    by_number: Mapping[int, Row] = {row.number: row for row in rows}
    for row, part in zip(rows, parts, strict=True):
        found: dict[int, list[str]] = {}
        for block in blocks_under(part, kernel_block_size):
            pool_block = block * kernel_block_size // group.block_size
            for number in workers.others(block, row.number):
                other = by_number.get(number)
                if (
                    pool_block
                    and not _hits(other, hits.get(pool_block))
                    and _in_use(table, other, block, group, kernel_block_size)
                ):
                    name = "?" if other is None else other.name
                    found.setdefault(pool_block, []).append(f"row {number} ({name})")
        if row.scheduled is not None:
            names = {name for holders in found.values() for name in holders}
            for block in blocks_under(part, group.block_size) if not names else ():
                readers = hits.get(block, set())
                for request in scheduler.others(block, row.scheduled.request.number) - readers:
                    name = scheduler.names.get(request, "?")
                    found.setdefault(block, []).append(f"request #{request} ({name})")
        if found:
            block, holders = next(iter(found.items()))
            many = "" if len(found) == 1 else f" and {len(found) - 1} more blocks"
            yield (
                row,
                f"block {block}{many} written in this step",
                "held by this request only",
                f"also held by {', '.join(dict.fromkeys(holders))}",
            )


def _hits(row: Row | None, readers: set[int] | None) -> bool:
    if readers is None or row is None or row.scheduled is None:
        return False
    return row.scheduled.request.number in readers


def hits_of(step: Step) -> dict[int, set[int]]:
    """Blocks under the hits of this step -> the requests that hit them."""
    hits: dict[int, set[int]] = {}
    for one in step.record.admitted:
        if one.hit_tokens:
            for group, runs in zip(step.engine.groups, one.block_ids, strict=False):
                for block in from_runs(runs)[: one.hit_tokens // group.block_size]:
                    hits.setdefault(block, set()).add(one.request)
    return hits


def _in_use(
    table: Sequence[list[int]],
    other: Row | None,
    block: int,
    group: CacheGroup,
    kernel_block_size: int,
) -> bool:
    """Does the other row still read this block? A window leaves old ids in the worker's table."""
    if group.spec.startswith("ChunkedLocal"):
        return False  # where its window begins is not in the trace: ask the scheduler's tables
    if group.sliding_window is None or other is None:
        return True
    first = max(0, other.first_position - group.sliding_window + 1) // kernel_block_size
    return block in table[other.number][first:]
