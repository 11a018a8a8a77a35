"""One Prometheus page, read into what each engine says of itself.

Owns the reading of a page; does not know where it came from or what came before it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from omnicache_cli.errors import BadInputError
from omnicache_cli.monitor.histogram import Buckets
from omnicache_cli.monitor.names import (
    CACHE_CONFIG,
    ENGINE_LABELS,
    HIT_RATE_GAUGES,
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
    cache_config: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Page:
    """One scrape of one server."""

    engines: dict[EngineKey, Engine] = field(default_factory=dict)
    start_time: float | None = None  # of the server's process, seconds since 1970
    notes: list[str] = field(default_factory=list)  # what a reader must know of this page


def read_page(text: str, name: str) -> Page:
    """BadInputError, with `name` for the page: it is not Prometheus text, or not of a vLLM."""
    page = Page()
    found = _Found()
    families = 0
    for sample, line in _samples(text, name):
        families += 1
        found.add(sample.name, sample.labels, float(sample.value), line)
    if not families:
        raise BadInputError(_not_vllm(text, name))
    page.start_time = found.start_time
    for key, values in found.engines.items():
        page.engines[key] = values
    if not page.engines:
        raise BadInputError(_not_vllm(text, name))
    _add_cache_config(page, found.cache_configs)
    page.notes = found.notes(name)
    return page


class _Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def _samples(text: str, name: str) -> Iterator[tuple[_Sample, int]]:
    """The samples that are sought, each with its line number."""
    from prometheus_client.parser import text_string_to_metric_families

    for number, line in enumerate(text.split("\n"), start=1):
        head = line.partition("{")[0].partition(" ")[0]
        if head not in _WANTED:
            continue
        try:
            for family in text_string_to_metric_families(line):
                for one in family.samples:
                    yield _Sample(one.name, one.labels, one.value), number
        except (ValueError, KeyError, IndexError, TypeError):
            raise BadInputError(
                f"{name}: line {number} is no Prometheus sample: {line[:MAX_SHOWN]}; "
                "is it cut off, or changed on its way?"
            ) from None


_WANTED = frozenset([*SOUGHT, CACHE_CONFIG, START_TIME, *HIT_RATE_GAUGES])


class _Found:
    """What has been read of a page so far."""

    def __init__(self) -> None:
        self.engines: dict[EngineKey, Engine] = {}
        self.cache_configs: list[dict[str, str]] = []
        self.start_time: float | None = None
        self.hit_rate_gauges = False
        self._names: dict[tuple[EngineKey, str], str] = {}  # under which name a metric was read
        self._old: dict[str, str] = {}  # former name: today's
        self._bad: dict[str, str] = {}  # name: a value that cannot be
        self._doubled: Counter[str] = Counter()
        self._seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()

    def add(self, name: str, labels: dict[str, str], value: float, line: int) -> None:
        series = (name, tuple(sorted(labels.items())))
        if series in self._seen:
            self._doubled[name] += 1
            return
        self._seen.add(series)
        if name == START_TIME:
            self.start_time = value if math.isfinite(value) else None
        elif name == CACHE_CONFIG:
            self.cache_configs.append(labels)
        elif name in HIT_RATE_GAUGES:
            self._engine(labels)
            self.hit_rate_gauges = True
        else:
            self._add_value(SOUGHT[name], labels, value)

    def _engine(self, labels: dict[str, str]) -> Engine:
        key = EngineKey(tuple((one, labels[one]) for one in ENGINE_LABELS if one in labels))
        if key not in self.engines:
            if len(self.engines) >= MAX_ENGINES:
                raise BadInputError(
                    f"the page has series of more than {MAX_ENGINES} engines; name single servers"
                )
            self.engines[key] = Engine(key)
        return self.engines[key]

    def _add_value(self, sought: Sought, labels: dict[str, str], value: float) -> None:
        engine, key = self._engine(labels), sought.metric.key
        known = self._names.setdefault((engine.key, key), sought.name)
        if known != sought.name:  # a server in between has both: today's name counts
            if sought.is_old:
                return
            self._names[engine.key, key] = sought.name
            _forget(engine, key)
        if not math.isfinite(value) or value < 0:
            self._bad[sought.name] = f"{value:g}"
            _forget(engine, key)
            self._names[engine.key, key] = ""  # nothing else is taken for it
            return
        if sought.is_old:
            self._old[sought.name] = sought.metric.name
        if sought.metric.kind == "histogram":
            self._add_bucket(engine, sought, labels, value)
            return
        target = engine.gauges if sought.metric.kind == "gauge" else engine.counters
        if key in target and sought.name not in SUMMED_LABELS:
            self._doubled[sought.name] += 1
        else:
            target[key] = target.get(key, 0.0) + value

    def _add_bucket(
        self, engine: Engine, sought: Sought, labels: dict[str, str], value: float
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

    def notes(self, name: str) -> list[str]:
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


def _add_cache_config(page: Page, configs: list[dict[str, str]]) -> None:
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
