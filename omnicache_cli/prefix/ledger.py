"""What the prefix cache of one engine held at each moment, and what it had lost: from events.

Memory is bounded by the hashes that are in the pool, by the MAX_GONE that left it last, and by the
requests that are remembered: the live ones, and of the ended ones the latest with MAX_KNOWN_HASHES
hashes together. What was forgotten is said to be not known.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.pool import hash_of
from omnicache_cli.trace.records import (
    Admission,
    Allocated,
    AnyEvent,
    Cached,
    CachedPartial,
    CacheReset,
    EngineSource,
    Evicted,
    Finished,
    Freed,
    Hashed,
    HashesMoved,
    Preempted,
    from_runs,
)
from omnicache_cli.trace.steps import Request, Step

MAX_GONE = 100_000
"""Hashes that left the cache and are remembered, of each engine: the latest ones."""

MAX_KNOWN_HASHES = 200_000
"""Block hashes of ended requests that are remembered, of each engine: the latest ones."""

Key = tuple[int, str]
"""KV cache group and block hash."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How a hash came into the cache."""

    block: int
    step: int
    request: int  # NO_REQUEST: not known
    name: str  # external id; empty: not known


@dataclass(frozen=True, slots=True)
class Gone:
    """How a hash left the cache."""

    step: int
    was_reset: bool  # reset_prefix_cache, else evicted
    entry: Entry | None  # None: it came in before records were lost
    request: int  # that took the block; NO_REQUEST: nobody
    name: str


