"""From pages to measures: windows, restarts, sums, and what is not known."""

import io
import random
from pathlib import Path

import pytest

from omnicache_cli.errors import EngineFailedError
from omnicache_cli.monitor.default_rules import default_rules
from omnicache_cli.monitor.events import EventCounts
from omnicache_cli.monitor.fleet import MAX_TICKS, Sample
from omnicache_cli.monitor.lines import lines_of
from omnicache_cli.monitor.live import screen
from omnicache_cli.monitor.report import monitor_report
from omnicache_cli.monitor.traced import read_traced
from omnicache_cli.monitor.values import Value
from omnicache_cli.report.html import as_html
from omnicache_cli.report.json import as_json, as_json_line
from omnicache_cli.report.text import as_text
from tests.unit.metrics_pages import fleet_of, page_of, tick
from tests.unit.metrics_server import AFTER, IDLE, OMNI
from tests.unit.run_builder import two_rounds

AWAY = EngineFailedError("s0 cannot be reached")


def window(sample: Sample, name: str) -> float | None:
    return sample.all_engines.window[name].number


def why(sample: Sample, name: str) -> str:
    value = sample.all_engines.get(name)
    assert value is not None
    assert value.number is None
    return value.missing


def test_a_window_is_what_rose_and_lifetime_is_what_stands() -> None:
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {"queried": 1000, "hit": 900, "generated": 50}}))
    sample = tick(fleet, 4, page_of({"0": {"queried": 1400, "hit": 1000, "generated": 70}}))

    rate = sample.all_engines.window["kv_cache_hit_rate"]
    assert rate == Value(0.25, basis="100 of 400 queried tokens")
    assert sample.all_engines.lifetime["kv_cache_hit_rate"].number == 1000 / 1400
    assert window(sample, "kv_cache_hit_rate_change") == 0.25 - 0.9
    assert window(sample, "generation_tokens_per_second") == 5
    assert sample.window_seconds == 4


def test_one_sample_has_no_window() -> None:
    sample = tick(fleet_of(), 0, page_of({"0": {"queried": 1000, "hit": 900}}))

    assert why(sample, "kv_cache_hit_rate") == "one sample has no window"
    assert sample.all_engines.lifetime["kv_cache_hit_rate"].number == 0.9


def test_the_real_pages_give_what_the_responses_said() -> None:
    fleet = fleet_of()
    tick(fleet, 0, IDLE)
    sample = tick(fleet, 10, AFTER)

    assert window(sample, "kv_cache_hit_rate") == 8960 / 12846
    assert window(sample, "cached_prompt_share") == 8960 / 12846
    assert window(sample, "steps") == 576
    assert sample.all_engines.now["kv_pool_capacity_tokens"].number == 1575
    assert sample.all_engines.now["num_blocks"].number == 99
    # By hand, of the page's cumulative counts 0 up to 10 ms, 13 up to 20 ms and 22 up to 40 ms.
    assert window(sample, "ttft_p50") == pytest.approx(0.01 + 0.01 * (12 - 0) / (13 - 0))
    assert window(sample, "ttft_p90") == pytest.approx(0.02 + 0.02 * (21.6 - 13) / (22 - 13))


# -- restarts ---------------------------------------------------------------------------------


def test_a_restart_is_bridged_and_said() -> None:
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {"queried": 1000, "hit": 900}}, started=1))
    tick(fleet, 2, page_of({"0": {"queried": 1200, "hit": 1000}}, started=1))
    sample = tick(fleet, 4, page_of({"0": {"queried": 50, "hit": 10}}, started=2))

    assert window(sample, "queried_tokens") == 200 + 50
    assert window(sample, "hit_tokens") == 100 + 10
    assert sample.all_engines.lifetime["queried_tokens"].number == 50
    assert why(sample, "kv_cache_hit_rate_change") == "nothing was queried before the window"
    assert sample.notes == [
        "http://s0: engine 0 has restarted: its counters began again at 0; what it counted just "
        "before is lost, so increases are at least these"
    ]


