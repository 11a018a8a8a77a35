"""Requests through vLLM's own scheduler, block pool and hasher, without a model, and explained."""

from collections.abc import Callable
from pathlib import Path

from omnicache_cli.engine.environment import Recording
from omnicache_cli.engine.modelfree.scheduler import (
    GroupPlan,
    PoolPlan,
    PoolRequest,
    PoolScheduler,
)
from omnicache_cli.engine.tracing import tracing
from omnicache_cli.prefix.explain import Explanation, explain_run
from omnicache_cli.trace.run import Run


def full(block_size: int) -> GroupPlan:
    return GroupPlan("full", block_size)


def sliding(block_size: int, window: int) -> GroupPlan:
    return GroupPlan("sliding", block_size, window)


def states(block_size: int) -> GroupPlan:
    return GroupPlan("mamba", block_size)


def ids(seed: int, length: int) -> list[int]:
    """No two seeds begin alike."""
    return [seed, *(10 + (seed * 7 + index * 3) % 200 for index in range(length - 1))]


def explained(
    folder: Path,
    plan: PoolPlan,
    drive: Callable[[PoolScheduler], None],
    *,
    token_ids: bool = True,
) -> dict[str, Explanation]:
    """First lookups by request. Of every lookup the rule must give vLLM's own hit."""
    folder.mkdir()
    with tracing(folder, Recording(token_ids=token_ids)):
        drive(PoolScheduler(plan))
    found: dict[str, Explanation] = {}
    for one in explain_run(Run(folder), None):
        assert one.predicted_tokens == one.hit_tokens, one
        assert one.reason.name != "unknown", one
        found.setdefault(one.external_id, one)
    return found


def one_by_one(*requests: PoolRequest) -> Callable[[PoolScheduler], None]:
    def drive(scheduler: PoolScheduler) -> None:
        for request in requests:
            scheduler.add(request)
            scheduler.run()

    return drive
