"""One engine on the timeline: its steps as slices and counters, its requests as spans."""

from collections.abc import Callable, Iterable, Iterator

from omnicache_cli.export.event import Args, TraceEvent, microseconds
from omnicache_cli.export.spans import RequestSpans
from omnicache_cli.export.tracks import Tracks
from omnicache_cli.trace.records import (
    CacheReset,
    EngineSource,
    ForwardStep,
    RankStep,
    WorkerSource,
)
from omnicache_cli.trace.run import RankFile, Run
from omnicache_cli.trace.steps import Request, Step
from omnicache_cli.trace.views.steps import count_events

STEP, PHASE, COUNTER, MARK = "step", "phase", "counter", "mark"
"""Categories."""

Origin = Callable[[RankFile], int]
"""The instant of ts = 0 on the clock of a file, in nanoseconds."""


class EngineTrack:
    """Follows one engine. Memory is bounded by its live requests."""

    def __init__(
        self,
        run: Run,
        tracks: Tracks,
        origin_of: Origin,
        source: EngineSource,
        ids: Iterator[int],
        counter_id: str | None,
    ) -> None:
        """`ids`: numbers for requests, unique in the whole timeline. `counter_id`: tells its
        counters from those of another engine in the same process."""
        self._run, self._tracks, self._origin_of = run, tracks, origin_of
        self._origin_ns = origin_of(run.file_of(source))
        self._pid, self._tid = tracks.scheduler(run, source)
        self._spans = RequestSpans(self._pid, self._tid, self._origin_ns, ids)
        self._num_blocks = source.num_gpu_blocks - 1  # the null block is never handed out
        self._counter_id = counter_id
        self._counters: dict[str, Args] = {}  # as they were written last
        self._queried = self._hit = self._evicted = self._preempted = 0
        self._last_ns = 0  # from ts = 0
        self._tensors_end: dict[tuple[int, int], int] = {}  # by track, from ts = 0

    def of_step(self, step: Step) -> Iterator[TraceEvent]:
        """Everything that one step did."""
        record = step.record
        start_ns = record.start_ns - self._origin_ns
        if step.gap:
            yield self._mark("records were lost before this step", start_ns)
        yield from self._spans.of_step(step)
        counts = count_events(step.before + record.events + step.after)
        yield from self._schedule(step, counts, start_ns)
        for view in step.passes:
            yield from self._forward(view.worker, view.record)
        yield from self._count(step, counts, start_ns + record.schedule_ns)
        for event, at_ns in zip(step.after, step.after_ns, strict=True):
            self._last_ns = max(self._last_ns, at_ns - self._origin_ns)
            if isinstance(event, CacheReset) and event.successful:
                yield self._mark("prefix cache reset", at_ns - self._origin_ns)

    def rest(self, never_scheduled: Iterable[Request]) -> Iterator[TraceEvent]:
        """Close what is open when the trace ends."""
        return self._spans.rest(never_scheduled, self._last_ns + self._origin_ns)

    def _forward(
        self, worker: WorkerSource, record: ForwardStep | RankStep
    ) -> Iterator[TraceEvent]:
        """One forward pass: a slice, and its phases in it."""
        file = self._run.file_of(worker)
        origin_ns = self._origin_of(file)
        pid, tid = self._tracks.runner(self._run, worker)
        start_ns = record.start_ns - origin_ns
        forward_ns = start_ns + record.prepare_ns
        end_ns = forward_ns + record.forward_ns
        prepare = self._slice(pid, tid, "prepare", start_ns, forward_ns, PHASE)
        forward = self._slice(pid, tid, "forward", forward_ns, end_ns, PHASE)
        yield from self._slice(
            *(pid, tid, "execute_model", start_ns, end_ns, STEP),
            args=_pass_facts(record),
            inner=(prepare, forward),
        )
        if record.sample_ns is not None:
            sample_ns = end_ns  # of a run that did not record it: not before
            if record.sample_start_ns is not None:
                sample_ns = record.sample_start_ns - origin_ns
            after_ns = sample_ns + record.sample_ns
            yield from self._slice(pid, tid, "sample", sample_ns, after_ns, PHASE)
        yield from self._tensor_cache(worker, record, pid, end_ns)

    def _tensor_cache(
        self, worker: WorkerSource, record: ForwardStep | RankStep, pid: int, at_ns: int
    ) -> Iterator[TraceEvent]:
        """Times in a tensor cache are sums over a step, and lie in several places of it: they get
        a track of their own, one behind the other from the end of the forward pass on."""
        sums = {"save": record.save_ns, "restore": record.restore_ns, "copy": record.copy_ns}
        if not any(sums.values()):
            return
        name = f"tensor cache, rank {worker.rank}: time of each step"
        tid = self._tracks.thread(pid, ("tensor cache", worker.engine, worker.rank), name)
        at_ns = max(at_ns, self._tensors_end.get((pid, tid), at_ns))
        for phase, duration_ns in sums.items():
            if duration_ns:
                end_ns = at_ns + duration_ns
                yield from self._slice(pid, tid, phase, at_ns, end_ns, PHASE)
                at_ns = max(at_ns, end_ns)
        self._tensors_end[pid, tid] = at_ns

    def _schedule(self, step: Step, counts: dict[str, int], start_ns: int) -> Iterator[TraceEvent]:
        """schedule(), in it the sums of its parts one behind the other, and what took its output
        in."""
        record = step.record
        pid, tid = self._pid, self._tid
        end_ns = start_ns + record.schedule_ns
        lookup_ns = min(end_ns, start_ns + (record.lookup_ns or 0))
        allocate_ns = min(end_ns, lookup_ns + (record.allocate_ns or 0))
        inner = []
        if record.lookup_ns:
            inner.append(self._slice(pid, tid, "lookup", start_ns, lookup_ns, PHASE))
        if record.allocate_ns:
            inner.append(self._slice(pid, tid, "allocate", lookup_ns, allocate_ns, PHASE))
        yield from self._slice(
            *(pid, tid, "schedule", start_ns, end_ns, STEP),
            args=_schedule_facts(step, counts),
            inner=inner,
        )
        if record.output_ns is not None and record.output_start_ns is not None:
            output_ns = record.output_start_ns - self._origin_ns
            after_ns = output_ns + record.output_ns
            yield from self._slice(pid, tid, "output", output_ns, after_ns, PHASE)

    def _count(self, step: Step, counts: dict[str, int], at_ns: int) -> Iterator[TraceEvent]:
        """The counters that this step changed, as of the end of its schedule()."""
        record = step.record
        self._evicted += counts["evicted_blocks"]
        self._preempted += counts["num_preempted"]
        for one in record.admitted:
            if not one.resumed and one.session_prompt_tokens is None:
                self._queried += one.queried_tokens
                self._hit += one.hit_tokens
        in_use = self._num_blocks - record.num_free_blocks
        counters: dict[str, Args] = {"blocks in use": {"blocks": in_use}}
        if self._num_blocks:
            counters["pool occupancy"] = {"percent": _percent(in_use, self._num_blocks)}
        counters["requests"] = {"running": record.num_running, "waiting": record.num_waiting}
        if self._queried:
            counters["hit rate"] = {"percent": _percent(self._hit, self._queried)}
        counters["evicted blocks"] = {"blocks": self._evicted}
        counters["preemptions"] = {"requests": self._preempted}
        for name, values in counters.items():
            if self._counters.get(name) == values:
                continue
            self._counters[name] = values
            yield TraceEvent(
                "C",
                self._pid,
                ts=microseconds(at_ns),
                cat=COUNTER,
                id=self._counter_id,
                name=name,
                args=values,
            )

    def _slice(
        self,
        pid: int,
        tid: int,
        name: str,
        start_ns: int,
        end_ns: int,
        category: str,
        *,
        args: Args | None = None,
        inner: Iterable[Iterator[TraceEvent]] = (),
    ) -> Iterator[TraceEvent]:
        """A beginning and an end, and between them the slices that lie inside. Not one complete
        event: its end would be a sum, and readers add in floating point. Two slices that touch
        would then overlap. The end has all that the beginning has, which some readers ask for."""
        end_ns = max(start_ns, end_ns)
        self._last_ns = max(self._last_ns, end_ns)
        start, end = microseconds(start_ns), microseconds(end_ns)
        yield TraceEvent("B", pid, tid, start, cat=category, name=name, args=args)
        for one in inner:
            yield from one
        yield TraceEvent("E", pid, tid, end, cat=category, name=name, args=args)

    def _mark(self, name: str, at_ns: int) -> TraceEvent:
        return TraceEvent(
            "i", self._pid, self._tid, microseconds(at_ns), cat=MARK, s="p", name=name
        )


def _schedule_facts(step: Step, counts: dict[str, int]) -> Args:
    record = step.record
    facts: Args = {
        "step": step.number,
        "requests": len(step.requests),
        "scheduled_tokens": step.num_scheduled_tokens,
    }
    if record.admitted:
        facts["admitted"] = len(record.admitted)
        facts["hit_tokens"] = sum(
            one.hit_tokens for one in record.admitted if one.session_prompt_tokens is None
        )
    for name in ("evicted_blocks", "num_preempted", "num_finished"):
        if counts[name]:
            facts[name.removeprefix("num_")] = counts[name]
    return facts


def _pass_facts(record: ForwardStep | RankStep) -> Args:
    facts: Args = {"step": record.step}
    if isinstance(record, ForwardStep):
        facts["requests"] = record.num_reqs
        if record.groups and record.groups[0].num_actual_tokens is not None:
            facts["tokens"] = record.groups[0].num_actual_tokens
        if record.batch_descriptor is not None:
            facts["padded_tokens"] = record.batch_descriptor.num_tokens
        facts["cudagraph_mode"] = record.cudagraph_mode
    return facts


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 3)
