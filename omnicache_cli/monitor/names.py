"""What is read of vLLM's metrics, under which names, and what a page without one means.

The names are those of vllm/v1/metrics/loggers.py of 0.30; older ones stand behind them.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "observations"]
"""`observations`: of a histogram only how many there were, which counts like a counter."""

MAX_VALUE = 1e18
"""No counter of tokens and no gauge is higher; products and sums of such values stay finite."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of ours. `name` is vLLM's, without `_total`; `older` are its former names.

    `without`: why a server may not have it, and what to do. `most`: its highest value.
    """

    key: str
    kind: Kind
    name: str
    older: tuple[str, ...] = ()
    without: str = "not exposed by this server"
    most: float = MAX_VALUE


NO_KV_EVENTS = (
    "not exposed: start the server with --kv-events-config "
    """'{"enable_kv_cache_events": true, "publisher": "zmq"}' and name its endpoint with --events"""
)
NO_CONNECTOR = "no lookup: the server has no KV connector, or nothing was asked of it"
NO_RESIDENCY = "not exposed: start the server with --kv-cache-metrics"

METRICS = (
    Metric(
        "queried_tokens", "counter", "vllm:prefix_cache_queries", ("vllm:gpu_prefix_cache_queries",)
    ),
    Metric("hit_tokens", "counter", "vllm:prefix_cache_hits", ("vllm:gpu_prefix_cache_hits",)),
    Metric("external_queried_tokens", "counter", "vllm:external_prefix_cache_queries"),
    Metric("external_hit_tokens", "counter", "vllm:external_prefix_cache_hits"),
    Metric("mm_queried_items", "counter", "vllm:mm_cache_queries"),
    Metric("mm_hit_items", "counter", "vllm:mm_cache_hits"),
    Metric("prompt_tokens", "counter", "vllm:prompt_tokens"),
    Metric("cached_prompt_tokens", "counter", "vllm:prompt_tokens_cached"),
    Metric("generation_tokens", "counter", "vllm:generation_tokens"),
    Metric("preemptions", "counter", "vllm:num_preemptions"),
    Metric("finished_requests", "counter", "vllm:request_success"),
    Metric("requests_running", "gauge", "vllm:num_requests_running"),
    Metric("requests_waiting", "gauge", "vllm:num_requests_waiting"),
    Metric(
        "kv_cache_usage",
        "gauge",
        "vllm:kv_cache_usage_perc",
        ("vllm:gpu_cache_usage_perc",),
        most=1.0,
    ),
    Metric("ttft", "histogram", "vllm:time_to_first_token_seconds"),
    Metric(
        "itl",
        "histogram",
        "vllm:inter_token_latency_seconds",
        ("vllm:time_per_output_token_seconds",),
    ),
    Metric("steps", "observations", "vllm:iteration_tokens_total"),
    Metric("block_lifetime", "histogram", "vllm:kv_block_lifetime_seconds", without=NO_RESIDENCY),
    Metric(
        "block_idle",
        "histogram",
        "vllm:kv_block_idle_before_evict_seconds",
        without=NO_RESIDENCY,
    ),
)

BY_KEY = {metric.key: metric for metric in METRICS}

CACHE_CONFIG = "vllm:cache_config_info"
START_TIME = "process_start_time_seconds"

HIT_RATE_GAUGES = ("vllm:gpu_prefix_cache_hit_rate", "vllm:cpu_prefix_cache_hit_rate")
"""The engine before V1 gave a ratio of its own. No rate over a window follows from a ratio."""

PREFIXES = ("vllm:", "vllm_omni:")
RAY_PREFIX = "ray_vllm_"

ENGINE_LABELS = ("instance", "pod", "model_name", "engine", "stage", "replica")
"""Labels that tell engines apart: vLLM's, vLLM-Omni's, and those that a Prometheus adds."""

SUMMED_LABELS = {"vllm:request_success": ("finished_reason",)}
"""Labels of a counter over which it is summed, by its name."""


@dataclass(frozen=True, slots=True)
class Sought:
    """A sample name of a page: which metric it belongs to, and whether under a former name."""

    metric: Metric
    name: str  # of the family, as the page has it
    is_old: bool


def _sample_names() -> dict[str, Sought]:
    found: dict[str, Sought] = {}
    for metric in METRICS:
        for name in (metric.name, *metric.older):
            is_old = name != metric.name
            # Before prometheus_client 0.4, and in some exporters, a counter has no suffix.
            endings = {
                "counter": ("_total", ""),
                "gauge": ("",),
                "histogram": ("_bucket",),
                "observations": ("_count",),
            }[metric.kind]
            for ending in endings:
                found[f"{name}{ending}"] = Sought(metric, name, is_old)
    return found


SOUGHT = _sample_names()
"""By the name of a sample in the page."""
