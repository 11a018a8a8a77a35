"""Samples one a line, as vmstat does: for a pipe, a log, or a terminal without a live view."""

from omnicache_cli.monitor.fleet import Sample
from omnicache_cli.monitor.report import cell
from omnicache_cli.monitor.values import Value
from omnicache_cli.report.layout import escaped
from omnicache_cli.report.text import text_of

COLUMNS = (
    *("sample", "window_s", "hit_%", "ever_%", "queried", "pool_%", "running", "waiting"),
    *("preempted", "gen_tok/s", "ttft_p90_ms", "findings"),
)
WIDTHS = tuple(max(7, len(name)) for name in COLUMNS)
EVERY = 20
"""Lines under one heading."""


def lines_of(sample: Sample) -> str:
    """One line, with the heading before the first and every 20th."""
    measures = sample.all_engines
    window, now = measures.window, measures.now
    cells = [str(sample.number), f"{sample.window_seconds:.1f}"]
    if sample.engines:
        cells += [
            _text(window["kv_cache_hit_rate"], 100),
            _text(measures.lifetime["kv_cache_hit_rate"], 100),
            _text(window["queried_tokens"]),
            _text(now["kv_cache_usage"], 100),
            _text(now["requests_running"]),
            _text(now["requests_waiting"]),
            _text(window["preemptions"]),
            _text(window["generation_tokens_per_second"]),
            _text(window["ttft_p90"], 1000),
        ]
    else:
        cells += ["-"] * 9
    cells.append(",".join(escaped(one.rule.name) for one in sample.findings) or "-")
    heading = [_line(list(COLUMNS))] if sample.number % EVERY == 1 else []
    return "".join([*heading, _line(cells)])


def _line(cells: list[str]) -> str:
    return " ".join(one.rjust(width) for one, width in zip(cells, WIDTHS, strict=True)) + "\n"


def _text(value: Value, factor: float = 1.0) -> str:
    return text_of(cell(value, factor)).replace("over ", ">")
