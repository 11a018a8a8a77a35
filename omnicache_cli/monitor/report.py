"""A sample as a Report: what is read in a terminal, or passed on as a page."""

from collections.abc import Sequence

from omnicache_cli.monitor.fleet import PLOTTED, Moment, Sample
from omnicache_cli.monitor.measures import Measures
from omnicache_cli.monitor.result import result_of
from omnicache_cli.monitor.rules import Finding
from omnicache_cli.monitor.traced import TracedRun
from omnicache_cli.monitor.values import Value
from omnicache_cli.report.model import (
    MAX_PICTURE_COLUMNS,
    Cell,
    Facts,
    Lines,
    Mark,
    Picture,
    Report,
    Section,
    Table,
)

PERCENT = (
    ("kv_cache_hit_rate", "kv_cache_hit_rate, %"),
    ("external_cache_hit_rate", "external_cache_hit_rate, %"),
    ("mm_cache_hit_rate", "mm_cache_hit_rate, %"),
    ("cached_prompt_share", "cached_prompt_share, %"),
)
RATES = (
    ("prompt_tokens_per_second", "prompt tokens / s"),
    ("generation_tokens_per_second", "generation tokens / s"),
    ("requests_per_second", "finished requests / s"),
    ("evicted_blocks_per_second", "evicted blocks / s"),
    ("eviction_frequency", "eviction_frequency, blocks / step"),
)
COUNTS = (("preemptions", "preemptions"), ("finished_requests", "finished requests"))
LATENCIES = (
    ("ttft", "time to first token, ms"),
    ("itl", "inter-token latency, ms"),
    ("block_lifetime", "block lifetime, ms"),
    ("block_idle", "block idle before reuse, ms"),
)
LEVELS = (
    Mark("up to 10 %", 0.0),
    Mark("35 %", 0.25),
    Mark("60 %", 0.5),
    Mark("85 %", 0.75),
    Mark("over 85 %", 1.0),
)
"""Marks of a plot, by the upper end of the share that they stand for."""

ENDS = (0.10, 0.35, 0.60, 0.85)


def monitor_report(
    sample: Sample, history: Sequence[Moment] = (), run: TracedRun | None = None
) -> Report:
    """The whole of one sample."""
    sections: list[Section] = [_head(sample)]
    if sample.engines:
        sections += [_rates(sample.all_engines), _latencies(sample.all_engines)]
        sections.append(_pool(sample))
        if len(sample.engines) > 1:
            sections.append(_engines(sample))
    if sample.events:
        sections.append(_events(sample))
    if run is not None:
        sections += _run(sample, run)
    sections += _plots(history)
    sections.append(_findings(sample))
    unknown = _unknown(sample)
    if unknown:
        sections.append(Lines("Not known", unknown))
    if sample.notes:
        sections.append(Lines("Notes", sample.notes))
    names = ", ".join(server.name for server in sample.servers)
    return Report("monitor", f"Cache of {names}", result_of(sample, run), tuple(sections))


def _head(sample: Sample) -> Facts:
    items: dict[str, Cell] = {"samples": sample.number}
    if sample.window_seconds:
        what = "first to last sample, s" if sample.is_whole else "window, s"
        items[what] = round(sample.window_seconds, 1)
    items["engines"] = len(sample.engines)
    models = sorted({engine.key.get("model_name") or "?" for engine in sample.engines})
    if models:
        items["model"] = _few(models)
    for server in sample.servers:
        if server.error is not None:
            items[server.name] = f"not read: {server.error}"
    return Facts("", items)


def _rates(measures: Measures) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for key, title in PERCENT:
        window, ever = measures.window[key], measures.lifetime[key]
        rows.append((title, cell(window, 100), cell(ever, 100), window.basis or "-"))
    for key, title in RATES:
        rows.append((title, cell(measures.window[key]), None, ""))
    for key, title in COUNTS:
        rows.append((title, cell(measures.window[key]), cell(measures.lifetime[key]), ""))
    return Table("Rates", ("measure", "window", "lifetime", "of the window"), rows)


def _latencies(measures: Measures) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for key, title in LATENCIES:
        for name, values in (("window", measures.window), ("lifetime", measures.lifetime)):
            shares = [values[f"{key}_p{share}"] for share in (50, 90, 99)]
            if any(one.number is not None for one in shares):
                basis = next(one.basis for one in shares if one.number is not None)
                rows.append((title, name, *(cell(one, 1000) for one in shares), basis))
    return Table("Percentiles", ("histogram", "over", "p50", "p90", "p99", "of"), rows)


def _pool(sample: Sample) -> Facts:
    now = sample.all_engines.now
    items: dict[str, Cell] = {
        "running": cell(now["requests_running"]),
        "waiting": cell(now["requests_waiting"]),
        "pool in use, %": cell(now["kv_cache_usage"], 100),
        "pool in use, tokens": _of(now["kv_pool_tokens"], now["kv_pool_capacity_tokens"]),
    }
    if "num_blocks" in now:
        items["pool in use at most, %"] = cell(now["kv_cache_usage_peak"], 100)
        items["pool in use, blocks"] = _of(now["blocks_in_use"], now["num_blocks"])
    return Facts("Now", items)


def _of(part: Value, whole: Value) -> str | None:
    if whole.number is None:
        return None
    return f"{'?' if part.number is None else f'{part.number:.0f}'} of {whole.number:.0f}"


ENGINE_COLUMNS = (
    *("engine", "hit, %", "queried", "pool, %", "peak, %", "run", "wait", "preempt", "gen tok/s"),
    "ttft p90, ms",
)


