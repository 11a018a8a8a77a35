"""What the scheduler's records of a run add up to so far, per engine."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from omnicache_cli.trace.records import (
    AfterStep,
    AnyEvent,
    AnyRecord,
    End,
    EngineSource,
    Evicted,
    Finished,
    Freed,
    Gap,
    Header,
    Preempted,
    RequestRecord,
    SchedulerStep,
    num_values,
)

RATE_WINDOW_NS = 5_000_000_000
"""Steps and tokens a second are those of the last five seconds that were not idle."""

IDLE_NS = 1_000_000_000
"""An engine without an open request for longer than this was idle. A shorter pause belongs to the
pace of whoever sends the requests."""


@dataclass(slots=True)
class EngineTotals:
    """One engine, as of its last record."""

    source: EngineSource
    num_steps: int = 0
    last_step: int | None = None  # None: no step yet; the same of the next one
    num_free_blocks: int | None = None
    scheduled_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    preemptions: int = 0
    num_arrived: int = 0
    num_finished: int = 0
    _running: int | None = None  # after the last schedule()
    _waiting: int | None = None
    _scheduled: int = 0  # requests of the last step
    _recent: deque[tuple[int, int, int]] = field(default_factory=deque)
    # instants, with steps and tokens by then: at most a window's, thinned out
    _idle_ns: int = 0  # idle time so far; the instants above leave it out
    _empty_since: int | None = None  # the instant since which no request is open

    @property
    def num_running(self) -> int | None:
        """As vLLM said after its last schedule(), as far as they have not ended since."""
        return None if self._running is None else min(self._running, self._num_open)

    @property
    def num_waiting(self) -> int | None:
        """The same of those that wait."""
        if self._running is None or self._waiting is None:
            return None
        return min(self._waiting, max(0, self._num_open - min(self._running, self._num_open)))

    @property
    def _num_open(self) -> int:
        return max(0, self.num_arrived - self.num_finished)

    @property
    def _is_empty(self) -> bool:
        return self.num_arrived > 0 and not self._num_open

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens per queried token so far; None: the cache was never asked."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else None

    @property
    def occupancy(self) -> float | None:
        """Share of the pool that is not free; None without a step, or without a pool."""
        blocks = self.source.num_gpu_blocks - 1  # the null block is never handed out
        if self.num_free_blocks is None or not blocks:
            return None
        return (blocks - self.num_free_blocks) / blocks

    def rate(self) -> tuple[float, float] | None:
        """Steps and tokens a second; None: less than two steps."""
        if len(self._recent) < 2:
            return None
        (first, steps, tokens), (last, more_steps, more_tokens) = self._recent[0], self._recent[-1]
        if last <= first:
            return None
        seconds = (last - first) / 1e9
        return (more_steps - steps) / seconds, (more_tokens - tokens) / seconds

    def add_request(self, record: RequestRecord) -> None:
        """One that is told again after a lost record counts once."""
        if record.request < self.num_arrived:
            return
        self.num_arrived = record.request + 1
        if self._empty_since is not None:
            pause_ns = record.arrival_ns - self._empty_since
            self._idle_ns += pause_ns if pause_ns > IDLE_NS else 0
            self._empty_since = None

    def add_step(self, record: SchedulerStep) -> None:
        if record.scheduled is not None:
            self._scheduled = len(record.scheduled)
        tokens = record.num_scheduled_tokens
        self.num_steps += 1
        self.last_step = record.step
        self._running, self._waiting = record.num_running, record.num_waiting
        self.num_free_blocks = record.num_free_blocks
        self.scheduled_tokens += self._scheduled if tokens is None else sum(tokens)
        for one in record.admitted:
            if not one.resumed and one.session_prompt_tokens is None:
                self.queried_tokens += one.queried_tokens
                self.hit_tokens += one.hit_tokens
        self.add_events(record.events)
        self._remember(record.start_ns - self._idle_ns)
        if self._is_empty:  # also a step that only tells the workers of requests that have ended
            self._empty_since = max(self._empty_since or 0, record.start_ns)

    def add_after(self, record: AfterStep) -> None:
        self.add_events(record.events)
        if self.num_free_blocks is not None:
            freed = (one.block_ids for one in record.events if isinstance(one, Freed))
            self.num_free_blocks += sum(map(num_values, freed))
        if self._is_empty and self._empty_since is None:
            self._empty_since = record.at_ns

    def add_events(self, events: Iterable[AnyEvent]) -> None:
        before: AnyEvent | None = None
        for event in events:
            match event:
                case Evicted():  # a block that loses several hashes at once counts once
                    same = isinstance(before, Evicted) and before.block_id == event.block_id
                    self.evicted_blocks += not same
                case Preempted():
                    self.preemptions += 1
                case Finished():
                    self.num_finished += 1
            before = event

    def _remember(self, instant_ns: int) -> None:
        point = (instant_ns, self.num_steps, self.scheduled_tokens)
        recent = self._recent
        if len(recent) > 1 and instant_ns - recent[-2][0] < RATE_WINDOW_NS // 50:
            recent[-1] = point  # fifty points a window are enough
        else:
            recent.append(point)
        while len(recent) > 2 and instant_ns - recent[1][0] > RATE_WINDOW_NS:
            recent.popleft()


class RunTotals:
    """All engines of a run. Memory: what is known of an engine, and nothing of its requests."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineTotals] = {}
        self.num_dropped = 0  # records that could not be written
        self.num_records = 0  # that were counted
        self.ended_files: set[str] = set()
        self._by_source: dict[tuple[str, int], EngineTotals] = {}

    def add(self, file: str, record: AnyRecord) -> None:
        """Count one record. What belongs to no engine that is known is left out."""
        self.num_records += 1
        match record:
            case EngineSource():
                engine = self.engines.setdefault(record.engine, EngineTotals(record))
                self._by_source[file, record.source] = engine
            case RequestRecord() | SchedulerStep() | AfterStep():
                known = self._by_source.get((file, record.source))
                if known is not None:
                    _count(known, record)
            case Gap():
                self.num_dropped += record.dropped
            case End():
                self.ended_files.add(file)
            case Header():
                self.ended_files.discard(file)


def _count(engine: EngineTotals, record: RequestRecord | SchedulerStep | AfterStep) -> None:
    match record:
        case RequestRecord():
            engine.add_request(record)
        case SchedulerStep():
            engine.add_step(record)
        case AfterStep():
            engine.add_after(record)