def test_a_restart_resets_also_the_counters_that_have_overtaken_themselves() -> None:
    """Hits fell, queries did not: without the engine's other counters they would rise by 50."""
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {"queried": 100, "hit": 90}}, started=None))
    sample = tick(fleet, 2, page_of({"0": {"queried": 150, "hit": 10}}, started=None))

    assert window(sample, "queried_tokens") == 150
    assert window(sample, "hit_tokens") == 10


def test_another_process_is_a_restart_though_no_counter_fell() -> None:
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {"queried": 100, "hit": 50}}, started=1))
    sample = tick(fleet, 2, page_of({"0": {"queried": 150, "hit": 60}}, started=2))

    assert (window(sample, "queried_tokens"), window(sample, "hit_tokens")) == (150, 60)


def test_only_the_engine_that_restarted_is_reset() -> None:
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {"queried": 100}, "1": {"queried": 100}}, started=None))
    sample = tick(fleet, 2, page_of({"0": {"queried": 130}, "1": {"queried": 20}}, started=None))

    assert [one.measures.window["queried_tokens"].number for one in sample.engines] == [30, 20]
    assert window(sample, "queried_tokens") == 50


def test_a_histogram_is_bridged_over_a_restart_too() -> None:
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {}}, ttft={"0": {"1.0": 8, "2.0": 10, "+Inf": 10}}, started=1))
    sample = tick(
        fleet, 2, page_of({"0": {}}, ttft={"0": {"1.0": 0, "2.0": 4, "+Inf": 4}}, started=2)
    )

    assert window(sample, "ttft_p50") == 1.5  # of the four after the restart


def test_servers_by_turns_are_recognised_and_give_no_rates() -> None:
    fleet = fleet_of()
    for at in range(4):
        sample = tick(fleet, at, page_of({"0": {"queried": 100 + at}}, started=1 + at % 2))

    assert (
        why(sample, "kv_cache_hit_rate") == "several servers answer by turns; name each one's URL"
    )
    assert any("as behind a load balancer" in note for note in sample.notes)


def test_an_engine_that_comes_later_counts_from_then() -> None:
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {"queried": 100, "hit": 0}}))
    tick(fleet, 2, page_of({"0": {"queried": 100, "hit": 0}, "1": {"queried": 999, "hit": 9}}))
    sample = tick(
        fleet, 4, page_of({"0": {"queried": 110, "hit": 0}, "1": {"queried": 1009, "hit": 19}})
    )

    assert window(sample, "queried_tokens") == 20
    assert window(sample, "hit_tokens") == 10
    assert sample.notes == ["http://s0: engine 1 is new; it counts from now"]


def test_an_engine_that_goes_is_said() -> None:
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {"queried": 100}, "1": {"queried": 100}}))
    sample = tick(fleet, 2, page_of({"0": {"queried": 110}}))

    assert window(sample, "queried_tokens") == 10
    assert sample.notes == ["http://s0: engine 1 is gone; it counts no longer"]


# -- sums -------------------------------------------------------------------------------------


def two_servers() -> Sample:
    fleet = fleet_of(2)
    tick(
        fleet,
        0,
        page_of({"0": {"queried": 0, "hit": 0, "usage": 0.0}}, capacity=1000),
        page_of({"0": {"queried": 0, "hit": 0, "usage": 0.0}}, capacity=3000),
    )
    return tick(
        fleet,
        2,
        page_of({"0": {"queried": 10, "hit": 9, "usage": 0.5}}, capacity=1000),
        page_of({"0": {"queried": 990, "hit": 99, "usage": 0.1}}, capacity=3000),
    )


def test_a_ratio_of_several_is_that_of_their_sums() -> None:
    sample = two_servers()

    rates = [server.measures.window["kv_cache_hit_rate"].number for server in sample.servers]
    assert rates == [0.9, 0.1]
    assert window(sample, "kv_cache_hit_rate") == 108 / 1000  # their mean is 0.5
    assert [one.name for one in sample.engines] == ["http://s0", "http://s1"]


