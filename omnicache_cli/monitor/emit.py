"""A Grafana dashboard and Prometheus alerts, for those who go on watching with these.

Made from the same names and thresholds as the command's own rules.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omnicache_cli import __version__
from omnicache_cli.monitor.names import BY_KEY


@dataclass(frozen=True, slots=True)
class Emitted:
    text: str
    next_step: str


def _name(key: str) -> str:
    """As a page has it: counters with their ending."""
    metric = BY_KEY[key]
    return {
        "counter": f"{metric.name}_total",
        "gauge": metric.name,
        "histogram": f"{metric.name}_bucket",
        "observations": f"{metric.name}_count",
    }[metric.kind]


def _rate(key: str, span: str, by: str = "", where: str = "") -> str:
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({_name(key)}{where}[{span}]))"


def _ratio(part: str, whole: str, span: str, by: str = "", where: str = "") -> str:
    """Of sums: never a mean of ratios."""
    return f"{_rate(part, span, by, where)} / {_rate(whole, span, by, where)}"


def _quantile(share: float, key: str, span: str, where: str = "") -> str:
    return f"histogram_quantile({share}, {_rate(key, span, 'le', where)})"


# -- alerts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expr: str
    lasting: str
    severity: str
    summary: str
    description: str


def alerts() -> list[Alert]:
    """The default rules of the command, for Prometheus: hit rates of each job."""
    hit_rate = _ratio("hit_tokens", "queried_tokens", "10m", "job")
    before = _ratio("hit_tokens", "queried_tokens", "6h", "job")
    enough = f"sum by (job) (increase({_name('queried_tokens')}[10m])) >= 1000"
    return [
        Alert(
            "VllmPrefixCacheHitRateLow",
            f"({hit_rate}) < 0.85 and ({hit_rate}) > 0 and {enough}",
            "10m",
            "warning",
            "Less than 85 % of the queried prompt tokens hit",
            "Prompts repeat, for there are hits, and over 15 % of their tokens are computed "
            "again. Next: omnicache explain on a recorded run.",
        ),
        Alert(
            "VllmKvCachePoolFull",
            f"max by (job, instance, engine) ({_name('kv_cache_usage')}) > 0.95",
            "5m",
            "warning",
            "Over 95 % of the KV cache blocks are held by requests",
            "Hardly a block is left that another prompt could hit, and the next request waits or "
            "preempts. Next: omnicache kv-size.",
        ),
        Alert(
            "VllmPreemptions",
            f"sum by (job, instance, engine) (increase({_name('preemptions')}[10m])) > 0",
            "0m",
            "warning",
            "Requests are preempted",
            "A preempted request gives its blocks back and is computed again. Next: omnicache "
            "kv-size, and a smaller max_num_seqs.",
        ),
        Alert(
            "VllmPrefixCacheHitRateFalling",
            f"({hit_rate}) - ({before}) < -0.1 and {enough}",
            "10m",
            "warning",
            "The hit rate is over 10 points under that of the last six hours",
            "Another kind of traffic, a changed template, or a pool that holds too few of the "
            "prompts. Next: omnicache simulate on a recorded run.",
        ),
    ]


def alert_rules() -> Emitted:
    """YAML as Prometheus reads it. Every text is a JSON string, which YAML takes as it is."""
    lines = [
        f"# Written by omnicache {__version__}; the reasons are in its docs/monitor.md.",
        "groups:",
        "  - name: omnicache",
        "    rules:",
    ]
    for alert in alerts():
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.lasting}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.description)}",
        ]
    return Emitted(
        "\n".join(lines) + "\n",
        "next: name the file under rule_files in prometheus.yml, and: promtool check rules FILE",
    )


# -- dashboard --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # as Grafana names units
    queries: Sequence[tuple[str, str]]  # PromQL, legend
    what: str = ""
    highest: float | None = None


WHERE = '{model_name=~"$model"}'
SPAN = "$__rate_interval"


def panels() -> list[Panel]:
    ratios = {
        "KV prefix cache": ("hit_tokens", "queried_tokens"),
        "external cache": ("external_hit_tokens", "external_queried_tokens"),
        "multimodal processor cache": ("mm_hit_items", "mm_queried_items"),
        "cached share of prompt tokens": ("cached_prompt_tokens", "prompt_tokens"),
    }
    engine = "{{instance}} {{engine}}"
    return [
        Panel(
            "Hit rates",
            "percentunit",
            [
                (_ratio(part, whole, SPAN, where=WHERE), name)
                for name, (part, whole) in ratios.items()
            ],
            "Ratios of sums over all engines. A gap: nothing was asked of that cache.",
            1.0,
        ),
        Panel(
            "KV cache blocks held by requests",
            "percentunit",
            [(f"{_name('kv_cache_usage')}{WHERE}", engine)],
            "Cached blocks that no request holds count as free.",
            1.0,
        ),
        Panel(
            "Tokens per second",
            "short",
            [
                (_rate("prompt_tokens", SPAN, where=WHERE), "prompt"),
                (_rate("cached_prompt_tokens", SPAN, where=WHERE), "prompt, from the cache"),
                (_rate("generation_tokens", SPAN, where=WHERE), "generation"),
            ],
        ),
        Panel(
            "Requests",
            "short",
            [
                (f"sum ({_name('requests_running')}{WHERE})", "running"),
                (f"sum ({_name('requests_waiting')}{WHERE})", "waiting"),
            ],
        ),
        Panel(
            "Preemptions per second",
            "short",
            [(_rate("preemptions", SPAN, "instance, engine", WHERE), engine)],
        ),
        *(_latency(title, key) for title, key in _LATENCIES),
    ]


_LATENCIES = (
    ("Time to first token", "ttft"),
    ("Inter-token latency", "itl"),
    ("Idle time of a block before it is used anew", "block_idle"),
)


def _latency(title: str, key: str) -> Panel:
    queries = [
        (_quantile(share, key, SPAN, WHERE), f"p{share * 100:.0f}") for share in (0.5, 0.9, 0.99)
    ]
    what = "Only with --kv-cache-metrics, and sampled." if key == "block_idle" else ""
    return Panel(title, "s", queries, what)


def dashboard() -> Emitted:
    """One dashboard as Grafana imports it; it asks for the data source."""
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    content: dict[str, Any] = {
        "__inputs": [
            {
                "name": "DS_PROMETHEUS",
                "label": "Prometheus",
                "description": "",
                "type": "datasource",
                "pluginId": "prometheus",
                "pluginName": "Prometheus",
            }
        ],
        "uid": "omnicache-vllm",
        "title": "vLLM prefix cache",
        "description": f"Written by omnicache {__version__}.",
        "tags": ["vllm", "omnicache"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "model",
                    "label": "Model",
                    "type": "query",
                    "datasource": source,
                    "query": f"label_values({_name('requests_running')}, model_name)",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": [_panel(number, panel, source) for number, panel in enumerate(panels(), start=1)],
    }
    return Emitted(
        json.dumps(content, indent=2) + "\n",
        "next: in Grafana, Dashboards, New, Import, and choose the Prometheus that scrapes vLLM",
    )


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    width, height = 12, 8
    row, column = divmod(number - 1, 2)
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.highest is not None:
        defaults["max"] = panel.highest
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": source,
        "gridPos": {"x": column * width, "y": row * height, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": source, "expr": expr, "legendFormat": name}
            for at, (expr, name) in enumerate(panel.queries)
        ],
    }


EMITTERS: dict[str, Callable[[], Emitted]] = {"grafana": dashboard, "alerts": alert_rules}
"""By what --emit is given."""
