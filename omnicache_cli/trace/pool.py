"""The block pool of one engine, rebuilt from its events: who holds which block, what it is worth.

Memory is bounded by the blocks that were touched and by the live requests' tables, not by the
length of the trace. What the events say is compared with the engine's own count of free blocks in
every step; who is right where they differ is not known here.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.records import (
    NO_REQUEST,
    Allocated,
    AnyEvent,
    Cached,
    CachedPartial,
    CacheReset,
    EngineSource,
    Evicted,
    Finished,
    Freed,
    HashesMoved,
    Preempted,
    from_runs,
)
from omnicache_cli.trace.steps import Request, Step

FREE, CACHED, IN_USE, SHARED = range(4)
"""States of a block: free without a hash; free, but it can be hit; held by one request (or by
nobody that is known, as while a KV connector still reads it); held by several."""

STATE_NAMES = ("free", "cached", "in_use", "shared")

MAX_HOLDS = 8
"""Requests that one use of a block lists; all are counted."""

MAX_DISAGREEMENTS = 3
"""Steps listed in which events and engine differ; all are counted."""


@dataclass(slots=True)
class Hold:
    """One request that has a block in its table, from first_step to last_step."""

    request: int
    first_step: int
    last_step: int | None = None  # in or after which it let go; None: it still holds the block


@dataclass(slots=True)
class BlockUse:
    """A block from when it is taken until it is taken again."""

    block: int
    taken_step: int | None  # None: not in the trace
    taken_by: int | None = None  # NO_REQUEST: by nobody that the engine named
    group: int | None = None  # KV cache group; None: the trace does not say
    holds: list[Hold] = field(default_factory=list)  # the first MAX_HOLDS; a taker comes first
    num_holds: int = 0
    num_hits: int = 0  # of them those that found it in the cache
    cached_step: int | None = None
    cached_by: int | None = None
    hash: str | None = None  # None: never cached, or the hash was lost
    freed_step: int | None = None  # the latest; None: in use since
    evicted_step: int | None = None
    evicted_for: int | None = None
    reset_step: int | None = None  # the prefix cache was reset, and the hash with it

    @property
    def is_cached(self) -> bool:
        return (
            self.cached_step is not None and self.evicted_step is None and self.reset_step is None
        )


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A step in which the events give another number of free blocks than the engine."""

    step: int
    recorded: int
    rebuilt: int


def hash_of(request: Request | None, engine: EngineSource, group: int, index: int) -> str | None:
    """The hash of a full block by its index in the request's table; None: not in the trace.

    A group with larger blocks than `hash_block_size` uses every n-th hash.
    """
    if request is None or not 0 <= group < len(engine.groups):
        return None
    entry = (index + 1) * engine.groups[group].block_size // engine.hash_block_size - 1
    return request.block_hashes[entry] if 0 <= entry < len(request.block_hashes) else None