def test_pools_are_summed_in_tokens() -> None:
    now = two_servers().all_engines.now

    assert now["kv_pool_tokens"].number == 500 + 300
    assert now["kv_pool_capacity_tokens"].number == 4000
    assert now["kv_cache_usage"].number == 0.2


def test_histograms_are_summed_before_the_percentile() -> None:
    fleet = fleet_of(2)
    nothing = {"0": {"1.0": 0, "2.0": 0, "+Inf": 0}}
    tick(fleet, 0, page_of({"0": {}}, ttft=nothing), page_of({"0": {}}, ttft=nothing))
    sample = tick(
        fleet,
        2,
        page_of({"0": {}}, ttft={"0": {"1.0": 90, "2.0": 90, "+Inf": 90}}),
        page_of({"0": {}}, ttft={"0": {"1.0": 0, "2.0": 10, "+Inf": 10}}),
    )

    assert window(sample, "ttft_p50") == 50 / 90
    assert window(sample, "ttft_p99") == pytest.approx(1.9)


def test_a_percentile_in_the_last_bucket_is_a_lower_bound() -> None:
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {}}, ttft={"0": {"1.0": 0, "+Inf": 0}}))
    sample = tick(fleet, 2, page_of({"0": {}}, ttft={"0": {"1.0": 1, "+Inf": 9}}))

    assert sample.all_engines.window["ttft_p90"] == Value(
        1.0, is_above=True, basis="9 observations"
    )


def test_num_gpu_blocks_of_a_data_parallel_server_is_of_all_engines() -> None:
    """vLLM writes the sum under each engine's label; summing them again would double it."""
    page = page_of({"0": {"usage": 0.5}, "1": {"usage": 0.1}}, capacity=800, num_gpu_blocks=202)
    sample = tick(fleet_of(), 0, page)

    assert sample.all_engines.now["kv_pool_capacity_tokens"].number == 1600
    blocks = sample.engines[0].measures.now["num_blocks"]
    assert blocks.missing == "num_gpu_blocks is of all 2 engines of the server"
    assert [one.name for one in sample.engines] == ["engine 0", "engine 1"]


def test_the_peak_of_the_pool_is_seen_between_the_samples_that_are_kept() -> None:
    fleet = fleet_of(window=1000.0)
    for at in range(20):
        usage = 0.99 if at == 7 else 0.1
        sample = tick(fleet, float(at), page_of({"0": {"usage": usage}}))

    assert sample.engines[0].measures.now["kv_cache_usage_peak"].number == 0.99
    assert sample.engines[0].measures.now["kv_cache_usage"].number == 0.1


# -- what is not known ------------------------------------------------------------------------


def test_what_is_missing_is_said_and_no_zero() -> None:
    fleet = fleet_of()
    tick(fleet, 0, page_of({"0": {"queried": 0, "hit": 0, "mm_queried": 0, "mm_hit": 0}}))
    sample = tick(fleet, 2, page_of({"0": {"queried": 0, "hit": 0, "mm_queried": 0, "mm_hit": 0}}))

    assert why(sample, "kv_cache_hit_rate") == "no token in the window"
    assert why(sample, "mm_cache_hit_rate") == "no multimodal item in the window"
    assert why(sample, "external_cache_hit_rate") == "not exposed by this server"
    assert why(sample, "cached_prompt_share") == "not exposed by this server"
    assert why(sample, "ttft_p50") == "not exposed by this server"
    assert why(sample, "block_lifetime_p50").endswith("start the server with --kv-cache-metrics")
    assert "--kv-events-config" in why(sample, "eviction_frequency")
    assert "kv_cache_size_tokens" in why(sample, "kv_pool_capacity_tokens")


