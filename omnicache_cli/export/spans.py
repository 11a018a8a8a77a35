"""Requests as nested async spans: from the arrival to the end, and in it how they waited and ran.

A request is `b` .. `e` under its own id; inside it follow `waiting`, `running` and, after a
preemption, `preempted` one after the other, so that every instant of its life has one name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from omnicache_cli.export.event import Args, TraceEvent, microseconds
from omnicache_cli.trace.records import Admission, AnyEvent, Finished, Preempted
from omnicache_cli.trace.steps import Request, Step
from omnicache_cli.trace.views.requests import RequestFollower, RequestRow

CATEGORY = "request"
NOT_FINISHED = "not finished in this trace"


@dataclass(slots=True)
class _Span:
    """A request whose outer span is open."""

    id: str
    name: str
    state: str  # name of the inner span that is open
    last_ns: int  # of its last event: none lies before


class RequestSpans:
    """Follows the requests of one engine. Memory is bounded by the live ones.

    Instants are nanoseconds on the clock of the engine's file; `origin_ns` of it is ts = 0.
    """

    def __init__(self, pid: int, tid: int, origin_ns: int, ids: Iterator[int]) -> None:
        self._pid, self._tid, self._origin_ns, self._ids = pid, tid, origin_ns, ids
        self._open: dict[int, _Span] = {}
        self._ended_early: dict[int, tuple[Finished, int]] = {}  # before their arrival was told
        self._follower = RequestFollower()

    def of_step(self, step: Step) -> Iterator[TraceEvent]:
        """The events of one step and of what followed it."""
        start_ns = step.record.start_ns
        rows = {row.number: row for row in self._follower.ended(step)}
        for request in step.arrived:
            yield from self._arrive(request, start_ns, rows)
        self._ended_early.clear()
        for request in step.requests:
            if request.number not in self._open:  # its record was lost
                yield from self._arrive(request, start_ns, rows)
        # When inside schedule() it happened is not recorded: all of it is drawn at its start.
        inside = step.before + step.record.events
        yield from self._apply(inside, [start_ns] * len(inside), rows)
        for admission in step.record.admitted:
            yield from self._admit(admission, start_ns, step.number)
        yield from self._apply(step.after, step.after_ns, rows)

    def rest(self, never_scheduled: Iterable[Request], last_ns: int) -> Iterator[TraceEvent]:
        """Close what is open when the trace ends, at its last instant."""
        for request in never_scheduled:
            yield from self._arrive(request, last_ns, {})
        rows = {row.number: row for row in self._follower.rest()}
        for number in list(self._open):
            yield from self._end(number, last_ns, _end_args(rows.get(number), None))

    def _arrive(
        self, request: Request, fallback_ns: int, rows: dict[int, RequestRow]
    ) -> Iterator[TraceEvent]:
        record = request.record
        at_ns = fallback_ns if request.is_lost else record.arrival_ns
        args: Args = {"request": request.number, "request_id": record.request_id}
        if request.is_lost:
            args["record"] = "lost"
        else:
            args |= {"prompt_tokens": record.num_prompt_tokens, "max_tokens": record.max_tokens}
        if record.lora_name is not None:
            args["lora"] = record.lora_name
        if record.hash_ns is not None:
            args["hash_us"] = microseconds(record.hash_ns)
        if record.multimodal:
            args["multimodal_items"] = len(record.multimodal)
        span = _Span(f"0x{next(self._ids):x}", request.external_id or "(no id)", "waiting", at_ns)
        self._open[request.number] = span
        yield self._event("b", span, span.name, at_ns, args)
        yield self._event("b", span, span.state, at_ns)
        early = self._ended_early.pop(request.number, None)
        if early is not None:
            event, ended_ns = early
            yield from self._end(
                request.number, ended_ns, _end_args(rows.get(request.number), event)
            )

    def _admit(self, admission: Admission, at_ns: int, step: int) -> Iterator[TraceEvent]:
        span = self._open.get(admission.request)
        if span is None:
            return
        args: Args = {"step": step, "computed_tokens": admission.num_computed_tokens}
        if admission.session_prompt_tokens is None:
            args["hit_tokens"] = admission.hit_tokens
            args["queried_tokens"] = admission.queried_tokens
        else:
            args["session_prompt_tokens"] = admission.session_prompt_tokens
        yield from self._change(span, "running", at_ns, args)

    def _apply(
        self,
        events: Iterable[AnyEvent],
        instants: Iterable[int],
        rows: dict[int, RequestRow],
    ) -> Iterator[TraceEvent]:
        for event, at_ns in zip(events, instants, strict=True):
            if isinstance(event, Preempted):
                span = self._open.get(event.request)
                if span is not None:
                    yield from self._change(span, "preempted", at_ns)
            elif isinstance(event, Finished):
                if event.request in self._open:
                    args = _end_args(rows.get(event.request), event)
                    yield from self._end(event.request, at_ns, args)
                else:
                    self._ended_early[event.request] = (event, at_ns)

    def _change(
        self, span: _Span, state: str, at_ns: int, args: Args | None = None
    ) -> Iterator[TraceEvent]:
        yield self._event("e", span, span.state, at_ns)
        span.state = state
        yield self._event("b", span, state, at_ns, args)

    def _end(self, number: int, at_ns: int, args: Args) -> Iterator[TraceEvent]:
        span = self._open.pop(number)
        yield self._event("e", span, span.state, at_ns)
        yield self._event("e", span, span.name, at_ns, args)

    def _event(
        self, phase: str, span: _Span, name: str, at_ns: int, args: Args | None = None
    ) -> TraceEvent:
        span.last_ns = max(span.last_ns, at_ns)
        return TraceEvent(
            "b" if phase == "b" else "e",
            self._pid,
            self._tid,
            microseconds(span.last_ns - self._origin_ns),
            cat=CATEGORY,
            id=span.id,
            name=name,
            args=args,
        )


def _end_args(row: RequestRow | None, event: Finished | None) -> Args:
    """What is known of a request when it has ended."""
    status = NOT_FINISHED if event is None else event.status
    args: Args = {"status": status}
    if event is not None:
        args["output_tokens"] = event.num_output_tokens
    if row is not None:
        if row.hit_tokens is not None:
            args["hit_tokens"] = row.hit_tokens
        args["scheduled_tokens"] = row.computed_tokens
        args["preemptions"] = row.num_preemptions
    return args
