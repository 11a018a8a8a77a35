"""Where two runs part: the first step in which an engine did something else.

Times are no difference, and hashes of blocks are not compared: vLLM may seed them anew in every
process.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from omnicache_cli.trace.records import (
    Cached,
    CacheReset,
    Evicted,
    Finished,
    Preempted,
    from_runs,
)
from omnicache_cli.trace.steps import Request, Step

Facts = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Parting:
    """What two engines did differently, and in which of their steps."""

    step: int | None  # of the first run; None: it had ended
    other_step: int | None
    what: str
    value: object  # None: nothing of the kind
    other_value: object


def first_parting(steps: Iterable[Step], others: Iterable[Step]) -> Parting | None:
    """Compares step by step, in order; None: all steps are the same."""
    for one, other in zip_longest(steps, others):
        if one is None or other is None:
            return Parting(
                None if one is None else one.number,
                None if other is None else other.number,
                "number of steps",
                "ended before" if one is None else "goes on",
                "ended before" if other is None else "goes on",
            )
        for (what, mine), (_, theirs) in zip(_aspects(one), _aspects(other), strict=True):
            if mine == theirs:
                continue
            name = next(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
            label = f"{what} of {name}" if name else what
            return Parting(one.number, other.number, label, mine.get(name), theirs.get(name))
    return None


def _aspects(step: Step) -> Iterator[tuple[str, Facts]]:
    """What a step did, the causes before their effects; made only as far as it is asked for."""
    record = step.record
    names = {request.number: _name(request) for request in step.requests}
    shares = step.scheduled
    yield "requests", {"": [_name(one.request) for one in shares]}
    yield (
        "hit tokens",
        {names.get(one.request, f"#{one.request}"): one.hit_tokens for one in record.admitted},
    )
    yield "computed tokens", {_name(one.request): one.num_computed_tokens for one in shares}
    yield "scheduled tokens", {_name(one.request): one.num_scheduled_tokens for one in shares}
    events = step.before + record.events + step.after
    yield "preempted requests", {"": [e.request for e in events if isinstance(e, Preempted)]}
    yield "evicted blocks", {"": [e.block_id for e in events if isinstance(e, Evicted)]}
    tables = [(one.request, one.block_ids) for one in record.admitted] + record.new_block_ids
    yield (
        "new blocks",
        {
            f"{names.get(number, f'#{number}')}, group {group}": from_runs(runs)
            for number, additions in tables
            for group, runs in enumerate(additions)
        },
    )
    yield (
        "cached blocks",
        {"": [block for e in events if isinstance(e, Cached) for block in from_runs(e.block_ids)]},
    )
    yield (
        "finished requests",
        {"": [(e.request, e.status) for e in events if isinstance(e, Finished)]},
    )
    yield "cache resets", {"": [e.successful for e in events if isinstance(e, CacheReset)]}
    in_use = step.engine.num_gpu_blocks - 1 - record.num_free_blocks  # pools may differ in size
    yield "blocks in use", {"": in_use}
    yield "running and waiting requests", {"": [record.num_running, record.num_waiting]}


def _name(request: Request) -> str:
    return f"#{request.number} {request.external_id}"
