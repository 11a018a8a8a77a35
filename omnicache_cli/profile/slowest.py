"""The slowest steps of a run, and what the records say that was special about them."""

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from omnicache_cli.trace.phases import Times, step_ns
from omnicache_cli.trace.records import CacheReset, GroupForward
from omnicache_cli.trace.steps import ForwardView, Step
from omnicache_cli.trace.views.steps import count_events, num_prefill_tokens
from omnicache_cli.trace.views.words import counted

NUM_SLOWEST = 10

MAX_SHAPES = 1 << 16
"""Shapes that are remembered for each engine; with more, nothing is said of first ones."""

MAX_CHUNKS = 3
"""Parts of prompts that are named for one step."""

Shape = tuple[str, int]
"""CUDA graph mode, and tokens that the batch was padded to."""


@dataclass(frozen=True, slots=True)
class SlowStep:
    """One step, as far as it tells why it took long."""

    engine: str
    step: int
    duration_ns: int
    is_whole: bool  # False: only the phases that were recorded are counted
    times: Times  # what each phase took for itself, and the rest
    num_requests: int
    num_scheduled_tokens: int
    num_prefill_tokens: int
    hit_tokens: int | None  # of the requests that were admitted; None: none was
    cudagraph_mode: str | None  # None: no forward pass was recorded in full
    num_padding_tokens: int | None
    special: tuple[str, ...]

    @property
    def largest(self) -> str:
        """The phase, or the rest, that took most of it."""
        return max(self.times, key=lambda phase: self.times[phase] or 0)


class SlowestSteps:
    """Keeps the slowest steps that it was given."""

    def __init__(self, number: int = NUM_SLOWEST) -> None:
        self._number = number
        self._kept: list[tuple[int, int, SlowStep]] = []  # a heap, the fastest of them first
        self._shapes: defaultdict[str, set[Shape]] = defaultdict(set)
        self._num_seen = 0

    def add(self, step: Step, own_times: Times) -> None:
        """`own_times`: what each phase took for itself, and the rest."""
        self._num_seen += 1
        new_shape = self._new_shape(step)
        lasted = step_ns(step.record)
        duration = lasted
        if duration is None:
            duration = sum(one for one in own_times.values() if one is not None)
        if len(self._kept) >= self._number and duration <= self._kept[0][0]:
            return
        entry = (
            duration,
            -self._num_seen,  # of equals the first stays
            _slow_step(step, own_times, duration, lasted is not None, new_shape),
        )
        if len(self._kept) < self._number:
            heapq.heappush(self._kept, entry)
        else:
            heapq.heapreplace(self._kept, entry)

    def ordered(self) -> list[SlowStep]:
        """The slowest first."""
        return [one for _, _, one in sorted(self._kept, reverse=True)]

    def _new_shape(self, step: Step) -> Shape | None:
        """The shape, where the engine had not run it before."""
        if not step.forwards:
            return None
        shape = _shape(step, step.forwards[0])
        seen = self._shapes[step.engine.engine]
        if shape in seen or len(seen) >= MAX_SHAPES:
            return None
        seen.add(shape)
        return shape


def _shape(step: Step, view: ForwardView) -> Shape:
    descriptor = view.record.batch_descriptor
    tokens = step.num_scheduled_tokens if descriptor is None else descriptor.num_tokens
    return view.record.cudagraph_mode, tokens


def _slow_step(
    step: Step, own_times: Times, duration_ns: int, is_whole: bool, first_of: Shape | None
) -> SlowStep:
    admitted = [one.hit_tokens for one in step.record.admitted if one.session_prompt_tokens is None]
    mode = padding = None
    if step.forwards:
        mode, tokens = _shape(step, step.forwards[0])
        padding = max(0, tokens - step.num_scheduled_tokens)
    return SlowStep(
        engine=step.engine.engine,
        step=step.number,
        duration_ns=duration_ns,
        is_whole=is_whole,
        times=own_times,
        num_requests=len(step.requests),
        num_scheduled_tokens=step.num_scheduled_tokens,
        num_prefill_tokens=num_prefill_tokens(step),
        hit_tokens=sum(admitted) if admitted else None,
        cudagraph_mode=mode,
        num_padding_tokens=padding,
        special=tuple(_special(step, first_of)),
    )


def _special(step: Step, first_of: Shape | None) -> Iterator[str]:
    """What a step has that most have not, in words."""
    if step.number == 0:
        yield "the first step of its engine"
    elif first_of is not None:
        yield f"the first with a batch of {counted(first_of[1], 'token')}"
    yield from _chunks(step)
    admitted = [one for one in step.record.admitted if one.session_prompt_tokens is None]
    resumed = sum(one.resumed for one in admitted)
    if len(admitted) > resumed:
        yield f"{counted(len(admitted) - resumed, 'request')} admitted"
    if resumed:
        yield f"{counted(resumed, 'request')} resumed after a preemption"
    counts = count_events(step.before + step.record.events + step.after)
    for name, noun in (
        ("num_preempted", "preemption"),
        ("evicted_blocks", "evicted block"),
        ("num_finished", "finished request"),
    ):
        if counts[name]:
            yield counted(counts[name], noun)
    items = sum(len(indices) for _, indices in step.record.scheduled_encoder_inputs)
    if items:
        yield f"the encoder ran on {counted(items, 'item')}"
    if step.record.spec_tokens:
        yield f"{counted(sum(n for _, n in step.record.spec_tokens), 'draft token')}"
    if any(isinstance(one, CacheReset) for one in step.before + step.after):
        yield "a reset of the prefix cache"
    if any(_cascades(group.record) for view in step.forwards for group in view.groups):
        yield "cascade attention"
    if step.gap:
        yield "records were lost before it"


def _chunks(step: Step) -> Iterator[str]:
    """Requests of whose prompts only a part was computed."""
    found = []
    for one in step.scheduled:
        start = one.num_computed_tokens
        end = start + one.num_scheduled_tokens
        prompt = one.request.record.num_prompt_tokens
        begins_later = start > (one.hit_tokens or 0) and start < prompt
        if start < prompt and (end < prompt or (begins_later and not one.resumed)):
            found.append(f"a chunk of #{one.request.number}, tokens {start} to {end} of {prompt}")
    yield from found[:MAX_CHUNKS]
    if len(found) > MAX_CHUNKS:
        yield f"{counted(len(found) - MAX_CHUNKS, 'more chunk')}"


def _cascades(group: GroupForward) -> bool:
    return bool(group.use_cascade)
