"""One Prometheus page, read into what each engine says of itself.

Owns the reading of a page; does not know where it came from or what came before it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from omnicache_cli.errors import BadInputError
from omnicache_cli.monitor.histogram import Buckets
from omnicache_cli.monitor.names import (
    CACHE_CONFIG,
    ENGINE_LABELS,
    HIT_RATE_GAUGES,
    MAX_VALUE,
    PREFIXES,
    RAY_PREFIX,
    SOUGHT,
    START_TIME,
    SUMMED_LABELS,
    Sought,
)

MAX_SHOWN = 80
"""Characters of a page that a message shows."""

MAX_ENGINES = 1024
MAX_SERIES = 16_384
"""Series whose labels are remembered from page to page; of more, some are read anew each time."""


class EngineKey(NamedTuple):
    """The labels of ENGINE_LABELS that an engine's metrics have: (name, value) pairs."""

    labels: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str | None:
        return dict(self.labels).get(name)

    @property
    def short(self) -> str:
        """What tells it apart for a reader: its number, or its stage and replica."""
        found = dict(self.labels)
        where = [found[name] for name in ("instance", "pod") if name in found]
        if "stage" in found:
            return " ".join([*where, f"stage {found['stage']}.{found.get('replica', '0')}"])
        return " ".join([*where, found.get("engine", "0")])


@dataclass(slots=True)
class Engine:
    """What one engine's series say at one moment. A metric that the page lacks has no entry."""

    key: EngineKey
    counters: dict[str, float] = field(default_factory=dict)  # by Metric.key, as the page has them
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)
    impossible: dict[str, str] = field(default_factory=dict)  # by Metric.key, why it is left out
    cache_config: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Page:
    """One scrape of one server."""

    engines: dict[EngineKey, Engine] = field(default_factory=dict)
    start_time: float | None = None  # of the server's process, seconds since 1970
    notes: list[str] = field(default_factory=list)  # what a reader must know of this page


def read_page(text: str, name: str) -> Page:
    """BadInputError, with `name` for the page: it is not Prometheus text, or not of a vLLM."""
    found = _Found(name)
    for series, value in _samples(text, name):
        found.add(series, value)
    if not found.engines:
        raise BadInputError(_not_vllm(text, name))
    page = Page(found.engines, found.start_time)
    _add_cache_config(page, found.cache_configs)
    page.notes = found.notes()
    return page


class _Series(NamedTuple):
    """What stands before the value of a sample: the same in every page of a server."""

    name: str
    labels: Mapping[str, str]
    engine: EngineKey
    identity: tuple[tuple[str, str], ...]  # the labels in order