def test_a_sum_of_which_a_part_is_missing_is_missing() -> None:
    fleet = fleet_of(2)
    for at, count in ((0, 0), (2, 10)):
        sample = tick(
            fleet, at, page_of({"0": {"queried": count, "hit": 1}}), page_of({"0": {"usage": 0.5}})
        )

    assert sample.servers[0].measures.window["queried_tokens"].number == 10
    assert why(sample, "kv_cache_hit_rate") == "not exposed by this server (http://s1, engine 0)"


def test_prefix_caching_that_is_off_is_the_reason() -> None:
    page = page_of({"0": {"queried": 0, "hit": 0}}).replace(
        'block_size="16"', 'block_size="16",enable_prefix_caching="False"'
    )
    fleet = fleet_of()
    tick(fleet, 0, page)

    assert why(tick(fleet, 1, page), "kv_cache_hit_rate") == (
        "prefix caching is off: enable_prefix_caching is False"
    )


def test_latencies_of_stages_are_not_one_sum() -> None:
    fleet = fleet_of()
    tick(fleet, 0, OMNI)
    sample = tick(fleet, 2, OMNI)

    assert why(sample, "ttft_p50") == "of one stage, not of a pipeline: see each stage"
    assert why(sample, "requests_running") == "of one stage, not of a pipeline: see each stage"
    assert [one.name for one in sample.engines] == ["stage 0.0", "stage 1.0", "stage 2.0"]
    stage = sample.engines[0].measures
    assert stage.lifetime["ttft_p50"].basis == "2 observations"
    assert sample.all_engines.lifetime["prompt_tokens"].number == 242


# -- servers that go and come -------------------------------------------------------------------


def test_a_server_that_is_away_is_no_part_of_the_sum_and_comes_back() -> None:
    fleet = fleet_of(2)
    tick(fleet, 0, page_of({"0": {"queried": 0}}), page_of({"0": {"queried": 0}}))
    away = tick(fleet, 2, AWAY, page_of({"0": {"queried": 5}}))
    back = tick(fleet, 4, page_of({"0": {"queried": 100}}), page_of({"0": {"queried": 10}}))

    assert away.errors == [AWAY]
    assert window(away, "queried_tokens") == 5
    assert window(back, "queried_tokens") == 110
    assert back.errors == []
    assert back.notes == ["http://s0: 1 of 3 samples have no page of it"]


def test_the_whole_is_from_the_first_to_the_last_sample() -> None:
    fleet = fleet_of(window=2.0)
    for at in range(10):
        page = page_of({"0": {"queried": 100 * at, "usage": 0.9 if at == 1 else 0.1}})
        sample = tick(fleet, float(at), page)
    whole = fleet.whole()

    assert window(sample, "queried_tokens") == 200
    assert whole is not None
    assert window(whole, "queried_tokens") == 900
    assert whole.window_seconds == 9
    assert whole.engines[0].measures.now["kv_cache_usage_peak"].number == 0.9
    assert sample.engines[0].measures.now["kv_cache_usage_peak"].number == 0.1


def test_what_is_kept_does_not_grow() -> None:
    fleet = fleet_of(window=50.0)
    for at in range(700):
        tick(fleet, at / 10, page_of({"0": {"queried": at}}))

    assert len(fleet._ticks) <= MAX_TICKS + 2
    assert len(fleet.history) == 80


# -- evictions --------------------------------------------------------------------------------


def test_evictions_are_those_of_the_window_by_second_and_by_step() -> None:
    fleet = fleet_of(endpoints=["tcp://a:1"])
    tick(fleet, 0, page_of({"0": {"steps": 10}}), events=[EventCounts(evicted_hashes=5)])
    sample = tick(fleet, 4, page_of({"0": {"steps": 20}}), events=[EventCounts(evicted_hashes=13)])

    assert window(sample, "evicted_blocks") == 8
    assert window(sample, "evicted_blocks_per_second") == 2
    assert window(sample, "eviction_frequency") == 0.8
    assert not sample.all_engines.window["evicted_blocks"].is_above


