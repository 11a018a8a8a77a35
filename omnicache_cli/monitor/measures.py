"""What is known of some engines over a span: rates, counts, percentiles and the present state.

Engines are summed by their counts: a ratio of several is the ratio of the sums, never a mean of
ratios. A sum is unknown where one of its parts is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from omnicache_cli.monitor.histogram import Buckets, summed
from omnicache_cli.monitor.ledger import EngineTotals, histogram_between
from omnicache_cli.monitor.names import BY_KEY, NO_CONNECTOR, NO_KV_EVENTS
from omnicache_cli.monitor.page import EngineKey
from omnicache_cli.monitor.values import Value, count_of, ratio, total, unknown

PERCENTILES = (50, 90, 99)
ONE_SAMPLE = "one sample has no window"
BALANCED = "several servers answer by turns; name each one's URL"
STAGES = "of one stage, not of a pipeline: see each stage"
NOT_SUMMED_OVER_STAGES = ("ttft", "itl", "requests_running", "requests_waiting")


@dataclass(frozen=True, slots=True)
class EngineSpan:
    """One engine from an earlier reading to a later one. `old` is None where it is new."""

    server: str
    key: EngineKey
    old: EngineTotals | None
    new: EngineTotals
    seconds: float  # 0: there is one reading
    peak_usage: float | None
    num_engines_of_server: int
    is_balanced: bool = False


@dataclass(frozen=True, slots=True)
class Evictions:
    """What the KV events of all endpoints said in the span."""

    hashes: int
    seconds: float
    is_complete: bool = True  # no message is missing


@dataclass(frozen=True, slots=True)
class Measures:
    """By name: of the span, since the engines started, and at the last reading."""

    window: Mapping[str, Value] = field(default_factory=dict)
    lifetime: Mapping[str, Value] = field(default_factory=dict)
    now: Mapping[str, Value] = field(default_factory=dict)

    def get(self, name: str) -> Value | None:
        """By the name that a rule uses; None: there is no such measure."""
        if name.startswith("lifetime_"):
            return self.lifetime.get(name.removeprefix("lifetime_"))
        return self.window.get(name) or self.now.get(name)


COUNTS = (
    *("queried_tokens", "hit_tokens", "external_queried_tokens", "external_hit_tokens"),
    *("mm_queried_items", "mm_hit_items", "prompt_tokens", "cached_prompt_tokens"),
    *("generation_tokens", "preemptions", "finished_requests", "steps"),
)

RATIOS = {
    "kv_cache_hit_rate": ("hit_tokens", "queried_tokens", "queried tokens"),
    "external_cache_hit_rate": ("external_hit_tokens", "external_queried_tokens", "queried tokens"),
    "mm_cache_hit_rate": ("mm_hit_items", "mm_queried_items", "items"),
    "cached_prompt_share": ("cached_prompt_tokens", "prompt_tokens", "prompt tokens"),
}
"""Name: part, whole, what the whole is counted in."""

PER_SECOND = {
    "prompt_tokens_per_second": "prompt_tokens",
    "generation_tokens_per_second": "generation_tokens",
    "requests_per_second": "finished_requests",
    "preemptions_per_second": "preemptions",
}


def measure(spans: Sequence[EngineSpan], evictions: Evictions | None = None) -> Measures:
    """`spans`: the engines that are meant. `evictions`: only where they are all of them."""
    window = {key: _risen(spans, key) for key in COUNTS}
    lifetime = {key: total([_counter(one, key) for one in spans]) for key in COUNTS}
    for name, (part, whole, noun) in RATIOS.items():
        ever = lifetime[whole].number
        for values, read, span in (
            (window, _risen_of, "the window"),
            (lifetime, _counter, "its life"),
        ):
            pairs = [(read(one, part), read(one, whole)) for one in spans]
            values[name] = _impossible(pairs, part, whole) or ratio(
                values[part], values[whole], noun, empty=_why_nothing(spans, name, ever, span)
            )
    window["kv_cache_hit_rate_change"] = _change(window, lifetime)
    for name, key in PER_SECOND.items():
        window[name] = total([_per_second(one, key) for one in spans])
    window.update(_evictions(evictions, window["steps"]))
    for key in ("ttft", "itl", "block_lifetime", "block_idle"):
        window.update(_percentiles(spans, key, of_window=True))
        lifetime.update(_percentiles(spans, key, of_window=False))
    return Measures(window, lifetime, _now(spans))


def _risen(spans: Sequence[EngineSpan], key: str) -> Value:
    parts = []
    for one in spans:
        if one.is_balanced:
            return unknown(BALANCED)
        if one.seconds <= 0:
            return unknown(ONE_SAMPLE)
        if key not in one.new.page.counters:
            return unknown(_without(one, key, spans))
        before = one.old.counters.get(key, 0.0) if one.old is not None else 0.0
        parts.append(Value(one.new.counters[key] - before))
    return total(parts)


def _risen_of(one: EngineSpan, key: str) -> Value:
    return _risen([one], key)


def _impossible(pairs: Sequence[tuple[Value, Value]], part: str, whole: str) -> Value | None:
    """Why there is no share: of one engine the part is more than the whole. None: of no one."""
    for few, many in pairs:
        if few.number is not None and many.number is not None and few.number > many.number:
            return unknown(
                f"{part} exceed {whole} ({few.number:.0f} of {many.number:.0f}), which cannot be; "
                "the rate is not known"
            )
    return None


def _counter(one: EngineSpan, key: str) -> Value:
    value = one.new.page.counters.get(key)
    return Value(value) if value is not None else unknown(_without(one, key, [one]))


def _without(one: EngineSpan, key: str, spans: Sequence[EngineSpan]) -> str:
    why = one.new.page.impossible.get(key, BY_KEY[key].without)
    return why if len(spans) == 1 else f"{why} ({one.server}, engine {one.key.short})"


def _why_nothing(spans: Sequence[EngineSpan], name: str, ever: float | None, span: str) -> str:
    """Why nothing was asked of a cache."""
    caching = {one.new.page.cache_config.get("enable_prefix_caching") for one in spans}
    if name == "kv_cache_hit_rate" and caching == {"False"}:
        return "prefix caching is off: enable_prefix_caching is False"
    if name == "external_cache_hit_rate" and not ever:
        return NO_CONNECTOR
    what = {"mm_cache_hit_rate": "no multimodal item", "cached_prompt_share": "no prompt token"}
    return f"{what.get(name, 'no token')} in {span}"


def _per_second(one: EngineSpan, key: str) -> Value:
    risen = _risen([one], key)
    return Value(risen.number / one.seconds) if risen.number is not None else risen


def _change(window: Mapping[str, Value], lifetime: Mapping[str, Value]) -> Value:
    """The window's hit rate less the one from the start of the server to the start of the window.

    Across a restart there is nothing before: what rose is then at least what the counter has.
    """
    rate = window["kv_cache_hit_rate"]
    if rate.number is None:
        return rate
    hits, queries = (
        Value((lifetime[key].number or 0.0) - (window[key].number or 0.0))
        for key in ("hit_tokens", "queried_tokens")
    )
    former = ratio(hits, queries, "queried tokens", empty="nothing was queried before the window")
    if former.number is None:
        return former
    if not 0 <= former.number <= 1:
        return unknown("the counters do not tell what was before the window")
    return Value(rate.number - former.number, basis=f"before: {former.basis}")


def _evictions(evictions: Evictions | None, steps: Value) -> dict[str, Value]:
    names = ("evicted_blocks", "evicted_blocks_per_second", "eviction_frequency")
    if evictions is None:
        return dict.fromkeys(names, unknown(NO_KV_EVENTS))
    if evictions.seconds <= 0:
        return dict.fromkeys(names, unknown(ONE_SAMPLE))
    at_least = not evictions.is_complete
    count = Value(evictions.hashes, is_above=at_least)
    return {
        "evicted_blocks": count,
        "evicted_blocks_per_second": replace(count, number=evictions.hashes / evictions.seconds),
        "eviction_frequency": replace(
            ratio(count, steps, "steps", empty="no step in the window"), is_above=at_least
        ),
    }


def _percentiles(spans: Sequence[EngineSpan], key: str, *, of_window: bool) -> dict[str, Value]:
    names = {share: f"{key}_p{share}" for share in PERCENTILES}
    found = _histogram(spans, key, of_window=of_window)
    if isinstance(found, str):
        return dict.fromkeys(names.values(), unknown(found))
    values = {}
    for share, name in names.items():
        quantile = found.quantile(share / 100)
        if quantile is None:
            values[name] = unknown(f"no observation in {'the window' if of_window else 'its life'}")
        else:
            basis = f"{found.total:.0f} observations"
            values[name] = Value(quantile.value, is_above=quantile.is_above, basis=basis)
    return values


def _histogram(spans: Sequence[EngineSpan], key: str, *, of_window: bool) -> Buckets | str:
    if key in NOT_SUMMED_OVER_STAGES and _are_stages(spans):
        return STAGES
    parts = []
    for one in spans:
        if of_window and one.is_balanced:
            return BALANCED
        if of_window and one.seconds <= 0:
            return ONE_SAMPLE
        part = (
            histogram_between(one.old, one.new, key)
            if of_window
            else one.new.page.histograms.get(key)
        )
        if part is None:
            return _without(one, key, spans)
        parts.append(part)
    return summed(parts) if parts else "no engine"


def _are_stages(spans: Sequence[EngineSpan]) -> bool:
    return len({one.key.get("stage") for one in spans}) > 1


# -- the present state ------------------------------------------------------------------------


def _now(spans: Sequence[EngineSpan]) -> dict[str, Value]:
    now = {}
    for key in ("requests_running", "requests_waiting"):
        is_sum = _are_stages(spans)
        now[key] = unknown(STAGES) if is_sum else total([_gauge(one, key) for one in spans])
    capacities = [_capacity(one) for one in spans]
    usages = [_gauge(one, "kv_cache_usage") for one in spans]
    now["kv_pool_capacity_tokens"] = total(capacities)
    now["kv_pool_tokens"] = total(list(map(_product, usages, capacities)))
    if len(spans) == 1:
        now["kv_cache_usage"] = usages[0]
        now["kv_cache_usage_peak"] = (
            Value(spans[0].peak_usage) if spans[0].peak_usage is not None else usages[0]
        )
        now.update(_blocks(spans[0], usages[0]))
    else:
        now["kv_cache_usage"] = ratio(
            now["kv_pool_tokens"], now["kv_pool_capacity_tokens"], "tokens", empty="no pool"
        )
    return now


def _gauge(one: EngineSpan, key: str) -> Value:
    value = one.new.page.gauges.get(key)
    return Value(value) if value is not None else unknown(_without(one, key, [one]))


def _capacity(one: EngineSpan) -> Value:
    """Tokens, as vLLM counts them over all KV cache groups, of this engine alone."""
    label = one.new.page.cache_config.get("kv_cache_size_tokens")
    if label is not None:
        count = count_of(label)
        return Value(count) if count is not None else unknown(_no_count("kv_cache_size_tokens"))
    return unknown(
        "not exposed: vllm:cache_config_info has no kv_cache_size_tokens, and blocks times block "
        "size is wrong with several KV cache groups"
    )


def _no_count(label: str) -> str:
    return f"not known: {label} of vllm:cache_config_info is no count"


def _product(usage: Value, capacity: Value) -> Value:
    if usage.number is None:
        return usage
    if capacity.number is None:
        return capacity
    return Value(usage.number * capacity.number)


def _blocks(one: EngineSpan, usage: Value) -> dict[str, Value]:
    """Block 0 is never given out, and vLLM's usage leaves it out too."""
    label = one.new.page.cache_config.get("num_gpu_blocks")
    if one.num_engines_of_server > 1:
        why = f"num_gpu_blocks is of all {one.num_engines_of_server} engines of the server"
        return dict.fromkeys(("num_blocks", "blocks_in_use"), unknown(why))
    count = count_of(label) if label is not None else None
    if count is None or count < 2:
        why = (
            "not exposed: vllm:cache_config_info has no num_gpu_blocks"
            if label is None
            else _no_count("num_gpu_blocks")
        )
        return dict.fromkeys(("num_blocks", "blocks_in_use"), unknown(why))
    num_blocks = Value(count - 1)
    used = _product(usage, num_blocks)
    return {
        "num_blocks": num_blocks,
        "blocks_in_use": Value(round(used.number)) if used.number is not None else used,
    }