@lru_cache(maxsize=MAX_SERIES)
def _series(text: str) -> _Series:
    """ValueError: not the beginning of a sample."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        ((sample,),) = (family.samples for family in text_string_to_metric_families(f"{text} 0"))
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(text) from error
    if sample.value or sample.timestamp is not None:  # there was more than labels
        raise ValueError(text)
    labels = sample.labels
    engine = EngineKey(tuple((one, labels[one]) for one in ENGINE_LABELS if one in labels))
    return _Series(sample.name, labels, engine, tuple(sorted(labels.items())))


# The value, and a time in milliseconds that some exporters add.
_VALUE = re.compile(r"[ \t]+(?P<value>[-+.0-9a-zA-Z]+)(?:[ \t]+-?\d+)?[ \t\r]*")


def _samples(text: str, name: str) -> Iterator[tuple[_Series, float]]:
    """The samples that are sought, with their values."""
    for number, line in enumerate(text.split("\n"), start=1):
        head = line.partition("{")[0].partition(" ")[0]
        if head not in _WANTED:
            continue
        # A value has no brace, so that the last one ends the labels.
        end = line.rfind("}") + 1 or len(head)
        try:
            value = _VALUE.fullmatch(line, end)
            if value is None:
                raise ValueError(line)
            sample = _series(line[:end]), float(value["value"])
        except ValueError:
            raise BadInputError(
                f"{name}: line {number} is no Prometheus sample: {line[:MAX_SHOWN]}; "
                "is it cut off, or changed on its way?"
            ) from None
        yield sample


_WANTED = frozenset([*SOUGHT, CACHE_CONFIG, START_TIME, *HIT_RATE_GAUGES])


class _Found:
    """What has been read of a page so far."""

    def __init__(self, name: str) -> None:
        self.page_name = name
        self.engines: dict[EngineKey, Engine] = {}
        self.cache_configs: list[Mapping[str, str]] = []
        self.start_time: float | None = None
        self.hit_rate_gauges = False
        self._names: dict[tuple[EngineKey, str], str] = {}  # under which name a metric was read
        self._old: dict[str, str] = {}  # former name: today's
        self._bad: dict[str, str] = {}  # name: a value that cannot be
        self._doubled: Counter[str] = Counter()
        self._seen: set[tuple[str, object]] = set()

    def add(self, series: _Series, value: float) -> None:
        name = series.name
        if (name, series.identity) in self._seen:
            self._doubled[name] += 1
            return
        self._seen.add((name, series.identity))
        if name == START_TIME:
            self.start_time = value if 0 <= value <= MAX_VALUE else None
        elif name == CACHE_CONFIG:
            self.cache_configs.append(series.labels)
        elif name in HIT_RATE_GAUGES:
            self._engine(series)
            self.hit_rate_gauges = True
        elif (sought := SOUGHT.get(name)) is not None:
            self._add_value(sought, series, value)

    def _engine(self, series: _Series) -> Engine:
        engine = self.engines.get(series.engine)
        if engine is None:
            if len(self.engines) >= MAX_ENGINES:
                raise BadInputError(
                    f"{self.page_name} has series of more than {MAX_ENGINES} engines; name single "
                    "servers"
                )
            engine = self.engines[series.engine] = Engine(series.engine)
        return engine

    def _add_value(self, sought: Sought, series: _Series, value: float) -> None:
        engine, key = self._engine(series), sought.metric.key
        known = self._names.setdefault((engine.key, key), sought.name)
        if known != sought.name:  # a server in between has both: today's name counts
            if sought.is_old:
                return
            self._names[engine.key, key] = sought.name
            _forget(engine, key)
        if key in engine.impossible:  # a sum or a histogram without one part would be another
            return
        if not 0 <= value <= sought.metric.most:
            self._bad[sought.name] = f"{value:g}"
            _forget(engine, key)
            engine.impossible[key] = f"{sought.name} has the value {value:g}, which it cannot have"
            return
        if sought.is_old:
            self._old[sought.name] = sought.metric.name
        if sought.metric.kind == "histogram":
            self._add_bucket(engine, sought, series.labels, value)
            return
        target = engine.gauges if sought.metric.kind == "gauge" else engine.counters
        if key in target and sought.name not in SUMMED_LABELS:
            self._doubled[sought.name] += 1
        else:
            target[key] = target.get(key, 0.0) + value

    def _add_bucket(
        self, engine: Engine, sought: Sought, labels: Mapping[str, str], value: float
    ) -> None:
        try:
            end = float(labels["le"])
        except (KeyError, ValueError):
            end = math.nan
        if math.isnan(end):
            self._bad[sought.name] = f"le={labels.get('le')}"
            return
        counts = engine.histograms.setdefault(sought.metric.key, Buckets()).counts
        if end in counts:
            self._doubled[sought.name] += 1
        else:
            counts[end] = value

    def notes(self) -> list[str]:
        name = self.page_name
        lines = [
            f"{name}: {old} is the name of an older vLLM; read as {new}"
            for old, new in sorted(self._old.items())
        ]
        has_hits = any("hit_tokens" in engine.counters for engine in self.engines.values())
        if self.hit_rate_gauges and not has_hits:
            lines.append(
                f"{name}: a vLLM before V1: its {HIT_RATE_GAUGES[0]} is a ratio without counts, "
                "from which no rate of a window follows; hit rates are unknown"
            )
        lines += [
            f"{name}: {metric} has the value {value}, which it cannot have; left out"
            for metric, value in sorted(self._bad.items())
        ]
        lines += [
            f"{name}: {metric} is there {count + 1} times for one engine; the first one counts"
            for metric, count in sorted(self._doubled.items())
        ]
        return lines


def _forget(engine: Engine, key: str) -> None:
    engine.counters.pop(key, None)
    engine.gauges.pop(key, None)
    engine.histograms.pop(key, None)
    engine.impossible.pop(key, None)


def _add_cache_config(page: Page, configs: list[Mapping[str, str]]) -> None:
    """vllm:cache_config_info has no model_name; the other labels tell whose it is."""
    for engine in page.engines.values():
        own = dict(engine.key.labels)
        matching = [
            config
            for config in configs
            if all(config.get(label, own.get(label)) == own.get(label) for label in ENGINE_LABELS)
        ]
        if len(matching) == 1:
            engine.cache_config = matching[0]


def _not_vllm(text: str, name: str) -> str:
    if f"\n{RAY_PREFIX}" in text or text.startswith(RAY_PREFIX):
        return (
            f"{name} is a page of Ray, which renames vLLM's metrics and counts per worker; "
            "name the /metrics of the vLLM servers behind it"
        )
    start = text.lstrip()[:1]
    if start in ("<", "{", "[") or not any(map(_is_sample, text.split("\n")[:200])):
        return f"{name} is not a page of Prometheus metrics; name a server's URL, http://host:port"
    if any(line.startswith(PREFIXES) for line in text.split("\n")):
        return f"{name} has metrics of vLLM, but none of an engine; is the server still starting?"
    return (
        f"{name} has Prometheus metrics, but none of vLLM; name a vLLM server, and start it "
        "without --disable-log-stats, which takes its metrics away"
    )


def _is_sample(line: str) -> bool:
    head, _, value = line.rpartition(" ")
    try:
        float(value)
    except ValueError:
        return line.startswith(("# HELP ", "# TYPE "))
    return bool(head)
