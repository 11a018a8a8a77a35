"""Where the time of the steps goes: phase times of every engine and rank, and the slowest steps.

One pass over a run, in memory that does not grow with its length. What a phase is, `trace.phases`
says; what was special about a step, `slowest`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from omnicache_cli.profile.slowest import SlowestSteps, SlowStep
from omnicache_cli.trace.phases import (
    INSIDE,
    OF_SCHEDULER,
    OF_WORKER,
    Times,
    scheduler_times,
    step_ns,
    step_times,
    worker_times,
)
from omnicache_cli.trace.records import EngineSource
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import ForwardView, RankView, Step
from omnicache_cli.trace.summary import Histogram
from omnicache_cli.trace.views.view import steps_of

REST = "rest"
"""What of a step is in no phase: logits, talk between processes, what the engine does beside."""

SCHEDULER = None
"""Stands for the scheduler where the number of a rank stands for a model runner."""


@dataclass(slots=True)
class PhaseTime:
    """One phase on one rank, or of the scheduler."""

    durations: Histogram = field(default_factory=Histogram)
    in_whole_steps_ns: int = 0  # of it in steps whose own time is known: what shares are made of

    def add(self, duration_ns: int, *, of_whole_step: bool) -> None:
        self.durations.add(duration_ns)
        if of_whole_step:
            self.in_whole_steps_ns += max(0, duration_ns)


@dataclass(slots=True)
class EnginePhases:
    """The steps of one engine, which may be a stage of a pipeline."""

    source: EngineSource
    num_steps: int = 0
    steps: Histogram = field(default_factory=Histogram)  # whole ones: schedule() to its output
    phases: dict[tuple[str, int | None], PhaseTime] = field(default_factory=dict)  # and rank
    rest: PhaseTime = field(default_factory=PhaseTime)
    hashing: Histogram = field(default_factory=Histogram)  # one a request, beside the steps
    devices: set[str] = field(default_factory=set)
    own_ns: dict[str, int] = field(default_factory=dict)  # of the slowest rank, parts taken out
    first_start_ns: int | None = None
    last_end_ns: int | None = None  # of the whole steps

    @property
    def largest(self) -> str | None:
        """The phase, or the rest, in which most of the time was spent."""
        return max(self.own_ns, key=self.own_ns.__getitem__, default=None)

    def share(self, phase: PhaseTime) -> float | None:
        """Of the time of all whole steps; None: there is none."""
        return phase.in_whole_steps_ns / self.steps.total_ns if self.steps.total_ns else None

    @property
    def overlap(self) -> bool:
        """Steps were in flight at the same time: they add up to more than the clock says."""
        if self.first_start_ns is None or self.last_end_ns is None:
            return False
        return self.steps.total_ns > 1.02 * (self.last_end_ns - self.first_start_ns)


@dataclass(slots=True)
class RunPhases:
    """A whole run, or one engine of it."""

    engines: dict[str, EnginePhases] = field(default_factory=dict)
    slowest: list[SlowStep] = field(default_factory=list)  # the slowest first


def measure(run: Run, engine: str | None = None) -> RunPhases:
    """Read the run to its end. BadInputError: it has no such engine."""
    found = RunPhases()
    slowest = SlowestSteps()
    for step in steps_of(run, engine):
        name = step.engine.engine
        mine = found.engines.get(name)
        if mine is None:
            mine = found.engines[name] = EnginePhases(step.engine)
        slowest.add(step, _add(mine, step))
    found.slowest = slowest.ordered()
    return found


def _add(engine: EnginePhases, step: Step) -> Times:
    """Count one step; returns what each phase took for itself, the rest included."""
    whole = step_ns(step.record)
    engine.num_steps += 1
    known = whole is not None
    for phase, duration in scheduler_times(step.record).items():
        _count(engine, phase, SCHEDULER, duration, known)
    for view in _views(step):
        engine.devices.add(view.worker.device.partition(":")[0])
        for phase, duration in worker_times(view.record).items():
            _count(engine, phase, view.worker.rank, duration, known)
    for request in step.arrived:
        if request.record.hash_ns is not None:
            engine.hashing.add(request.record.hash_ns)
    own = own_times(step)
    if whole is not None:
        engine.steps.add(whole)
        if engine.first_start_ns is None:
            engine.first_start_ns = step.record.start_ns
        engine.last_end_ns = step.record.start_ns + whole
    rest = own[REST]
    if rest is not None:
        engine.rest.add(rest, of_whole_step=True)
    for phase, duration in own.items():
        if duration is not None:
            engine.own_ns[phase] = engine.own_ns.get(phase, 0) + duration
    return own


def _count(
    engine: EnginePhases, phase: str, rank: int | None, duration: int | None, of_whole_step: bool
) -> None:
    if duration is None:
        return
    mine = engine.phases.get((phase, rank))
    if mine is None:
        mine = engine.phases[phase, rank] = PhaseTime()
    mine.add(duration, of_whole_step=of_whole_step)


def own_times(step: Step) -> Times:
    """What each phase of a step took without its parts, and what is left of the step.

    Of several ranks each phase is that of the slowest. The rest is None where the step's own time
    is not known, or no worker recorded it.
    """
    times = step_times(step)
    for part, outer in INSIDE.items():
        inner, whole = times[part], times[outer]
        if inner is not None and whole is not None:
            times[outer] = whole - inner
    lasted = step_ns(step.record)
    times[REST] = None
    if lasted is not None and (step.forwards or step.ranks):
        outside = sum(times[phase] or 0 for phase in OF_SCHEDULER)
        times[REST] = max(0, lasted - outside - _busy_ns(step))
    return times


def _busy_ns(step: Step) -> int:
    """In phases of the workers: stages of a pipeline one after the other, ranks of one together."""
    longest: dict[int, int] = {}
    for view in _views(step):
        times = worker_times(view.record)
        spent = _sum(times[phase] for phase in OF_WORKER)
        stage = view.worker.pp_rank
        longest[stage] = max(spent, longest.get(stage, 0))
    return sum(longest.values())


def _views(step: Step) -> list[ForwardView | RankView]:
    return [*step.forwards, *step.ranks]


def _sum(durations: Iterable[int | None]) -> int:
    return sum(one for one in durations if one is not None)
