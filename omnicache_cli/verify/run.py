"""Runs the scenarios and judges them. What an engine must offer is the Protocol `Session`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol

from omnicache_cli.trace.workload import Prompt
from omnicache_cli.verify.floor import floors_of
from omnicache_cli.verify.judge import Judge, Runs, Tolerance
from omnicache_cli.verify.results import Verification
from omnicache_cli.verify.runs import ONE_BY_ONE, How, RunRows
from omnicache_cli.verify.scenarios import NotRun, Scenario


class Shape(StrEnum):
    """How prompts run without a cache."""

    ALONE = "alone"  # one after the other, each in one piece
    TOGETHER = "together"  # all at once
    CUT = "cut"  # one after the other, each in pieces


class Session(Protocol):
    """A model that runs with a prefix cache and without. Requests are named as asked."""

    @property
    def block_size(self) -> int: ...

    @property
    def keys(self) -> Sequence[str]: ...

    def without_cache(
        self, prompts: dict[str, Prompt], max_tokens: int, shape: Shape, cut: dict[str, int]
    ) -> RunRows:
        """`cut`: of shape CUT, tokens per piece; a prompt without one is left out."""
        ...

    def with_cache(self, prompts: dict[str, Prompt], max_tokens: int, how: How) -> RunRows: ...

    def empty_cache(self) -> None: ...

    def limited_pool(self, num_blocks: int | None) -> AbstractContextManager[None]:
        """While it lasts, requests have that many blocks; None: all."""
        ...


def verify(
    session: Session,
    wanted: Sequence[Scenario | NotRun],
    tolerance: Tolerance | None = None,
    on_scenario: Callable[[Scenario], None] | None = None,
) -> Verification:
    """Run every scenario, measure the noise floor over all of them, then judge each."""
    result = Verification(session.block_size)
    runs = []
    for scenario in wanted:
        if isinstance(scenario, NotRun):
            result.not_run.append((scenario.name, scenario.why))
            continue
        runs.append(run_scenario(session, scenario))
        if on_scenario is not None:
            on_scenario(scenario)
    by_scenario = {one.scenario: (one.baseline, *one.shapes) for one in runs}
    floors = floors_of(by_scenario, session.keys)
    judge = Judge(session.keys, session.block_size, floors, tolerance)
    for index, one in enumerate(runs):
        earlier = [(before.scenario, before.warm) for before in runs[:index]]
        result.pairs += judge.pairs(one, earlier)
    result.failing_rows = judge.failing_rows
    return result


def run_scenario(session: Session, scenario: Scenario) -> Runs:
    """All runs of one scenario: into an empty cache, out of it, and without one."""
    prompts = {f"prompt-{index}": prompt for index, prompt in enumerate(scenario.prompts)}
    donors, hitters, others = (
        {f"{role}-{index}": prompt for index, prompt in enumerate(several)}
        for role, several in (
            ("write", scenario.donors),
            ("hit", scenario.hitters),
            ("other", scenario.others),
        )
    )
    served = {**hitters, **others}
    session.empty_cache()
    with session.limited_pool(scenario.pool_blocks):
        if scenario.with_donors:
            warm = [session.with_cache({**donors, **served}, scenario.max_tokens, scenario.how)]
        else:
            warm = [
                session.with_cache(donors, scenario.max_tokens, ONE_BY_ONE),
                session.with_cache(served, scenario.max_tokens, scenario.how),
            ]
        again = session.with_cache(served, scenario.max_tokens, scenario.how)
    prompt_of = {
        name: next(known for known, one in prompts.items() if one == prompt)
        for name, prompt in {**donors, **served}.items()
    }
    cut = {
        prompt_of[name]: request.hit_tokens
        for name, request in warm[-1].requests.items()
        if request.hit_tokens
    }
    cold = [
        session.without_cache(prompts, scenario.max_tokens, Shape.ALONE, cut),
        _together(session, prompts, scenario.max_tokens),
        session.without_cache(prompts, scenario.max_tokens, Shape.CUT, cut),
    ]
    unproved = None
    if scenario.preempts and not any(run.num_resumed for run in warm):
        unproved = "no request was preempted: nothing was restored behind a preemption"
    return Runs(
        scenario.name,
        cold[0],
        cold[1:],
        warm,
        again,
        prompt_of,
        frozenset(hitters),
        unproved,
        prompts,
    )


def _together(session: Session, prompts: dict[str, Prompt], max_tokens: int) -> RunRows:
    """All at once, but requests of different LoRA adapters apart: a floor is to be measured, and
    adapters in one batch are a computation of their own that can be wrong."""
    rows = RunRows()
    for lora in dict.fromkeys(prompt.lora for prompt in prompts.values()):
        several = {name: prompt for name, prompt in prompts.items() if prompt.lora == lora}
        part = session.without_cache(several, max_tokens, Shape.TOGETHER, {})
        rows.requests |= part.requests
        rows.computed += part.computed
    return rows
