"""What `omnicache monitor --emit` writes for Grafana and Prometheus.

All expressions were also parsed with promql-parser 0.11.0, which the tests do not depend on.
"""

import json
import re
import sys

import pytest
import yaml

from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.monitor.emit import alert_rules, dashboard
from tests.unit.metrics_server import AFTER

FUNCTIONS = {"sum", "max", "rate", "increase", "histogram_quantile", "by", "and"}
OF_A_PAGE = {line.partition("{")[0] for line in AFTER.splitlines() if line.startswith("vllm:")}


def check_expression(expr: str) -> set[str]:
    """The metrics that it names. Brackets match, and every word is one that is known."""
    opened: list[str] = []
    for char in re.sub(r'"[^"]*"', "", expr):
        if char in "([{":
            opened.append({"(": ")", "[": "]", "{": "}"}[char])
        elif char in ")]}":
            assert opened.pop() == char, expr
    assert opened == [], expr
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]|by \([^)]*\)', "", expr)
    metrics = set(re.findall(r"vllm:[a-z_]+", bare))
    words = set(re.findall(r"[a-z_]+", re.sub(r"vllm:[a-z_]+|\{[^}]*\}", "", bare)))
    assert words <= FUNCTIONS, words
    return metrics


def test_the_alerts_are_yaml_and_name_metrics_that_vllm_has() -> None:
    content = yaml.safe_load(alert_rules().text)

    assert content.keys() == {"groups"}
    (group,) = content["groups"]
    assert group.keys() == {"name", "rules"}
    assert [rule["alert"] for rule in group["rules"]] == [
        "VllmPrefixCacheHitRateLow",
        "VllmKvCachePoolFull",
        "VllmPreemptions",
        "VllmPrefixCacheHitRateFalling",
    ]
    for rule in group["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert check_expression(rule["expr"]) <= OF_A_PAGE
        assert re.fullmatch(r"\d+[mh]", rule["for"])
        assert rule["labels"] == {"severity": "warning"}
        assert all(isinstance(text, str) for text in rule["annotations"].values())


def test_a_hit_rate_is_a_ratio_of_sums() -> None:
    low = yaml.safe_load(alert_rules().text)["groups"][0]["rules"][0]["expr"]

    assert low.startswith(
        "(sum by (job) (rate(vllm:prefix_cache_hits_total[10m])) / "
        "sum by (job) (rate(vllm:prefix_cache_queries_total[10m]))) < 0.85"
    )


def test_the_dashboard_is_what_grafana_imports() -> None:
    content = json.loads(dashboard().text)

    assert [one["name"] for one in content["__inputs"]] == ["DS_PROMETHEUS"]
    assert content["schemaVersion"] >= 36
    assert content["title"] == "vLLM prefix cache"
    panels = content["panels"]
    assert len({one["id"] for one in panels}) == len(panels) == 8
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells  # no panel lies over another
        taken |= cells
        assert panel["type"] == "timeseries"
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == [chr(65 + at) for at in range(len(letters))]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${DS_PROMETHEUS}"
            assert check_expression(target["expr"]) <= OF_A_PAGE
    (variable,) = content["templating"]["list"]
    assert variable["query"] == "label_values(vllm:num_requests_running, model_name)"


@pytest.mark.parametrize("what", ["grafana", "alerts"])
def test_the_command_writes_it_and_asks_no_server(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["omnicache", "monitor", "--emit", what])

    assert exit_code_of_run() == 0
    out, err = capsys.readouterr()
    assert out == {"grafana": dashboard, "alerts": alert_rules}[what]().text
    assert err.startswith("next: ")
