"""What `omnicache monitor` reads of a page of metrics: real ones, old ones, broken ones."""

import contextlib
import random

import pytest

from omnicache_cli.errors import BadInputError
from omnicache_cli.monitor.histogram import INFINITY, Buckets, Quantile, summed
from omnicache_cli.monitor.page import Engine, read_page
from tests.unit.metrics_server import AFTER, IDLE, OMNI

OLD = """\
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 40.0
vllm:time_per_output_token_seconds_bucket{le="0.1",model_name="m"} 3.0
vllm:time_per_output_token_seconds_bucket{le="+Inf",model_name="m"} 4.0
"""


def only(text: str) -> Engine:
    (engine,) = read_page(text, "http://s").engines.values()
    return engine


def test_a_page_of_vllm_0_30_is_read_as_it_stands() -> None:
    engine = only(AFTER)

    assert engine.key.labels == (("model_name", "sliding"), ("engine", "0"))
    assert engine.counters == {
        **{"queried_tokens": 12846, "hit_tokens": 8960},
        **{"external_queried_tokens": 0, "external_hit_tokens": 0},
        **{"mm_queried_items": 0, "mm_hit_items": 0},
        **{"prompt_tokens": 12846, "cached_prompt_tokens": 8960, "generation_tokens": 576},
        **{"preemptions": 0, "finished_requests": 24, "steps": 576},
    }
    assert engine.gauges == {"requests_running": 0, "requests_waiting": 0, "kv_cache_usage": 0}
    assert {name: one.total for name, one in engine.histograms.items()} == {
        **{"ttft": 24, "itl": 552},
        **{"block_lifetime": 217, "block_idle": 217},
    }
    # Two groups: a request takes blocks of both, so 99 blocks of 32 tokens are not 3168 tokens.
    config = engine.cache_config
    assert (config["num_gpu_blocks"], config["block_size"]) == ("100", "32")
    assert config["kv_cache_size_tokens"] == "1575"
    assert read_page(AFTER, "s").notes == []
    assert only(IDLE).counters["queried_tokens"] == 0


def test_the_stages_of_vllm_omni_are_engines() -> None:
    page = read_page(OMNI, "s")

    assert [(key.short, one.counters["prompt_tokens"]) for key, one in page.engines.items()] == [
        ("stage 0.0", 242),
        ("stage 1.0", 0),
        ("stage 2.0", 0),
    ]
    assert [dict(one.cache_config) for one in page.engines.values()] == [{}, {}, {}]
    assert page.notes == []


def test_former_names_are_read_and_said_once_each() -> None:
    page = read_page(OLD, "s")
    (engine,) = page.engines.values()

    assert engine.counters == {"queried_tokens": 100, "hit_tokens": 40}
    assert engine.gauges == {"kv_cache_usage": 0.25}
    assert engine.histograms["itl"].counts == {0.1: 3, INFINITY: 4}
    assert page.notes == [
        "s: vllm:gpu_cache_usage_perc is the name of an older vLLM; read as "
        "vllm:kv_cache_usage_perc",
        "s: vllm:gpu_prefix_cache_hits is the name of an older vLLM; read as "
        "vllm:prefix_cache_hits",
        "s: vllm:gpu_prefix_cache_queries is the name of an older vLLM; read as "
        "vllm:prefix_cache_queries",
        "s: vllm:time_per_output_token_seconds is the name of an older vLLM; read as "
        "vllm:inter_token_latency_seconds",
    ]


@pytest.mark.parametrize("old_first", [True, False])
def test_where_both_names_stand_the_new_one_counts(old_first: bool) -> None:
    old = 'vllm:gpu_prefix_cache_hits_total{engine="0"} 40.0\n'
    new = 'vllm:prefix_cache_hits_total{engine="0"} 41.0\n'

    assert only(old + new if old_first else new + old).counters == {"hit_tokens": 41}


def test_the_ratio_of_an_engine_before_v1_gives_no_rate_and_says_so() -> None:
    page = read_page('vllm:gpu_prefix_cache_hit_rate{model_name="m"} 0.5\n', "s")

    (engine,) = page.engines.values()
    assert engine.counters == {}
    assert page.notes == [
        "s: a vLLM before V1: its vllm:gpu_prefix_cache_hit_rate is a ratio without counts, from "
        "which no rate of a window follows; hit rates are unknown"
    ]


@pytest.mark.parametrize("value", ["NaN", "-1.0", "+Inf", "1e999", "9" * 400])
def test_a_value_that_cannot_be_is_left_out_and_said(value: str) -> None:
    page = read_page(
        f'vllm:prefix_cache_hits_total{{engine="0"}} {value}\n'
        'vllm:prefix_cache_queries_total{engine="0"} 5.0\n',
        "s",
    )

    (engine,) = page.engines.values()
    assert engine.counters == {"queried_tokens": 5}
    (note,) = page.notes
    assert note.startswith("s: vllm:prefix_cache_hits has the value ")


