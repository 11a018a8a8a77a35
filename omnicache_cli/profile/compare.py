"""Does the prefix cache pay off? The same workload with it and without, pair by pair.

A pair is one run of the workload with caching and its neighbour without. Machines drift, so only
neighbours are compared: what counts is the ratio within each pair, its median, and its spread over
the pairs. A difference is one only where the spread leaves no doubt on which side of 1 it lies.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.phases import PHASES, TENSOR_PHASES, step_ns, step_times
from omnicache_cli.trace.records import EngineSource
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Step

MIN_PAIRS = 3
LEFT_OUT = 0.05
"""Share of the pairs that the spread leaves out at each end; of fewer than 20 pairs none."""

Verdict = Literal["pays-off", "costs", "no-difference", "mixed"]


@dataclass(frozen=True, slots=True)
class Repetition:
    """One run of the workload on one of the two engines, in the order in which they ran."""

    caching: bool
    wall_ns: int  # from the first request sent to the last one finished
    num_tokens: int  # of prompts, and sampled ones
    host_bytes: int | None = None  # of vLLM-Omni's tensor cache behind it; None: there is none


@dataclass(slots=True)
class RunTimes:
    """What the trace says of one repetition."""

    wall_ns: int
    num_tokens: int
    num_steps: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    first_token_ns: list[int] = field(default_factory=list)  # of every request that has one
    steps_ns: int = 0  # of the steps whose output was recorded
    phases_ns: dict[str, int] = field(default_factory=dict)
    peak_blocks: int = 0  # of the pool, in use after a schedule()

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / (self.wall_ns / 1e9) if self.wall_ns else 0.0

    @property
    def median_first_token_ns(self) -> float | None:
        return statistics.median(self.first_token_ns) if self.first_token_ns else None

    @property
    def tensor_share(self) -> float | None:
        """Of the steps' time, in a tensor cache; None: none was at work, or it is not known."""
        spent = [self.phases_ns[phase] for phase in TENSOR_PHASES if phase in self.phases_ns]
        return sum(spent) / self.steps_ns if spent and self.steps_ns else None


@dataclass(frozen=True, slots=True)
class Side:
    """All repetitions on one of the engines, without the one that warmed it up."""

    runs: Sequence[RunTimes]
    block_bytes: int | None  # one block of the pool on one rank; None: not recorded
    host_bytes: int | None  # of vLLM-Omni's tensor cache at the end

    def median(self, of: Callable[[RunTimes], float | None]) -> float | None:
        values = [value for value in map(of, self.runs) if value is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """With caching over without, in neighbouring runs."""

    median: float
    lowest: float
    highest: float

    @property
    def direction(self) -> int:
        """-1: lower with caching, 1: higher, 0: the spread covers the difference."""
        return -1 if self.highest < 1 else 1 if self.lowest > 1 else 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides, and what follows from them."""

    on: Side
    off: Side

    @property
    def num_pairs(self) -> int:
        return len(self.on.runs)

    @property
    def wall(self) -> Ratio:
        ratio = self.ratio(lambda run: run.wall_ns)
        assert ratio is not None  # every run took its time
        return ratio

    @property
    def first_token(self) -> Ratio | None:
        return self.ratio(lambda run: run.median_first_token_ns)

    def ratio(self, of: Callable[[RunTimes], float | None]) -> Ratio | None:
        """None: a run has no such figure, or none that can be divided by."""
        ratios = []
        for on, off in zip(self.on.runs, self.off.runs, strict=True):
            one, other = of(on), of(off)
            if one is None or not other:
                return None
            ratios.append(one / other)
        ratios.sort()
        left_out = int(LEFT_OUT * len(ratios))
        return Ratio(statistics.median(ratios), ratios[left_out], ratios[-1 - left_out])

    @property
    def hit_rate(self) -> float | None:
        queried = sum(run.queried_tokens for run in self.on.runs)
        return sum(run.hit_tokens for run in self.on.runs) / queried if queried else None

    @property
    def verdict(self) -> Verdict:
        first = self.first_token
        directions = {self.wall.direction, 0 if first is None else first.direction} - {0}
        if not directions:
            return "no-difference"
        if len(directions) > 1:
            return "mixed"
        return "pays-off" if directions == {-1} else "costs"


def compare(run: Run, repetitions: Sequence[Repetition], num_requests: int) -> Comparison:
    """Join the trace of both engines with their repetitions, of `num_requests` requests each.

    The first repetition of each engine warms it up and is left out. BadTraceError: the trace is not
    that of these repetitions.
    """
    found: dict[bool, list[RunTimes]] = {
        caching: [
            RunTimes(one.wall_ns, one.num_tokens) for one in repetitions if one.caching is caching
        ]
        for caching in (True, False)
    }
    sources: dict[bool, EngineSource] = {}
    for step in run.steps():
        caching = step.engine.enable_prefix_caching
        if sources.setdefault(caching, step.engine).engine != step.engine.engine:
            raise _unexpected(run, "more than one engine of a kind")
        number = min(one.number for one in step.requests) // num_requests
        if number >= len(found[caching]):
            raise _unexpected(run, f"a repetition {number}")
        _add(found[caching][number], step)
    if len(sources) < 2 or len(found[True]) != len(found[False]):
        raise _unexpected(run, "no steps of one of the engines")
    sides = []
    for caching in (True, False):
        sizes = [one.host_bytes for one in repetitions if one.caching is caching]
        sides.append(Side(found[caching][1:], _block_bytes(sources[caching]), sizes[-1]))
    return Comparison(*sides)


def _add(times: RunTimes, step: Step) -> None:
    record = step.record
    times.num_steps += 1
    usable = step.engine.num_gpu_blocks - 1
    times.peak_blocks = max(times.peak_blocks, usable - record.num_free_blocks)
    whole = step_ns(record)
    if whole is not None:
        times.steps_ns += whole
    for phase, duration in step_times(step).items():
        if duration is not None:
            times.phases_ns[phase] = times.phases_ns.get(phase, 0) + duration
    for one in record.admitted:
        if not one.resumed and one.session_prompt_tokens is None:
            times.queried_tokens += one.queried_tokens
            times.hit_tokens += one.hit_tokens
    for share in step.scheduled:
        prompt = share.request.record.num_prompt_tokens
        end = share.num_computed_tokens + share.num_scheduled_tokens
        has_first = share.num_computed_tokens < prompt <= end and not share.resumed
        if has_first and whole is not None:
            arrived = share.request.record.arrival_ns - (share.request.record.hash_ns or 0)
            times.first_token_ns.append(record.start_ns + whole - arrived)


def _block_bytes(source: EngineSource) -> int | None:
    sizes = [tensor.get("size") for tensor in source.kv_cache_tensors]
    if not sizes or any(not isinstance(size, int) for size in sizes):
        return None
    return sum(size for size in sizes if isinstance(size, int)) // source.num_gpu_blocks


def _unexpected(run: Run, what: str) -> BadTraceError:
    return BadTraceError(
        f"{run.folder} has {what}: it is not the trace of this comparison, or records were lost"
    )


def phases_seen(comparison: Comparison) -> Iterator[str]:
    """Phases that some repetition has."""
    runs = [*comparison.on.runs, *comparison.off.runs]
    for phase in PHASES:
        if any(phase in run.phases_ns for run in runs):
            yield phase
