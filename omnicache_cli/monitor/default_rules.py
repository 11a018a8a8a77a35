"""The rules that hold for everyone, each with its reason; docs/monitor.md lists them."""

from dataclasses import replace

from omnicache_cli.monitor.rules import Rule, parse_conditions
from omnicache_cli.report.layout import quoted

RECORD = "start the server under omnicache trace to record a run, and name that here with --run"
"""A run of the same server is needed for the commands that tell more; none was named."""

SIZE = "see with omnicache kv-size how many tokens of this model a memory holds"
"""No command: which model and how much memory, a page does not tell."""

_DEFAULTS = (
    Rule(
        name="hit-rate",
        when="kv_cache_hit_rate < 85% and hit_tokens > 0 and queried_tokens >= 1000",
        conditions=(),
        reason="prompts repeat, for there are hits, and over 15 % of their tokens are computed "
        "again; under 1,000 queried tokens a rate says little",
        causes=(
            "blocks were evicted before they were asked for again: the pool is small",
            "something changes near the front of the prompts: a date, a name, an order",
            "prompts share less than it seems: full blocks only, and another salt or adapter "
            "is another prefix",
            "the same prompts go to different replicas",
        ),
        next_commands=(
            "omnicache explain {run}",
            "omnicache simulate {run} --bound",
        ),
    ),
    Rule(
        name="no-hit",
        when="kv_cache_hit_rate <= 0 and queried_tokens >= 10000",
        conditions=(),
        severity="info",
        reason="10,000 tokens and more were looked up and none was there: either no prompt "
        "begins like another, or something keeps them apart",
        causes=(
            "every prompt is new",
            "prompts are shorter than a block",
            "each request has a cache salt or a first line of its own",
        ),
        next_commands=("omnicache explain {run}",),
    ),
    Rule(
        name="pool-full",
        when="max(kv_cache_usage_peak) > 95%",
        conditions=(),
        reason="only blocks that requests hold count as used, so above 95 % hardly a block is "
        "left that another prompt could hit, and the next request waits or preempts",
        causes=(
            "too many or too long requests at a time for this pool",
            "max_num_seqs or max_model_len is higher than the memory allows",
        ),
        next_commands=(SIZE,),
    ),
    Rule(
        name="preemptions",
        when="preemptions > 0",
        conditions=(),
        reason="a preempted request gives its blocks back and is computed again",
        causes=(
            "the pool is full while requests grow",
            "max_num_seqs is higher than the pool can carry",
        ),
        next_commands=(
            SIZE,
            "omnicache show {run} --blocks",
        ),
    ),
    Rule(
        name="hit-rate-falling",
        when="kv_cache_hit_rate_change < -10% and queried_tokens >= 1000",
        conditions=(),
        reason="the window's hit rate is more than 10 points under that of all the time before",
        causes=(
            "another kind of traffic, or a prompt template that was changed",
            "more different prompts than the pool holds: they evict each other",
            "the prefix cache was reset",
        ),
        next_commands=(
            "omnicache simulate {run} --bound",
            "omnicache explain {run}",
        ),
    ),
)


def default_rules(run: str | None) -> list[Rule]:
    """`run`: a recorded run of the same server, for the commands to type next."""
    return [
        replace(
            rule,
            conditions=parse_conditions(rule.when),
            next_commands=_next_commands(rule.next_commands, run),
        )
        for rule in _DEFAULTS
    ]


def _next_commands(commands: tuple[str, ...], run: str | None) -> tuple[str, ...]:
    """Lines that run as they stand, and sentences that are no command."""
    if run is not None:
        return tuple(one.replace("{run}", quoted(run)) for one in commands)
    without = tuple(one for one in commands if "{run}" not in one)
    return without if len(without) == len(commands) else (RECORD, *without)
