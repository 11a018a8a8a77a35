"""Invariant 6: a prefix hit reuses only blocks that were completely written before.

Follows which slots of which block were written since the block was last allocated, on every
rank, from the live slot mappings. One integer per block and rank: memory is bounded by the pool.
"""

from collections.abc import Iterator, Sequence

from omnicache_cli.trace.invariants import violation as why
from omnicache_cli.trace.invariants.rows import SlotRuns
from omnicache_cli.trace.records import (
    Admission,
    Allocated,
    AnyEvent,
    EngineSource,
    HashesMoved,
    from_runs,
)

Finding = tuple[int | None, int, str, str, str]
"""Rank, group, what, expected, found."""

Writes = list[tuple[int, int, SlotRuns]]
"""What a request wrote in a step: rank, pool block size, slots."""


class WrittenBlocks:
    """The blocks of one engine's pool, and how far each of them is written."""

    def __init__(self, engine: EngineSource) -> None:
        self._engine = engine
        self._unknown: dict[int, str | None] = {}  # allocated block -> why unknown, None: known
        self._masks: dict[int, dict[int, int]] = {}  # rank -> block -> bit per written slot
        self._fresh: dict[int, int] = {}  # allocated in this step: block -> request
        self._lost = False  # blocks that were never seen allocated may be older than a gap

    @property
    def ranks(self) -> set[int]:
        """Ranks that have recorded a forward pass so far."""
        return set(self._masks)

    def forget_all(self, reason: str) -> None:
        self._unknown = dict.fromkeys(self._unknown, reason)
        self._lost = True

    def begin(self, ranks: set[int]) -> None:
        """A step begins; these ranks recorded its forward pass."""
        self._fresh = {}
        for rank in sorted(ranks - self._masks.keys()):
            if self._masks:
                self.forget_all(why.NO_WORKER)
            self._masks[rank] = {}

    def apply(self, events: Sequence[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, Allocated):
                for block in from_runs(event.block_ids):
                    self._unknown[block] = None
                    self._fresh[block] = event.request
                    for masks in self._masks.values():
                        masks.pop(block, None)
            elif isinstance(event, HashesMoved):
                source, target = event.source_block_id, event.target_block_id
                self._unknown[target] = self._unknown.get(source)
                for masks in self._masks.values():
                    masks[target] = masks.get(source, 0)

    def check_hit(self, one: Admission) -> Iterator[tuple[str | None, Finding | None]]:
        """Per block under the hit: a reason why it cannot be checked, a finding, or neither."""
        for number, (group, runs) in enumerate(
            zip(self._engine.groups, one.block_ids, strict=False)
        ):
            size = group.block_size
            table = from_runs(runs)[: -(-one.hit_tokens // size)]
            for index, block in enumerate(table):
                if not block:  # a sliding window skips it
                    continue
                if not group.maps_slots:
                    yield why.NO_SLOTS, None
                    continue
                needed = min(size, one.hit_tokens - index * size)
                if needed < size and self._fresh.get(block) == one.request:
                    self._unknown[block] = why.COPIED
                reason = self._reason(block)
                yield reason, None if reason else self._finding(number, index, block, needed)

    def write(self, writes: Writes) -> None:
        for rank, size, runs in writes:
            masks = self._masks[rank]
            for start, length in runs:
                slot, end = max(start, 0), start + length
                while slot < end:
                    block, offset = divmod(slot, size)
                    count = min(size - offset, end - slot)
                    masks[block] = masks.get(block, 0) | ((1 << count) - 1) << offset
                    slot += count

    def mark_unknown(self, tables: Sequence[Sequence[int]], first: int, end: int, why: str) -> None:
        """Tokens [first, end) of a request were written unseen."""
        for group, table in zip(self._engine.groups, tables, strict=False):
            if first < end:
                for block in table[first // group.block_size : -(-end // group.block_size)]:
                    self._unknown[block] = why

    def _reason(self, block: int) -> str | None:
        if block not in self._unknown:
            return why.LOST if self._lost else None
        if not self._masks:
            return why.NO_WORKER
        return self._unknown[block]

    def _finding(self, group: int, index: int, block: int, needed: int) -> Finding | None:
        what = f"hit block {block}, block_table[{index}]"
        expected = f"slots 0 .. {needed - 1} of the block written before"
        if block not in self._unknown:
            return None, group, what, expected, "never allocated"
        for rank, masks in sorted(self._masks.items()):
            missing = ~masks.get(block, 0) & ((1 << needed) - 1)
            if missing:
                first = (missing & -missing).bit_length() - 1
                count = missing.bit_count()
                found = (
                    "nothing written since it was allocated"
                    if count == needed
                    else f"slot {first} of the block not written, {count} in all"
                )
                return rank, group, what, expected, found
        return None
