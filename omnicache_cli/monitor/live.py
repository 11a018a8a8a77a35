"""The live view: one screen that is drawn again with each sample."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omnicache_cli.monitor.fleet import Fleet, Moment, Sample
from omnicache_cli.monitor.report import PERCENT, RATES, cell
from omnicache_cli.monitor.values import Value
from omnicache_cli.report.layout import escaped
from omnicache_cli.report.text import text_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table

BARS = "▁▂▃▄▅▆▇█"
BARS_IN_ASCII = "_.:-=+*#"
SPARK_WIDTH = 40
MAX_ENGINES = 16
"""Rows of engines; the rest is counted."""

MAX_NOTES = 4


@contextmanager
def live_view() -> Iterator["LiveView"]:
    """On stdout, which is a terminal. What was there before stays above it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveView(live)


class LiveView:
    """Draws a sample. All text is escaped: names of models and engines come from strangers."""

    def __init__(self, live: "Live") -> None:
        self._live = live

    def show(self, fleet: Fleet, sample: Sample) -> None:
        self._live.update(screen(sample, list(fleet.history)), refresh=True)


def screen(sample: Sample, history: Sequence[Moment]) -> "Group":
    """Everything as rich shows it, without markup."""
    from rich.console import Group
    from rich.text import Text

    names = ", ".join(server.name for server in sample.servers)
    parts: list[Text | Table] = [
        Text(escaped(f"{names}   sample {sample.number}   window {sample.window_seconds:.0f} s"))
    ]
    for server in sample.servers:
        if server.error is not None:
            parts.append(Text(escaped(f"not read: {server.error}"), style="red"))
    if sample.engines:
        parts.append(_measures(sample, history))
    if len(sample.engines) > 1:
        parts.append(_engines(sample))
    for finding in sample.findings:
        style = "red" if finding.rule.severity == "critical" else "yellow"
        text = f"{finding.rule.severity}: {finding.rule.name}: {finding.evidence}"
        parts.append(Text(escaped(text), style="" if finding.rule.severity == "info" else style))
    parts += [Text(escaped(line), style="dim") for line in sample.notes[-MAX_NOTES:]]
    parts.append(Text("Ctrl-C ends and shows the whole of it", style="dim"))
    return Group(*parts)


def _measures(sample: Sample, history: Sequence[Moment]) -> "Table":
    measures, now = sample.all_engines, sample.all_engines.now
    table = _table("measure", "window", "lifetime", "samples")
    plots = {
        "kv_cache_hit_rate": spark(history, "kv_cache_hit_rate", 1.0),
        "generation_tokens_per_second": spark(history, "generation_tokens_per_second", None),
    }
    for key, title in PERCENT:
        row = (_text(measures.window[key], 100), _text(measures.lifetime[key], 100))
        _add(table, title, *row, plots.get(key, ""))
    pool = now["kv_pool_tokens"]
    usage = spark(history, "kv_cache_usage", 1.0)
    _add(table, "pool in use, %", _text(now["kv_cache_usage"], 100), "", usage)
    _add(table, "pool in use, tokens", _text(pool), "", "")
    _add(table, "running", _text(now["requests_running"]), "", "")
    _add(table, "waiting", _text(now["requests_waiting"]), "", "")
    for key, title in RATES:
        _add(table, title, _text(measures.window[key]), "", plots.get(key, ""))
    preemptions = (measures.window["preemptions"], measures.lifetime["preemptions"])
    _add(table, "preemptions", *map(_text, preemptions), "")
    for key, title in (("ttft", "TTFT"), ("itl", "ITL")):
        for share in (50, 99):
            name = f"{key}_p{share}"
            row = (_text(measures.window[name], 1000), _text(measures.lifetime[name], 1000))
            _add(table, f"{title} p{share}, ms", *row, "")
    return table


def _engines(sample: Sample) -> "Table":
    table = _table("engine", "hit, %", "pool, %", "running", "waiting", "preempted", "tokens / s")
    for engine in sample.engines[:MAX_ENGINES]:
        window, now = engine.measures.window, engine.measures.now
        _add(
            table,
            engine.name,
            _text(window["kv_cache_hit_rate"], 100),
            _text(now["kv_cache_usage"], 100),
            _text(now["requests_running"]),
            _text(now["requests_waiting"]),
            _text(window["preemptions"]),
            _text(window["generation_tokens_per_second"]),
        )
    if len(sample.engines) > MAX_ENGINES:
        _add(table, f"and {len(sample.engines) - MAX_ENGINES} more", *[""] * 6)
    return table


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 or name == "samples" else "right")
    return table


def _add(table: "Table", *cells: str) -> None:
    from rich.text import Text

    table.add_row(*(Text(escaped(one)) for one in cells))


def _text(value: Value, factor: float = 1.0) -> str:
    return text_of(cell(value, factor))


def spark(history: Sequence[Moment], key: str, highest: float | None) -> str:
    """A small plot, one column per sample; a blank where nothing is known.

    `highest`: the value of a full bar; None for the highest of those shown.
    """
    values = [one.values.get(key) for one in history[-SPARK_WIDTH:]]
    top = highest or max((one for one in values if one is not None), default=0.0) or 1.0
    bars = _bars()
    return "".join(
        " " if one is None else bars[min(len(bars) - 1, int(one / top * len(bars)))]
        for one in values
    )


def _bars() -> str:
    try:
        BARS.encode((sys.stdout.encoding if sys.stdout is not None else None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return BARS_IN_ASCII
    return BARS