def test_evictions_with_a_gap_in_the_window_are_at_least_these() -> None:
    fleet = fleet_of(endpoints=["tcp://a:1"])
    tick(fleet, 0, page_of({"0": {"steps": 10}}), events=[EventCounts()])
    counts = EventCounts(evicted_hashes=3, missed_batches=2)
    sample = tick(fleet, 4, page_of({"0": {"steps": 20}}), events=[counts])

    assert sample.all_engines.window["evicted_blocks"].is_above
    assert sample.all_engines.window["eviction_frequency"].is_above


def test_no_sequence_of_pages_is_a_crash() -> None:
    """Lines that come and go, wild values, servers away: every sample can be told in every form."""
    from rich.console import Console

    chance = random.Random(7)
    lines = [line for line in (AFTER + OMNI).splitlines() if line.startswith("vllm:")]
    wild = ["0", "1", "-1", "NaN", "+Inf", "1e300", "5e-324", "12846.5"]
    fleet = fleet_of(2, rules=default_rules(None), endpoints=["tcp://a:1"], window=5.0)
    for at in range(40):
        pages: list[str | EngineFailedError] = []
        for _ in range(2):
            if chance.random() < 0.1:
                pages.append(AWAY)
                continue
            some = chance.sample(lines, chance.randrange(1, 400))
            changed = [
                f"{line.rpartition(' ')[0]} {chance.choice(wild)}"
                if chance.random() < 0.1
                else line
                for line in some
            ]
            pages.append(f"process_start_time_seconds {chance.randrange(3)}\n" + "\n".join(changed))
        counts = EventCounts(evicted_hashes=at, missed_batches=chance.randrange(2))
        sample = tick(fleet, at / 3, *pages, events=[counts])
        report = monitor_report(sample, list(fleet.history))
        for form in (as_text, as_json, as_json_line):
            assert form(report)
        assert at % 10 or as_html(report)
        assert lines_of(sample)
        Console(file=io.StringIO()).print(screen(sample, list(fleet.history)))
    assert fleet.whole() is not None


def test_a_run_is_held_against_what_the_server_counted(tmp_path: Path) -> None:
    run = read_traced(two_rounds().write(tmp_path / "run"))  # 80 queried tokens, 32 of them hits

    assert run.agreement(Value(80), Value(32)) == "the server has counted the same lookups and hits"
    assert run.agreement(Value(90), Value(32)) == (
        "the server has counted 32 of 90 queried tokens, the run 32 of 80: another server, or one "
        "that goes on"
    )
    assert run.agreement(Value(None, "not exposed"), Value(None, "not exposed")) == (
        "the server does not say what it counted: not exposed"
    )


# -- labels and values that cannot be -------------------------------------------------------------


@pytest.mark.parametrize("label", ["9" * 6000, "9" * 19, "-5", "", "1e3", "\u0663", "x", "1.5"])
def test_a_label_that_is_no_count_is_not_known(label: str) -> None:
    text = page_of({"0": {"usage": 0.5}}, capacity=1600)
    for name, value in (("kv_cache_size_tokens", "1600"), ("num_gpu_blocks", "101")):
        text = text.replace(f'{name}="{value}"', f'{name}="{label}"')
    now = tick(fleet_of(), 0, text).all_engines.now

    for measure, name in (
        ("kv_pool_capacity_tokens", "kv_cache_size_tokens"),
        ("kv_pool_tokens", "kv_cache_size_tokens"),
        ("num_blocks", "num_gpu_blocks"),
        ("blocks_in_use", "num_gpu_blocks"),
    ):
        assert now[measure].number is None
        assert now[measure].missing == (f"not known: {name} of vllm:cache_config_info is no count")