class Ledger:
    """One engine's prefix cache, moment by moment."""

    def __init__(self, engine: EngineSource) -> None:
        self.engine = engine
        self.known: OrderedDict[int, Request] = OrderedDict()  # by number, the oldest first
        self.running: set[int] = set()  # admitted, and neither ended nor preempted
        self.admitted: set[int] = set()  # of the known ones: those that ever ran
        self.computed: dict[int, int] = {}  # tokens of live requests, once this step has run
        self.first_gap: int | None = None
        self.num_forgotten = 0  # requests
        self._cached: dict[Key, dict[int, Entry]] = {}
        self._keys: dict[int, dict[Key, None]] = {}  # by block
        self._gone: OrderedDict[Key, Gone] = OrderedDict()
        self._sharers: dict[str, dict[int, None]] = {}  # hash -> requests that have it
        self._num_known = 0  # hashes of ended requests
        self._ended: OrderedDict[int, int] = OrderedDict()  # their hashes, by number

    # -- questions ----------------------------------------------------------------------------

    def entry(self, key: Key) -> Entry | None:
        """How this hash came into the cache; None: it is not there."""
        blocks = self._cached.get(key)
        return next(iter(blocks.values())) if blocks else None

    def has(self, key: Key) -> bool:
        return key in self._cached

    def gone(self, key: Key) -> Gone | None:
        """How this hash left the cache; None: it is there, never was, or was forgotten."""
        return None if key in self._cached else self._gone.get(key)

    def sharers(self, block_hash: str) -> Iterator[Request]:
        """Known requests that have this block and ever ran, the latest first."""
        having = self._sharers.get(block_hash, {})
        return (self.known[one] for one in reversed(having) if one in self.admitted)

    def ran(self) -> Iterator[Request]:
        """Known requests that ever ran, the latest first."""
        return (self.known[one] for one in reversed(self.known) if one in self.admitted)

    def was_seen(self, block_hash: str) -> bool:
        """Some request that ran has this block, or some group has or had it in the cache."""
        if any(one in self.admitted for one in self._sharers.get(block_hash, ())):
            return True
        keys = ((group, block_hash) for group in range(len(self.engine.groups)))
        return any(key in self._cached or key in self._gone for key in keys)

    def computing(self, block_hash: str, end: int) -> int | None:
        """A running request with this block that is not yet at the block's end, token `end`."""
        for one in self._sharers.get(block_hash, ()):
            if one in self.running and self.computed.get(one, 0) < end:
                return one
        return None

    def name(self, number: int) -> str:
        request = self.known.get(number)
        return "" if request is None else request.external_id

    # -- a step -------------------------------------------------------------------------------

    def follow(self, step: Step) -> Iterator[Admission]:
        """Apply one step. Yields each admission when the cache is as its lookup found it."""
        self._begin(step)
        self._apply(step.before, step.number)
        waiting = {one.request: one for one in step.record.admitted}
        for event in step.record.events:
            if isinstance(event, Allocated | Evicted | Cached | CachedPartial):
                admission = waiting.pop(event.request, None)
                if admission is not None:
                    yield admission
                    self._admit(admission.request)
            self._apply([event], step.number)
        for admission in waiting.values():  # the cache gave it all that it needed
            yield admission
            self._admit(admission.request)
        self._apply(step.after, step.number)
        for request in step.arrived:
            if request.status is not None:  # aborted before the step it arrives in
                self._end(request.number)

    def _begin(self, step: Step) -> None:
        if step.gap and self.first_gap is None:
            self.first_gap = step.number
        for share in step.scheduled:
            tokens = share.num_computed_tokens + share.num_scheduled_tokens
            self.computed[share.request.number] = tokens
        for request in step.arrived:
            self._learn(request)
        if step.gap:
            for request in step.requests:
                if request.number not in self.known:
                    self._learn(request)

    def _admit(self, number: int) -> None:
        self.running.add(number)
        self.admitted.add(number)

    def _learn(self, request: Request) -> None:
        self.known[request.number] = request
        for one in request.record.block_hashes:
            self._sharers.setdefault(one, {})[request.number] = None

    def _end(self, number: int) -> None:
        self.running.discard(number)
        self.computed.pop(number, None)
        request = self.known.get(number)
        if request is None or number in self._ended:
            return
        self._ended[number] = max(1, len(request.block_hashes))
        self._num_known += self._ended[number]
        while self._num_known > MAX_KNOWN_HASHES:
            oldest, count = self._ended.popitem(last=False)
            self._num_known -= count
            self._forget(oldest)

    def _forget(self, number: int) -> None:
        self.num_forgotten += 1
        self.admitted.discard(number)
        for one in self.known.pop(number).block_hashes:
            sharers = self._sharers.get(one)
            if sharers is not None:
                sharers.pop(number, None)
                if not sharers:
                    del self._sharers[one]

    # -- events -------------------------------------------------------------------------------

    def _apply(self, events: Sequence[AnyEvent], step: int) -> None:
        for event in events:
            match event:
                case Hashed():
                    for one in event.hashes:
                        self._sharers.setdefault(one, {})[event.request] = None
                case Cached():
                    self._cache(event, step)
                case CachedPartial():
                    self._cache_partial(event, step)
                case Evicted():
                    self._evict(event, step)
                case HashesMoved():
                    self._move(event)
                case CacheReset() if event.successful:
                    self._reset(step)
                case Preempted():
                    self.running.discard(event.request)
                case Finished():
                    self._end(event.request)
                case Freed() | _:
                    pass

    def _cache(self, event: Cached, step: int) -> None:
        request = self.known.get(event.request)
        if not 0 <= event.group < len(self.engine.groups):
            raise BadTraceError(
                f"step {step} of engine {self.engine.engine} caches blocks of group {event.group}, "
                "which it does not have; the trace is damaged, record it again"
            )
        pairs = zip(from_runs(event.block_ids), from_runs(event.block_indices), strict=False)
        for block, index in pairs:
            known = hash_of(request, self.engine, event.group, index)
            if known is not None:
                self._put((event.group, known), block, event.request, step)

    def _cache_partial(self, event: CachedPartial, step: int) -> None:
        request = self.known.get(event.request)
        entry = event.num_tokens // self.engine.hash_block_size - 1
        if request is not None and 0 <= entry < len(request.block_hashes):
            key = (event.group, request.block_hashes[entry])
            self._put(key, event.block_id, event.request, step)

    def _put(self, key: Key, block: int, request: int, step: int) -> None:
        entry = Entry(block, step, request, self.name(request))
        self._cached.setdefault(key, {})[block] = entry
        self._keys.setdefault(block, {})[key] = None
        self._gone.pop(key, None)

    def _evict(self, event: Evicted, step: int) -> None:
        key = (event.group, event.hash)
        entry = self._take(key, event.block_id)
        gone = Gone(step, False, entry, event.request, self.name(event.request))
        self._lose(key, gone)

    def _take(self, key: Key, block: int) -> Entry | None:
        blocks = self._cached.get(key, {})
        entry = blocks.pop(block, None)
        if not blocks:
            self._cached.pop(key, None)
        self._keys.get(block, {}).pop(key, None)
        return entry

    def _lose(self, key: Key, gone: Gone) -> None:
        self._gone.pop(key, None)
        self._gone[key] = gone
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _move(self, event: HashesMoved) -> None:
        for key in list(self._keys.get(event.source_block_id, ())):
            entry = self._take(key, event.source_block_id)
            if entry is not None:
                self._cached.setdefault(key, {})[event.target_block_id] = entry
                self._keys.setdefault(event.target_block_id, {})[key] = None

    def _reset(self, step: int) -> None:
        for key, blocks in self._cached.items():
            entry = next(iter(blocks.values()))
            self._lose(key, Gone(step, True, entry, -1, ""))
        self._cached.clear()
        self._keys.clear()
