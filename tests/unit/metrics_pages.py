"""Pages of metrics made by hand, and fleets that are fed with them."""

from collections.abc import Mapping, Sequence

from omnicache_cli.errors import OmnicacheError
from omnicache_cli.monitor.events import EventCounts
from omnicache_cli.monitor.fleet import Fleet, Sample
from omnicache_cli.monitor.rules import Rule
from omnicache_cli.monitor.scrape import Scraped, target_of

COUNTERS = {
    "queried": "prefix_cache_queries",
    "hit": "prefix_cache_hits",
    "prompt": "prompt_tokens",
    "cached": "prompt_tokens_cached",
    "generated": "generation_tokens",
    "preempted": "num_preemptions",
    "external_queried": "external_prefix_cache_queries",
    "external_hit": "external_prefix_cache_hits",
    "mm_queried": "mm_cache_queries",
    "mm_hit": "mm_cache_hits",
}
GAUGES = {
    "usage": "kv_cache_usage_perc",
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
}
TTFT = "vllm:time_to_first_token_seconds_bucket"


def page_of(
    engines: Mapping[str, Mapping[str, float]],
    *,
    started: float | None = 1000.0,
    ttft: Mapping[str, Mapping[str, float]] | None = None,
    capacity: int | None = None,
    num_gpu_blocks: int = 101,
    model: str = "m",
) -> str:
    """One server's page: for each engine the values of COUNTERS and GAUGES that it has."""
    lines = [f"process_start_time_seconds {started}"] if started is not None else []
    for engine, values in engines.items():
        labels = f'{{engine="{engine}",model_name="{model}"}}'
        for key, value in values.items():
            if key == "steps":
                lines.append(f"vllm:iteration_tokens_total_count{labels} {value}")
            elif key == "finished":
                own = f'{{engine="{engine}",finished_reason="stop",model_name="{model}"}}'
                lines.append(f"vllm:request_success_total{own} {value}")
            else:
                ending = "_total" if key in COUNTERS else ""
                lines.append(f"vllm:{(COUNTERS | GAUGES)[key]}{ending}{labels} {value}")
        for end, count in (ttft or {}).get(engine, {}).items():
            lines.append(f'{TTFT}{{engine="{engine}",le="{end}",model_name="{model}"}} {count}')
        own = f'engine="{engine}",num_gpu_blocks="{num_gpu_blocks}",block_size="16"'
        if capacity is not None:
            own += f',kv_cache_size_tokens="{capacity}"'
        lines.append(f"vllm:cache_config_info{{{own}}} 1.0")
    return "\n".join(lines) + "\n"


def fleet_of(
    num_servers: int = 1,
    *,
    rules: Sequence[Rule] = (),
    endpoints: Sequence[str] = (),
    window: float = 60.0,
) -> Fleet:
    targets = [target_of(f"http://s{number}") for number in range(num_servers)]
    return Fleet(targets, rules, endpoints, window)


def tick(
    fleet: Fleet,
    at: float,
    *pages: str | OmnicacheError,
    events: Sequence[EventCounts] = (),
) -> Sample:
    """One sample at this moment, in seconds."""
    scraped = [one if isinstance(one, OmnicacheError) else Scraped(one, at) for one in pages]
    return fleet.add(scraped, monotonic=at, time=5000.0 + at, events=events)
