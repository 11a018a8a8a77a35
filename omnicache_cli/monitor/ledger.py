"""One server's pages over time: what its counters rose by, also across a restart.

A counter that starts again is a restart of its engine. All of that engine's counters are then
taken from zero, also those that have already overtaken their former value; what was counted
between the last page and the restart is lost, and the increase is "at least".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from omnicache_cli.monitor.histogram import INFINITY, Buckets
from omnicache_cli.monitor.page import Engine, EngineKey, Page

MAX_NOTES = 50
MAX_PEAKS = 4096


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """`counters` and `histograms` have risen by so much since the engine was first seen.

    They keep what this page left out; `known_...` are the last values that a page had of each.
    """

    counters: Mapping[str, float]
    histograms: Mapping[str, Buckets]
    page: Engine  # as the page has it: since the engine started
    known_counters: Mapping[str, float]
    known_histograms: Mapping[str, Buckets]


@dataclass(frozen=True, slots=True)
class Reading:
    """One page at its time, in seconds of a clock that never goes back."""

    time: float
    engines: Mapping[EngineKey, EngineTotals]


@dataclass(frozen=True, slots=True)
class Span:
    """From one reading to a later one, or to the same where there is only one."""

    old: Reading
    new: Reading
    peaks: Mapping[EngineKey, float] = field(default_factory=dict)  # highest kv_cache_usage between

    @property
    def seconds(self) -> float:
        return self.new.time - self.old.time


class Ledger:
    """Takes the pages of one server as they come. Its memory does not grow with their number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first: Reading | None = None
        self.last: Reading | None = None
        self.peaks: dict[EngineKey, float] = {}
        self.is_balanced = False  # several servers answer by turns
        self._start_time: float | None = None
        self._former_start_times: set[float] = set()
        self._notes: dict[str, None] = {}  # in the order in which they came up

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    def note(self, line: str) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.setdefault(line)

    def add(self, page: Page, time: float) -> Reading:
        """The page as a reading. Pages come in the order of their times."""
        for line in page.notes:
            self.note(line)
        restarted = self._is_another_process(page.start_time)
        before = self.last.engines if self.last is not None else {}
        engines: dict[EngineKey, EngineTotals] = {}
        for key, engine in page.engines.items():
            last = before.get(key)
            if last is None:
                if self.last is not None:
                    self.note(f"{self.name}: engine {key.short} is new; it counts from now")
                engines[key] = EngineTotals(
                    dict.fromkeys(engine.counters, 0.0),
                    {name: _zeros(one) for name, one in engine.histograms.items()},
                    engine,
                    engine.counters,
                    engine.histograms,
                )
            else:
                is_reset = restarted or _has_fallen(last, engine)
                if is_reset:
                    self.note(
                        f"{self.name}: engine {key.short} has restarted: its counters began again "
                        "at 0; what it counted just before is lost, so increases are at least these"
                    )
                engines[key] = _advanced(last, engine, is_reset=is_reset)
            if (usage := engine.gauges.get("kv_cache_usage")) is not None:
                self.peaks[key] = max(usage, self.peaks.get(key, 0.0))
        if len(self.peaks) > MAX_PEAKS:  # engines that come and go, each under a new name
            self.peaks = {key: peak for key, peak in self.peaks.items() if key in engines}
        for key in before.keys() - engines.keys():
            self.note(f"{self.name}: engine {key.short} is gone; it counts no longer")
        self.last = Reading(time, engines)
        self.first = self.first or self.last
        return self.last

    def whole(self) -> Span | None:
        """From the first page to the last."""
        if self.first is None or self.last is None:
            return None
        return Span(self.first, self.last, self.peaks)

    def _is_another_process(self, start_time: float | None) -> bool:
        if start_time is None or start_time == self._start_time:
            return False
        is_other = self._start_time is not None
        if start_time in self._former_start_times:
            self.is_balanced = True
            self.note(
                f"{self.name}: several servers answer by turns, as behind a load balancer, so no "
                "rate follows from two pages; name each server's own URL"
            )
        if self._start_time is not None and len(self._former_start_times) < MAX_NOTES:
            self._former_start_times.add(self._start_time)
        self._start_time = start_time
        return is_other


def _has_fallen(last: EngineTotals, engine: Engine) -> bool:
    return any(
        value < last.known_counters.get(key, 0.0) for key, value in engine.counters.items()
    ) or any(
        one.total < last.known_histograms[key].total
        for key, one in engine.histograms.items()
        if key in last.known_histograms
    )


def _advanced(last: EngineTotals, engine: Engine, *, is_reset: bool) -> EngineTotals:
    """A metric that was not there before starts at zero: nobody knows what it was."""

    def risen(value: float, before: float | None, total: float) -> float:
        if before is None:
            return total
        return total + (value if is_reset else max(0.0, value - before))

    counters = {
        key: risen(value, last.known_counters.get(key), last.counters.get(key, 0.0))
        for key, value in engine.counters.items()
    }
    histograms = {}
    for key, one in engine.histograms.items():
        before = last.known_histograms.get(key, Buckets()).counts
        totals = last.histograms.get(key, Buckets()).counts
        histograms[key] = Buckets(
            {
                end: risen(count, before.get(end), totals.get(end, 0.0))
                for end, count in one.counts.items()
            }
        )
    # After a restart nobody knows the value of what is left out.
    kept_counters = {} if is_reset else last.known_counters
    kept_histograms = {} if is_reset else last.known_histograms
    return EngineTotals(
        {**last.counters, **counters},
        {**last.histograms, **histograms},
        engine,
        {**kept_counters, **engine.counters},
        {**kept_histograms, **engine.histograms},
    )


def _zeros(buckets: Buckets) -> Buckets:
    return Buckets(dict.fromkeys(buckets.counts, 0.0))


def histogram_between(old: EngineTotals | None, new: EngineTotals, key: str) -> Buckets | None:
    """The observations between two readings; None: the page has no such histogram."""
    after = new.histograms.get(key) if key in new.page.histograms else None
    if after is None or INFINITY not in after.counts:
        return None
    before = old.histograms.get(key, Buckets()).counts if old is not None else {}
    return Buckets({end: count - before.get(end, 0.0) for end, count in after.counts.items()})
