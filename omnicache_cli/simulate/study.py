"""One workload at several pool sizes, side by side, read once."""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from omnicache_cli.errors import BadInputError
from omnicache_cli.simulate.bound import Bound
from omnicache_cli.simulate.replay import (
    Admitted,
    ArrivalMode,
    Arrivals,
    Pool,
    Replay,
    Replica,
    Route,
    Stepped,
)
from omnicache_cli.simulate.request import SimRequest
from omnicache_cli.simulate.timeline import Moment, Timeline

MAX_LISTED = 100_000
"""Admissions that are listed; all are counted."""


@dataclass(frozen=True, slots=True)
class Size:
    """A pool, of each replica."""

    num_blocks: int  # usable ones, the null block apart
    kv_memory: str | None = None  # as it was asked for


@dataclass(frozen=True, slots=True)
class Setup:
    """What is tried."""

    sizes: tuple[Size, ...]
    arrivals: Arrivals = field(default_factory=Arrivals)
    mode: ArrivalMode | None = None  # None: by what the first request says
    replicas: int = 1
    route: Route = "round-robin"
    bound: bool = False
    lists_requests: bool = False
    timeline: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """One admission of one request at one pool size."""

    num_blocks: int
    replica: int
    request: str
    prompt_tokens: int
    hit_tokens: int
    resumed: bool


@dataclass(slots=True)
class Point:
    """One pool size and what came of it."""

    size: Size
    replay: Replay

    @property
    def hit_rate(self) -> float | None:
        """None: the cache was never asked, or the workload came to no end."""
        totals = self.replay.totals
        if self.replay.refused is not None or not totals.query_tokens:
            return None
        return totals.hit_tokens / totals.query_tokens

    @property
    def bound_hit_tokens(self) -> int | None:
        """At most, whatever is evicted; None: not asked for, or not known."""
        bounds = [one.bound for one in self.replay.replicas]
        if self.replay.refused is not None or None in bounds:
            return None
        return sum(
            one.bound.hit_blocks * one.pool.block_size
            for one in self.replay.replicas
            if one.bound is not None
        )


@dataclass(slots=True)
class Study:
    """The points, and what all of them have in common."""

    mode: ArrivalMode
    points: list[Point]
    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    listed: list[Listed] = field(default_factory=list)
    num_admissions: int = 0
    moments: list[Moment] = field(default_factory=list)


def run_study(
    requests: Iterable[SimRequest], setup: Setup, make_pool: Callable[[int], Pool]
) -> Study:
    """BadInputError: no request, or no pool size that can run them all."""
    try:
        return _run(requests, setup, make_pool)
    finally:
        gc.unfreeze()


def _run(requests: Iterable[SimRequest], setup: Setup, make_pool: Callable[[int], Pool]) -> Study:
    study: Study | None = None
    for request in requests:
        if study is None:
            study = _start(request, setup, make_pool)
            gc.freeze()  # or the garbage collector would walk vLLM and the pools again and again
        study.num_requests += 1
        study.prompt_tokens += request.num_prompt_tokens
        study.output_tokens += request.num_output_tokens
        alive = False
        for point in study.points:
            point.replay.feed(request)
            alive = alive or point.replay.refused is None
        if not alive:
            _refuse_dead(study)
    if study is None:
        raise BadInputError("the workload holds no request; write one JSON object a line")
    for point in study.points:
        point.replay.finish()
    _refuse_dead(study)
    return study


def _start(first: SimRequest, setup: Setup, make_pool: Callable[[int], Pool]) -> Study:
    mode = setup.mode or _mode_of(first)
    if mode == "step" and first.arrival_step is None:
        raise BadInputError(f"request {first.name} has no arrival_step; leave out --arrivals step")
    study = Study(mode, [])
    arrivals = replace(setup.arrivals, mode=mode)
    for size in setup.sizes:
        replicas = [_replica(setup, size, make_pool) for _ in range(setup.replicas)]
        replay = Replay(replicas, arrivals, setup.route)
        if setup.lists_requests:
            replay.on_admitted = _lister(study, size)
        if setup.timeline:
            _keep_moments(study, replay)
        study.points.append(Point(size, replay))
    return study


def _mode_of(first: SimRequest) -> ArrivalMode:
    if first.arrival_step is not None:
        return "step"
    return "one-by-one" if first.arrival_seconds is None else "clock"


def _replica(setup: Setup, size: Size, make_pool: Callable[[int], Pool]) -> Replica:
    pool = make_pool(size.num_blocks)
    bound = Bound(size.num_blocks, pool.block_size) if setup.bound and pool.is_plain else None
    return Replica(pool, bound)


def _lister(study: Study, size: Size) -> Callable[[int, Admitted], None]:
    def admitted(replica: int, one: Admitted) -> None:
        study.num_admissions += 1
        if len(study.listed) < MAX_LISTED:
            tokens = one.request.num_prompt_tokens
            study.listed.append(
                Listed(
                    size.num_blocks, replica, one.request.name, tokens, one.hit_tokens, one.resumed
                )
            )

    return admitted


def _keep_moments(study: Study, replay: Replay) -> None:
    """Of the one pool of the one size."""
    pool = replay.replicas[0].pool
    timeline = Timeline(pool.state, study.moments)
    steps = 0

    def scheduled(stepped: Stepped) -> None:
        what = ["a request is preempted"] * stepped.num_preempted
        for one in stepped.admitted:
            again = "resumes" if one.resumed else "starts"
            what.append(f"{one.request.name} {again}, hit {one.hit_tokens} tokens")
        timeline.add(steps, what or ["scheduled"])

    def ended(_: int, stepped: Stepped) -> None:
        nonlocal steps
        if stepped.finished:
            names = ", ".join(one.request.name for one in stepped.finished)
            timeline.add(steps, [f"after it {names} ended"])
        steps += stepped.num_tokens > 0

    pool.on_scheduled, replay.on_step = scheduled, ended


def _refuse_dead(study: Study) -> None:
    """No pool size is left that can go on."""
    refusals: Sequence[str | None] = [point.replay.refused for point in study.points]
    if None not in refusals:
        raise BadInputError(str(refusals[-1]))