@pytest.mark.parametrize("value", ["1e308", "9" * 6000, "1e19"])
def test_a_value_that_no_sum_could_hold_is_left_out(value: str) -> None:
    text = page_of({"0": {"usage": 0.5, "queried": 7}}, capacity=1600, started=None)
    text = text.replace("} 0.5", f"}} {value}").replace("} 7", f"}} {value}")
    fleet = fleet_of()
    tick(fleet, 0, f"process_start_time_seconds {value}\n{text}")
    sample = tick(fleet, 1, f"process_start_time_seconds {value}\n{text}")

    assert sample.all_engines.now["kv_cache_usage"].number is None
    assert sample.all_engines.now["blocks_in_use"].number is None
    assert sample.all_engines.lifetime["queried_tokens"].number is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-5"])
def test_a_value_that_cannot_be_is_said_to_be_one_and_not_to_be_missing(value: str) -> None:
    text = page_of({"0": {"queried": 50, "hit": 7, "usage": 0.5}})
    text = text.replace("} 7", f"}} {value}").replace("} 0.5", "} 1.5")
    fleet = fleet_of()
    tick(fleet, 0, text)
    sample = tick(fleet, 1, text)

    seen = f"{float(value):g}"
    what = f"vllm:prefix_cache_hits has the value {seen}, which it cannot have"
    assert why(sample, "hit_tokens") == what
    assert why(sample, "kv_cache_hit_rate") == what
    assert why(sample, "lifetime_kv_cache_hit_rate") == what
    assert why(sample, "kv_cache_usage") == (
        "vllm:kv_cache_usage_perc has the value 1.5, which it cannot have"
    )
    assert f"http://s0: {what}; left out" in sample.notes
    assert sample.all_engines.window["queried_tokens"].number == 0


def test_a_sum_or_a_histogram_with_one_part_that_cannot_be_is_not_known() -> None:
    text = page_of({"0": {"finished": 5}}, ttft={"0": {"0.1": 3, "+Inf": 4}})
    text = text.replace('le="0.1",model_name="m"} 3', 'le="0.1",model_name="m"} NaN')
    bad = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} -1\n'
    for page in (text + bad, bad + text):
        sample = tick(fleet_of(), 0, page)
        assert why(sample, "lifetime_finished_requests") == (
            "vllm:request_success has the value -1, which it cannot have"
        )
        assert why(sample, "lifetime_ttft_p50") == (
            "vllm:time_to_first_token_seconds has the value nan, which it cannot have"
        )


def test_hits_that_exceed_queries_give_no_rate() -> None:
    fleet = fleet_of(2)
    tick(fleet, 0, *[page_of({"0": {"queried": 0, "hit": 0}})] * 2)
    sane = page_of({"0": {"queried": 90_000, "hit": 9}})
    sample = tick(fleet, 1, page_of({"0": {"queried": 1000, "hit": 5000}}), sane)

    what = "hit_tokens exceed queried_tokens (5000 of 1000), which cannot be; the rate is not known"
    assert why(sample, "kv_cache_hit_rate") == what
    assert why(sample, "lifetime_kv_cache_hit_rate") == what
    assert sample.all_engines.window["hit_tokens"].number == 5009
    assert sample.servers[1].measures.window["kv_cache_hit_rate"].number == 9 / 90_000
    assert what in " ".join(as_text(monitor_report(sample)).split())
    once = tick(fleet_of(), 0, page_of({"0": {"queried": 1000, "hit": 5000}}))
    assert f"lifetime_kv_cache_hit_rate: {what}" in " ".join(as_text(monitor_report(once)).split())


def test_a_page_with_a_value_that_cannot_be_loses_nothing_of_the_next() -> None:
    fleet = fleet_of()
    for at, count in enumerate((0, 100, float("nan"), 200)):
        text = page_of({"0": {"queried": count, "hit": 0}}, ttft={"0": {"1": count, "+Inf": count}})
        sample = tick(fleet, at, text)

    assert window(sample, "queried_tokens") == 200
    assert sample.all_engines.window["ttft_p50"].basis == "200 observations"
    whole = fleet.whole()
    assert whole is not None
    assert window(whole, "queried_tokens") == 200
