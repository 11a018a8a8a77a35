"""Several servers over time: every tick's pages become one Sample, judged by the rules.

Keeps what the window needs and the whole run's first reading, so that its memory does not grow
with the number of ticks. Does no input or output.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from omnicache_cli.errors import BadInputError, OmnicacheError
from omnicache_cli.monitor.events import EventCounts
from omnicache_cli.monitor.ledger import Ledger, Reading, Span
from omnicache_cli.monitor.measures import EngineSpan, Evictions, Measures, measure
from omnicache_cli.monitor.page import EngineKey, read_page
from omnicache_cli.monitor.rules import Finding, Rule, Unjudged, judge
from omnicache_cli.monitor.scrape import Scraped, Target

MAX_TICKS = 120
"""Readings that a window is made of; of more, those in between are left out."""

HISTORY = 80
"""Samples that the plots show."""

PLOTTED = ("kv_cache_hit_rate", "generation_tokens_per_second")
"""Measures of the time between two samples, for the plots."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as a sample shows it."""

    name: str  # unique among all engines
    key: EngineKey
    measures: Measures


@dataclass(frozen=True, slots=True)
class ServerView:
    """`error`: why it has no page now; its engines are then missing."""

    name: str
    error: OmnicacheError | None
    engines: tuple[EngineView, ...]
    measures: Measures  # of its engines together


@dataclass(frozen=True, slots=True)
class Moment:
    """What the plots keep of one sample; None where nothing is known."""

    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything that is known at one tick."""

    number: int  # from 1
    time: float  # seconds since 1970
    window_seconds: float  # 0: one sample
    servers: tuple[ServerView, ...]
    all_engines: Measures
    findings: list[Finding]
    unjudged: list[Unjudged]
    events: Mapping[str, EventCounts]  # by endpoint, since it was listened to
    notes: list[str]
    is_whole: bool = False  # its window is all that was seen

    @property
    def engines(self) -> list[EngineView]:
        return [engine for server in self.servers for engine in server.engines]

    @property
    def errors(self) -> list[OmnicacheError]:
        return [server.error for server in self.servers if server.error is not None]


@dataclass(slots=True)
class _Tick:
    """One moment's readings; None for a server without a page."""

    time: float  # monotonic
    readings: list[Reading | None]
    peaks: list[dict[EngineKey, float]]  # highest usage since the tick before, by server
    events: list[EventCounts]