class LiveRequests:
    """Those of one engine that have not ended yet, by number."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def get(self, number: int) -> Request | None:
        return self._requests.get(number)

    def begin(self, step: Step) -> None:
        """Call it before the events of the step are looked at."""
        for request in step.arrived:
            self._requests[request.number] = request
        if step.gap or step.record.scheduled is not None:
            for request in step.requests:
                self._requests[request.number] = request

    def end(self, step: Step) -> None:
        """Forget what has ended; a request may have been aborted before the step it arrives in."""
        for request in step.arrived:
            if request.status is not None:
                self._requests.pop(request.number, None)
        for events in (step.before, step.record.events, step.after):
            for event in events:
                if isinstance(event, Finished):
                    self._requests.pop(event.request, None)


class BlockPool:
    """Follows one engine's pool. `ended` gets each use when its block is taken again.

    `moved` gets (block, old state, new state) for each block that a step left in another state;
    the states are those after `schedule()`, when the engine counts its free blocks.
    """

    def __init__(
        self,
        engine: EngineSource,
        *,
        ended: Callable[[BlockUse], None] | None = None,
        moved: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self.engine = engine
        self.uses: dict[int, BlockUse] = {}  # the current one of every block that was touched
        self.num_steps = 0
        self.num_disagreements = 0
        self.disagreements: list[Disagreement] = []
        self.first_gap: int | None = None  # the first step before which records were lost
        self.counts: Counter[str] = Counter()  # taken, hit, cached, evicted, freed, reset
        self._ended = ended
        self._moved = moved
        self._in_use: set[int] = set()
        self._held: defaultdict[int, dict[int, Hold]] = defaultdict(dict)  # request -> block
        self._num_holders: Counter[int] = Counter()  # live ones by block
        self._states: dict[int, int] = {}  # of blocks that are not FREE, as last told to `moved`
        self._touched: dict[int, None] = {}  # since then, in order
        self._requests = LiveRequests()

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return max(0, self.engine.num_gpu_blocks - 1)

    @property
    def num_free(self) -> int:
        """By the events so far, cached or not."""
        return self.num_usable - len(self._in_use)

    def add(self, step: Step) -> int:
        """Follow one step and what came after it; the free blocks that the events left it.

        BadTraceError: a block that the pool does not have.
        """
        if step.gap and self.first_gap is None:
            self.first_gap = step.number
        self._requests.begin(step)
        self._apply(step.before, step.number)
        self._apply(step.record.events, step.number)
        for admission in step.record.admitted:
            self._hold_tables(admission.request, admission.block_ids, step.number, hits=True)
        for number, additions in step.record.new_block_ids:
            self._hold_tables(number, additions, step.number, hits=False)
        free = self._compare(step)
        self._tell_states()
        self._apply(step.after, step.number)
        self._requests.end(step)
        return free

    def close(self) -> None:
        """After the last step: hand the current uses to `ended`, by block."""
        if self._ended is not None:
            for block in sorted(self.uses):
                self._ended(self.uses[block])

    def state(self, block: int) -> int:
        if block in self._in_use:
            return SHARED if self._num_holders[block] > 1 else IN_USE
        use = self.uses.get(block)
        return CACHED if use is not None and use.is_cached else FREE

    def num_in_state(self) -> list[int]:
        """Blocks by state, null block left out; of an engine whose steps are all followed."""
        counts = [0] * 4
        for block in self.uses:
            counts[self.state(block)] += 1
        counts[FREE] = self.num_usable - sum(counts[1:])
        return counts

    def _compare(self, step: Step) -> int:
        self.num_steps += 1
        free, recorded = self.num_free, step.record.num_free_blocks
        if free != recorded:
            self.num_disagreements += 1
            if len(self.disagreements) < MAX_DISAGREEMENTS:
                self.disagreements.append(Disagreement(step.number, recorded, free))
        return free

    def _tell_states(self) -> None:
        if self._moved is not None:
            for block in self._touched:
                old, new = self._states.get(block, FREE), self.state(block)
                if old != new:
                    self._moved(block, old, new)
                    self._states[block] = new
        self._touched.clear()

    # -- events -------------------------------------------------------------------------------

    def _apply(self, events: Sequence[AnyEvent], step: int) -> None:
        for event in events:
            match event:
                case Allocated():
                    for block in self._blocks(event.block_ids):
                        self._take(block, event.request, step)
                case Freed():
                    self._free(self._blocks(event.block_ids), step)
                    for block in self._blocks(event.still_held):
                        self._give_up(block, event.request, step)
                case Cached():
                    self._cache(event, step)
                case CachedPartial():
                    self._cache_partial(event, step)
                case Evicted():
                    self._evict(event, step)
                case HashesMoved():
                    self._move(event, step)
                case Preempted() | Finished():
                    self._let_go(event.request, step)
                case CacheReset() if event.successful:
                    self._reset(step)

    def _take(self, block: int, request: int, step: int) -> None:
        old = self.uses.get(block)
        if old is not None:
            self._end_holds(block, step)
            if self._ended is not None:
                self._ended(old)
        self.uses[block] = BlockUse(block, step, request)
        self._in_use.add(block)
        self._touched[block] = None
        self.counts["taken"] += 1
        if request != NO_REQUEST:
            self._hold(block, request, step)

    def _free(self, blocks: Sequence[int], step: int) -> None:
        for block in blocks:
            self._end_holds(block, step)
            self._in_use.discard(block)
            self._use(block).freed_step = step
        self.counts["freed"] += len(blocks)

    def _cache(self, event: Cached, step: int) -> None:
        request = self._requests.get(event.request)
        blocks, indices = self._blocks(event.block_ids), from_runs(event.block_indices)
        for block, index in zip(blocks, indices, strict=False):
            one = hash_of(request, self.engine, event.group, index)
            self._give_hash(block, event.request, event.group, one, step)

    def _cache_partial(self, event: CachedPartial, step: int) -> None:
        request = self._requests.get(event.request)
        entry = event.num_tokens // self.engine.hash_block_size - 1
        known = request is not None and 0 <= entry < len(request.block_hashes)
        one = request.block_hashes[entry] if request is not None and known else None
        (block,) = self._blocks([event.block_id, 1])
        self._give_hash(block, event.request, event.group, one, step)

    def _give_hash(
        self, block: int, request: int, group: int | None, block_hash: str | None, step: int
    ) -> None:
        use = self._use(block)
        use.group = group
        use.cached_step, use.cached_by, use.hash = step, request, block_hash
        use.evicted_step = use.evicted_for = use.reset_step = None
        self.counts["cached"] += 1

    def _evict(self, event: Evicted, step: int) -> None:
        (block,) = self._blocks([event.block_id, 1])
        use = self._use(block)
        if use.cached_step is None:  # cached before records were lost
            use.group = event.group
        if use.hash is None:
            use.hash = event.hash
        self.counts["evicted"] += use.evicted_step is None  # it may lose several hashes at once
        use.evicted_step, use.evicted_for = step, event.request

    def _move(self, event: HashesMoved, step: int) -> None:
        (source,) = self._blocks([event.source_block_id, 1])
        (target,) = self._blocks([event.target_block_id, 1])
        old, new = self._use(source), self._use(target)
        new.group, new.hash = old.group, old.hash
        new.cached_step, new.cached_by = step, old.cached_by
        old.cached_step = old.cached_by = old.hash = None

    def _reset(self, step: int) -> None:
        self.counts["reset"] += 1
        for block, use in self.uses.items():
            if use.is_cached:
                use.reset_step = step
                self._touched[block] = None

    # -- holders ------------------------------------------------------------------------------

    def _hold_tables(
        self, request: int, tables: Sequence[list[int]], step: int, *, hits: bool
    ) -> None:
        """What an admission's table holds without an event was found in the cache."""
        mine = self._held[request]
        for group, runs in enumerate(tables):
            for block in self._blocks(runs, first=0):
                if not block:  # the null block
                    continue
                if block not in mine:
                    self._in_use.add(block)
                    self._hold(block, request, step)
                    self.counts["hit"] += hits
                    self._use(block).num_hits += hits
                self._use(block).group = group

    def _hold(self, block: int, request: int, step: int) -> None:
        use = self._use(block)
        use.freed_step = None
        hold = self._held[request][block] = Hold(request, step)
        use.num_holds += 1
        if len(use.holds) < MAX_HOLDS:
            use.holds.append(hold)
        self._num_holders[block] += 1

    def _let_go(self, request: int, step: int) -> None:
        for block, hold in self._held.pop(request, {}).items():
            hold.last_step = step
            self._drop_holder(block)

    def _give_up(self, block: int, request: int, step: int) -> None:
        """One holder of several gives the block back."""
        hold = self._held[request].pop(block, None)
        if hold is not None:
            hold.last_step = step
            self._drop_holder(block)

    def _end_holds(self, block: int, step: int) -> None:
        """Nobody holds the block any more: its reference count is 0."""
        if not self._num_holders[block]:
            self._touched[block] = None
            return
        for mine in self._held.values():
            hold = mine.pop(block, None)
            if hold is not None:
                hold.last_step = step
        self._num_holders.pop(block, None)
        self._touched[block] = None

    def _drop_holder(self, block: int) -> None:
        self._num_holders[block] -= 1
        if self._num_holders[block] <= 0:
            del self._num_holders[block]
        self._touched[block] = None

    # -- blocks -------------------------------------------------------------------------------

    def _use(self, block: int) -> BlockUse:
        self._touched[block] = None
        use = self.uses.get(block)
        if use is None:  # taken before records were lost
            use = self.uses[block] = BlockUse(block, None)
        return use

    def _blocks(self, runs: list[int], *, first: int = 1) -> list[int]:
        """BadTraceError: the pool does not hand out one of them."""
        blocks = from_runs(runs)
        if blocks and not first <= min(blocks) <= max(blocks) < self.engine.num_gpu_blocks:
            wrong = min(blocks) if min(blocks) < first else max(blocks)
            raise BadTraceError(
                f"engine {self.engine.engine} has a pool of {self.engine.num_gpu_blocks} blocks, "
                f"and block {wrong} was taken or freed; the trace is damaged, record it again"
            )
        return blocks