def _engines(sample: Sample) -> Table:
    rows = [_engine(engine.name, engine.measures) for engine in sample.engines]
    rows.append(_engine("all", sample.all_engines))
    return Table("Engines, over the window", ENGINE_COLUMNS, rows, one_line_rows=True)


def _engine(name: str, measures: Measures) -> tuple[Cell, ...]:
    window, now = measures.window, measures.now
    peak = now.get("kv_cache_usage_peak")
    return (
        name,
        cell(window["kv_cache_hit_rate"], 100),
        cell(window["queried_tokens"]),
        cell(now["kv_cache_usage"], 100),
        cell(peak, 100) if peak is not None else None,
        cell(now["requests_running"]),
        cell(now["requests_waiting"]),
        cell(window["preemptions"]),
        cell(window["generation_tokens_per_second"]),
        cell(window["ttft_p90"], 1000),
    )


def cell(value: Value, factor: float = 1.0) -> Cell:
    """As many digits as say something; None where nothing is known."""
    if value.number is None:
        return None
    number = value.number * factor
    short: float | int = int(number) if number.is_integer() else float(f"{number:.4g}")
    return f"over {short}" if value.is_above else short


def _events(sample: Sample) -> Table:
    columns = ("endpoint", "batches", "stored", "evicted", "cleared", "missed", "replayed")
    return Table(
        "KV events since the start, block hashes",
        columns,
        [
            (
                name,
                counts.batches,
                counts.stored_hashes,
                counts.evicted_hashes,
                counts.clears,
                counts.missed_batches,
                counts.replayed_batches,
            )
            for name, counts in sample.events.items()
        ],
    )


def _run(sample: Sample, run: TracedRun) -> list[Section]:
    summary, lifetime = run.summary, sample.all_engines.lifetime
    items: dict[str, Cell] = {
        "read after the last sample, s": round(run.time - sample.time, 1),
        "kv_cache_hit_rate, %": _percent(summary.kv_cache_hit_rate),
        "eviction_frequency, blocks / step": summary.eviction_frequency,
        "beside the server": (
            run.agreement(lifetime["queried_tokens"], lifetime["hit_tokens"])
            if sample.engines
            else "the server is not read"
        ),
    }
    for modality, share in (summary.modal_cache_ratio or {}).items():
        items[f"modal_cache_ratio of {modality}, %"] = _percent(share)
    for modality, share in summary.hit_rate_by_modality.items():
        items[f"hit rate of {modality}, %"] = _percent(share)
    sections: list[Section] = [Facts(f"Recorded in {run.folder}", items)]
    if summary.stages:
        rows = [
            (one.stage_id, one.stage, one.num_arrived, one.queried_tokens, one.hit_tokens)
            for one in summary.stages.values()
        ]
        columns = ("stage", "name", "requests", "queried tokens", "hit tokens")
        sections.append(Table("Stages of the run", columns, rows))
    return sections


def _percent(share: float | None) -> float | None:
    return None if share is None else float(f"{100 * share:.4g}")


def _plots(history: Sequence[Moment]) -> list[Section]:
    """Shares as shades; a rate as a share of its own highest."""
    shown = list(history)[-MAX_PICTURE_COLUMNS:]
    if len(shown) < 3:
        return []
    rows: list[tuple[str, list[int | None]]] = []
    for key, label in (
        ("kv_cache_hit_rate", "hit rate"),
        ("kv_cache_usage", "pool in use"),
        (PLOTTED[1], "generation"),
    ):
        values = [one.values[key] for one in shown]
        highest = max((one for one in values if one is not None), default=0.0)
        scale = highest if key == PLOTTED[1] and highest else 1.0
        rows.append((label, [None if one is None else _level(one / scale) for one in values]))
    note = (
        "Between one sample and the next; the pool of the fullest engine; generation as a share "
        "of its highest. A gap: nothing was asked, or nothing is known."
    )
    return [Picture("Samples", LEVELS, rows, f"-{len(shown)}", "last", note=note)]


def _level(share: float) -> int:
    return sum(share > end for end in ENDS)


def _findings(sample: Sample) -> Lines:
    lines = [line for one in sample.findings for line in finding_lines(one)]
    return Lines("Findings", lines or ["none: no rule holds"])


def finding_lines(finding: Finding) -> list[str]:
    rule = finding.rule
    lines = [f"{rule.severity}: {rule.name}: {finding.evidence}"]
    if rule.reason:
        lines.append(f"  why it matters: {rule.reason}")
    lines += [f"  may be: {cause}" for cause in rule.causes]
    lines += [f"  next: {command}" for command in rule.next_commands]
    return lines


def _unknown(sample: Sample) -> list[str]:
    """Why something stands as -, each reason once; and what could not be judged for it."""
    reasons: dict[str, list[str]] = {}
    measures = sample.all_engines
    if sample.engines:
        for part, values in (("", measures.window), ("", measures.now)):
            for name, value in values.items():
                if value.number is None and name not in _SAID_BY_OTHERS:
                    reasons.setdefault(value.missing, []).append(f"{part}{name}")
        if not sample.window_seconds:  # then the lifetime is all that there is
            for name, _ in PERCENT:
                if (value := measures.lifetime[name]).number is None:
                    reasons.setdefault(value.missing, []).append(f"lifetime_{name}")
    lines = [f"{_few(names)}: {why}" for why, names in reasons.items()]
    return lines + [f"rule {one.rule.name}: not judged: {one.why}" for one in sample.unjudged]


_SAID_BY_OTHERS = frozenset(
    [f"{name}_p{share}" for name, _ in LATENCIES for share in (90, 99)]
    + ["evicted_blocks", "evicted_blocks_per_second"]
)
"""Measures that are missing exactly where another one is."""


def _few(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")