def test_labels_are_read_as_prometheus_writes_them() -> None:
    text = (
        'vllm:prefix_cache_hits_total {model_name="a}\\"\\\\ {\\n b" , engine="0",} 5 1700000000\n'
        "vllm:prefix_cache_queries_total 7\r\n"
    )
    page = read_page(text, "s")

    assert [(key.labels, one.counters) for key, one in page.engines.items()] == [
        ((("model_name", 'a}"\\ {\n b'), ("engine", "0")), {"hit_tokens": 5}),
        ((), {"queried_tokens": 7}),
    ]


def test_a_doubled_series_counts_once_and_is_said() -> None:
    line = 'vllm:prefix_cache_hits_total{engine="0"} 5.0\n'
    page = read_page(line + line, "s")

    (engine,) = page.engines.values()
    assert engine.counters == {"hit_tokens": 5}
    assert page.notes == [
        "s: vllm:prefix_cache_hits_total is there 2 times for one engine; the first one counts"
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is not a page of Prometheus metrics"),
        ("<!DOCTYPE html><html><body>vllm:x</body></html>", "is not a page of Prometheus metrics"),
        ('{"object": "error"}', "is not a page of Prometheus metrics"),
        ("\x00\x01\xff garbage \n\n more", "is not a page of Prometheus metrics"),
        ('python_info{version="3.11"} 1.0\n', "but none of vLLM; name a vLLM server"),
        ('# HELP vllm:x x\nvllm:cache_config_info{engine="0"} 1.0\n', "but none of an engine"),
        ('ray_vllm_kv_cache_usage_perc{WorkerId="1"} 0\n', "is a page of Ray"),
        ('vllm:prefix_cache_hits_total{engine="0"} five\n', "line 1 is no Prometheus sample"),
        ('\nvllm:prefix_cache_hits_total{engine="0', "line 2 is no Prometheus sample"),
        ("vllm:prefix_cache_hits_total\n", "line 1 is no Prometheus sample"),
        ('vllm:prefix_cache_hits_total{engine="0"} 1_000\n', "line 1 is no Prometheus sample"),
        ('vllm:prefix_cache_hits_total{engine="0"} 5 # {a="b"} 1\n', "line 1 is no Prometheus"),
        ('vllm:prefix_cache_hits_total{engine="0",engine="1"} 5\n', "line 1 is no Prometheus"),
    ],
)
def test_what_is_no_page_of_vllm_is_said_in_one_line(text: str, what: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_page(text, "http://s")

    assert what in str(caught.value)
    assert str(caught.value).startswith("http://s")


def test_no_garbage_is_a_crash() -> None:
    """A real page with bytes changed, taken out and doubled: read, or refused in one line."""
    chance = random.Random(1)
    lines = [line for line in AFTER.splitlines() if line.startswith("vllm:")]
    read = 0
    for _ in range(300):
        text = "\n".join(chance.sample(lines, 40))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(text))
            new = chance.choice(['"', "{", "}", ",", "=", "\\", "\n", " ", "é", "\x00", "9", ""])
            text = text[:at] + new + text[at + chance.randrange(3) :]
        with contextlib.suppress(BadInputError):
            read_page(text, "s")
            read += 1
    assert 100 < read < 300


# -- histograms -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        # The rule of PromQL's histogram_quantile, by hand.
        ({1.0: 10, 2.0: 20, INFINITY: 20}, 0.25, Quantile(0.5)),
        ({1.0: 10, 2.0: 20, INFINITY: 20}, 0.5, Quantile(1.0)),
        ({1.0: 10, 2.0: 20, INFINITY: 20}, 0.75, Quantile(1.5)),
        ({1.0: 10, 2.0: 20, INFINITY: 20}, 1.0, Quantile(2.0)),
        ({1.0: 0, 2.0: 4, INFINITY: 4}, 0.5, Quantile(1.5)),
        ({1.0: 10, 2.0: 20, INFINITY: 40}, 0.9, Quantile(2.0, is_above=True)),
        ({1.0: 10, 2.0: 9, INFINITY: 20}, 0.5, Quantile(1.0)),  # not read in one instant
        ({0.0: 4, 1.0: 4, INFINITY: 4}, 0.5, Quantile(0.0)),
        ({INFINITY: 4}, 0.5, None),
        ({1.0: 0, INFINITY: 0}, 0.5, None),
        ({1.0: 3}, 0.5, None),
        ({}, 0.5, None),
    ],
)
def test_a_percentile_is_that_of_histogram_quantile(
    counts: dict[float, float], share: float, expected: Quantile | None
) -> None:
    assert Buckets(counts).quantile(share) == expected


def test_histograms_of_other_ends_are_summed_over_those_they_share() -> None:
    one = Buckets({1.0: 1, 2.0: 2, INFINITY: 3})
    other = Buckets({1.0: 10, 4.0: 30, INFINITY: 40})

    assert summed([one, other]).counts == {1.0: 11, INFINITY: 43}
    assert summed([]).counts == {}