@dataclass(slots=True)
class Fleet:
    """Takes what was scraped, tick by tick."""

    targets: Sequence[Target]
    rules: Sequence[Rule]
    endpoints: Sequence[str] = ()
    window_seconds: float = 60.0
    history: deque[Moment] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _ledgers: list[Ledger] = field(init=False)
    _ticks: deque[_Tick] = field(default_factory=deque)
    _first: _Tick | None = None
    _last: _Tick | None = None
    _errors: list[OmnicacheError | None] = field(init=False)
    _missed: list[int] = field(init=False)  # samples without a page, by server
    _num_samples: int = 0
    _time: float = 0.0
    _event_notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ledgers = [Ledger(target.name) for target in self.targets]
        self._errors = [None] * len(self.targets)
        self._missed = [0] * len(self.targets)

    def add(
        self,
        scraped: Sequence[Scraped | OmnicacheError],
        *,
        monotonic: float,
        time: float,
        events: Sequence[EventCounts] = (),
        event_notes: Sequence[str] = (),
    ) -> Sample:
        """`scraped` in the order of the targets, `events` in that of the endpoints."""
        tick = _Tick(monotonic, [], [], list(events))
        for number, one in enumerate(scraped):
            reading, error = self._read(number, one)
            tick.readings.append(reading)
            self._errors[number] = error
            tick.peaks.append(_usages(reading))
        self._num_samples += 1
        self._time = time
        self._event_notes = list(event_notes)
        self._keep(tick)
        before = self._last
        self._first, self._last = self._first or tick, tick
        self._remember(before, tick)
        oldest = self._ticks[0]
        later = list(islice(self._ticks, 1, None))
        return self._sample(self._spans(oldest, later), oldest, tick)

    def whole(self) -> Sample | None:
        """From the first sample to the last; None before the first."""
        if self._first is None or self._last is None:
            return None
        spans = [
            ledger.whole() if reading is not None else None
            for ledger, reading in zip(self._ledgers, self._last.readings, strict=True)
        ]
        return self._sample(spans, self._first, self._last, is_whole=True)

    def _read(
        self, number: int, scraped: Scraped | OmnicacheError
    ) -> tuple[Reading | None, OmnicacheError | None]:
        name = self.targets[number].name
        if isinstance(scraped, OmnicacheError):
            self._missed[number] += 1
            return None, scraped
        try:
            page = read_page(scraped.text, name)
        except BadInputError as error:
            self._missed[number] += 1
            return None, error
        return self._ledgers[number].add(page, scraped.time), None

    def _keep(self, tick: _Tick) -> None:
        """Only what the window is made of, at most MAX_TICKS."""
        spacing = self.window_seconds / MAX_TICKS
        ticks = self._ticks
        if len(ticks) >= 2 and ticks[-1].time - ticks[-2].time < spacing:
            skipped = ticks.pop()
            for peaks, former in zip(tick.peaks, skipped.peaks, strict=True):
                for key, usage in former.items():
                    peaks[key] = max(usage, peaks.get(key, 0.0))
        ticks.append(tick)
        # Two samples at least, however far they are apart.
        while len(ticks) > 2 and ticks[1].time <= tick.time - self.window_seconds:
            ticks.popleft()

    def _spans(self, oldest: _Tick, later: Sequence[_Tick]) -> list[Span | None]:
        """Of each server, from its oldest reading among these ticks to the last one."""
        ticks = [oldest, *later]
        spans: list[Span | None] = []
        for number in range(len(self.targets)):
            new = ticks[-1].readings[number]
            found = [tick.readings[number] for tick in ticks]
            old = next((one for one in found if one is not None), None)
            if new is None or old is None:
                spans.append(None)
                continue
            peaks: dict[EngineKey, float] = {}
            for tick in ticks:
                for key, usage in tick.peaks[number].items():
                    peaks[key] = max(usage, peaks.get(key, 0.0))
            spans.append(Span(old, new, peaks))
        return spans

    def _remember(self, before: _Tick | None, tick: _Tick) -> None:
        if before is None:
            return
        spans = self._engine_spans(self._spans(before, [tick]))
        both = [one for server in spans for one in server]
        measures = measure(both) if both else Measures()
        values = {name: _number(measures, name) for name in PLOTTED}
        usages = [one.new.page.gauges.get("kv_cache_usage") for one in both]
        values["kv_cache_usage"] = max((one for one in usages if one is not None), default=None)
        self.history.append(Moment(values))

    def _engine_spans(self, spans: Sequence[Span | None]) -> list[list[EngineSpan]]:
        """By server."""
        found = []
        for ledger, span in zip(self._ledgers, spans, strict=True):
            engines = span.new.engines.items() if span is not None else ()
            found.append(
                [
                    EngineSpan(
                        ledger.name,
                        key,
                        span.old.engines.get(key),
                        totals,
                        span.seconds,
                        span.peaks.get(key),
                        len(span.new.engines),
                        ledger.is_balanced,
                    )
                    for key, totals in engines
                    if span is not None
                ]
            )
        return found

    def _sample(
        self, spans: Sequence[Span | None], old: _Tick, new: _Tick, *, is_whole: bool = False
    ) -> Sample:
        by_server = self._engine_spans(spans)
        name_of = _names(by_server)
        servers = tuple(
            ServerView(
                ledger.name,
                error,
                tuple(EngineView(name_of(one), one.key, measure([one])) for one in engines),
                measure(engines),
            )
            for ledger, error, engines in zip(self._ledgers, self._errors, by_server, strict=True)
        )
        evictions = self._evictions(old, new)
        everything = measure([one for engines in by_server for one in engines], evictions)
        engines = [(one.name, one.measures) for server in servers for one in server.engines]
        findings, unjudged = judge(self.rules, everything, engines)
        return Sample(
            self._num_samples,
            self._time,
            max((span.seconds for span in spans if span is not None), default=0.0),
            servers,
            everything,
            findings,
            unjudged,
            dict(zip(self.endpoints, new.events, strict=True)),
            self._notes(),
            is_whole,
        )

    def _notes(self) -> list[str]:
        outages = [
            f"{target.name}: {missed} of {self._num_samples} samples have no page of it"
            for target, missed in zip(self.targets, self._missed, strict=True)
            if missed
        ]
        seen = [line for ledger in self._ledgers for line in ledger.notes]
        return [*outages, *seen, *self._event_notes]

    def _evictions(self, old: _Tick, new: _Tick) -> Evictions | None:
        if not self.endpoints:
            return None
        pairs = list(zip(old.events, new.events, strict=True))
        return Evictions(
            sum(after.evicted_hashes - before.evicted_hashes for before, after in pairs),
            new.time - old.time,
            is_complete=all(
                after.missed_batches <= before.missed_batches
                and after.unreadable == before.unreadable
                for before, after in pairs
            ),
        )


def _usages(reading: Reading | None) -> dict[EngineKey, float]:
    engines = reading.engines.items() if reading is not None else ()
    return {
        key: totals.page.gauges["kv_cache_usage"]
        for key, totals in engines
        if "kv_cache_usage" in totals.page.gauges
    }


def _number(measures: Measures, name: str) -> float | None:
    value = measures.get(name)
    return value.number if value is not None else None


def _names(by_server: Sequence[Sequence[EngineSpan]]) -> Callable[[EngineSpan], str]:
    """How engines are called: with no more words than tell them apart."""
    is_one_server = len(by_server) == 1
    models = {one.key.get("model_name") for engines in by_server for one in engines}

    def name_of(one: EngineSpan) -> str:
        parts = [] if is_one_server else [one.server]
        if one.num_engines_of_server > 1 or is_one_server:
            parts.append(one.key.short if one.key.get("stage") else f"engine {one.key.short}")
        model = one.key.get("model_name")
        return " ".join([*parts, model] if len(models) > 1 and model else parts)

    return name_of
