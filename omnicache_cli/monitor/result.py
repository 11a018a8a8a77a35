"""A sample as JSON: the same names as in rules."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from omnicache_cli.monitor.events import EventCounts
from omnicache_cli.monitor.fleet import Sample
from omnicache_cli.monitor.measures import Measures
from omnicache_cli.monitor.rules import Finding, Unjudged
from omnicache_cli.monitor.traced import TracedRun
from omnicache_cli.monitor.values import Value


def result_of(sample: Sample, run: TracedRun | None = None) -> dict[str, Any]:
    """null stands for what is unknown, and `missing` says why."""
    return {
        "time": sample.time,
        "sample": sample.number,
        "window_seconds": sample.window_seconds,
        "is_whole": sample.is_whole,
        "all_engines": _measures(sample.all_engines),
        "servers": [
            {
                "url": server.name,
                "error": str(server.error) if server.error is not None else None,
                "all_engines": _measures(server.measures) if server.engines else None,
                "engines": [
                    {
                        "name": engine.name,
                        "labels": dict(engine.key.labels),
                        **_measures(engine.measures),
                    }
                    for engine in server.engines
                ],
            }
            for server in sample.servers
        ],
        "kv_events": [_events(name, counts) for name, counts in sample.events.items()],
        "findings": [_finding(one) for one in sample.findings],
        "not_judged": [_unjudged(one) for one in sample.unjudged],
        "run": run.as_result() if run is not None else None,
        "notes": sample.notes,
    }


def _measures(measures: Measures) -> dict[str, Any]:
    parts = {"window": measures.window, "lifetime": measures.lifetime, "now": measures.now}
    return {
        **{name: _numbers(part) for name, part in parts.items()},
        "lower_bounds": [
            f"{part}.{name}"
            for part, values in parts.items()
            for name, value in values.items()
            if value.is_above
        ],
        "missing": {
            f"{part}.{name}": value.missing
            for part, values in parts.items()
            for name, value in values.items()
            if value.number is None
        },
    }


def _numbers(values: Mapping[str, Value]) -> dict[str, float | int | None]:
    return {name: _number(value.number) for name, value in values.items()}


def _number(number: float | int | None) -> float | int | None:
    """A count without a point."""
    return int(number) if number is not None and float(number).is_integer() else number


def _events(endpoint: str, counts: EventCounts) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        **asdict(counts),
        "is_complete": counts.is_complete,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    rule = finding.rule
    return {
        "rule": rule.name,
        "when": rule.when,
        "severity": rule.severity,
        "evidence": finding.evidence,
        "reason": rule.reason,
        "causes": list(rule.causes),
        "next": list(rule.next_commands),
    }


def _unjudged(one: Unjudged) -> dict[str, Any]:
    return {"rule": one.rule.name, "when": one.rule.when, "why": one.why}
