"""A run as rows of the tables, made while the run is read. Bounded memory, as `timeline`."""

from collections.abc import Iterator
from dataclasses import dataclass

from omnicache_cli.export.clock import FileClock, join_clocks
from omnicache_cli.export.tables import (
    ENGINES,
    EVICTIONS,
    RANK_STEPS,
    REQUEST_STEPS,
    REQUESTS,
    STEPS,
    Cell,
    TableForm,
)
from omnicache_cli.trace.phases import OF_WORKER, PHASES, step_times, worker_times
from omnicache_cli.trace.records import (
    NO_REQUEST,
    EngineSource,
    Evicted,
    Finished,
    ForwardStep,
    RankStep,
    WorkerSource,
)
from omnicache_cli.trace.run import RankFile, Run
from omnicache_cli.trace.steps import Request, Step
from omnicache_cli.trace.views.requests import RequestFollower, RequestRow, row_of
from omnicache_cli.trace.views.steps import count_events, num_prefill_tokens

Row = tuple[Cell, ...]
Rows = Iterator[tuple[TableForm, Row]]


@dataclass(slots=True)
class _Times:
    """Instants of one request, on the wall clock, and what hashing it took."""

    arrival: int | None = None
    hash_ns: int | None = None
    first: int | None = None
    finished: int | None = None


class TableRows:
    """Reads a run once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._clocks = join_clocks({file.path.name: file.header for file in run.files})
        self._follower = RequestFollower()
        self._times: dict[tuple[str, int], _Times] = {}  # of live requests

    def rows(self) -> Rows:
        """Every row with its table; those of one table and partition in order."""
        for step in self._run.steps():
            clock = self._clock(self._run.file_of(step.engine))
            yield STEPS, self._step(step, clock)
            yield from _request_steps(step)
            for view in step.passes:
                yield RANK_STEPS, self._rank_step(step, view.worker, view.record)
            yield from _evictions(step)
            yield from self._requests(step, clock)
        for row in self._follower.rest():
            yield REQUESTS, self._request(row)
        for name, requests in self._run.never_scheduled_on.items():
            clock = self._clock(self._run.file_of(self._run.engines[name]))
            for request in requests:
                self._times[name, request.number] = _arrival(request, clock)
                yield REQUESTS, self._request(row_of(name, request))
        for engine in self._run.engines.values():
            yield ENGINES, self._engine(engine)

    def partitions(self) -> Iterator[tuple[TableForm, Row]]:
        """Partitions that every export has, with rows or without; once `rows` has ended."""
        yield ENGINES, ()
        for name in self._run.engines:
            for table in (STEPS, REQUESTS, REQUEST_STEPS, EVICTIONS):
                yield table, (name,)
            ranks = {one.rank for one in self._run.workers if one.engine == name}
            for rank in sorted(ranks or {0}):
                yield RANK_STEPS, (name, rank)

    def _clock(self, file: RankFile) -> FileClock:
        return self._clocks[file.path.name]

    def _engine(self, source: EngineSource) -> Row:
        file = self._run.file_of(source)
        header = file.header
        return (
            source.engine,
            source.stage_id,
            source.stage,
            source.model,
            source.scheduler_class,
            source.num_gpu_blocks,
            source.block_size,
            source.hash_block_size,
            len(source.groups),
            source.enable_prefix_caching,
            source.parallel.get("world_size"),
            header.host,
            header.pid,
            self._clock(file).unix_ns(0),
            header.vllm_version,
            header.tool_version,
        )

    def _step(self, step: Step, clock: FileClock) -> Row:
        record = step.record
        counts = count_events(step.before + record.events + step.after)
        new = [
            one for one in record.admitted if not one.resumed and one.session_prompt_tokens is None
        ]
        again = [one for one in record.admitted if one.resumed]
        times = step_times(step)
        return (
            step.engine.engine,
            step.number,
            clock.unix_ns(record.start_ns),
            len(step.requests),
            step.num_scheduled_tokens,
            num_prefill_tokens(step) if _may_prefill(step) else 0,
            record.num_running,
            record.num_waiting,
            len(new),
            len(again),
            counts["num_preempted"],
            counts["num_finished"],
            sum(one.queried_tokens for one in new),
            sum(one.hit_tokens for one in new),
            sum(one.hit_tokens for one in again),
            sum(one.num_computed_tokens - one.hit_tokens for one in new),
            record.num_free_blocks,
            step.engine.num_gpu_blocks - 1 - record.num_free_blocks,
            counts["allocated_blocks"],
            counts["cached_blocks"],
            counts["evicted_blocks"],
            counts["freed_blocks"],
            *(times[phase] for phase in PHASES),
            step.gap,
        )

    def _rank_step(self, step: Step, worker: WorkerSource, record: ForwardStep | RankStep) -> Row:
        file = self._run.file_of(worker)
        times = worker_times(record)
        batch: Row = (None,) * 6
        if isinstance(record, ForwardStep):
            group = record.groups[0] if record.groups else None
            descriptor = record.batch_descriptor
            batch = (
                record.num_reqs,
                None if group is None else group.num_actual_tokens,
                None if group is None else group.max_query_len,
                None if group is None else group.max_seq_len,
                None if descriptor is None else descriptor.num_tokens,
                record.cudagraph_mode,
            )
        return (
            step.engine.engine,
            worker.rank,
            step.number,
            worker.tp_rank,
            worker.pp_rank,
            file.header.host,
            file.header.pid,
            self._clock(file).unix_ns(record.start_ns),
            *(times[phase] for phase in OF_WORKER),
            *batch,
        )

    def _requests(self, step: Step, clock: FileClock) -> Rows:
        """The requests that this step ended."""
        name = step.engine.engine
        start = clock.unix_ns(step.record.start_ns)
        for request in step.arrived:
            self._times[name, request.number] = _arrival(request, clock)
        if step.record.scheduled is not None:  # else all of them were scheduled before
            for request in step.requests:
                times = self._times.setdefault((name, request.number), _Times())
                if times.first is None:
                    times.first = start
        for event, at_ns in zip(step.after, step.after_ns, strict=True):
            if isinstance(event, Finished) and (name, event.request) in self._times:
                self._times[name, event.request].finished = clock.unix_ns(at_ns)
        for row in self._follower.ended(step):
            yield REQUESTS, self._request(row)

    def _request(self, row: RequestRow) -> Row:
        times = self._times.pop((row.engine, row.number), _Times())
        return (
            row.engine,
            row.number,
            row.external_id,
            row.request_id,
            times.arrival,
            times.first,
            times.finished,
            row.arrival_step,
            row.first_step,
            row.last_step,
            row.num_steps,
            row.num_prompt_tokens,
            row.queried_tokens,
            row.hit_tokens,
            row.resumed_hit_tokens,
            row.computed_tokens,
            row.num_output_tokens,
            row.num_preemptions,
            row.status,
            row.lora_name,
            row.has_cache_salt,
            row.skips_cache,
            sum(row.num_items.values()),
            times.hash_ns,
        )


def _arrival(request: Request, clock: FileClock) -> _Times:
    if request.is_lost:
        return _Times()
    return _Times(clock.unix_ns(request.record.arrival_ns), request.record.hash_ns)


def _may_prefill(step: Step) -> bool:
    """False where plainly every request decodes one token: prompts are then not looked at."""
    return step.record.num_scheduled_tokens is not None or any(
        computed < request.record.num_prompt_tokens
        for request, computed in zip(step.requests, step.num_computed_tokens, strict=True)
    )


def _request_steps(step: Step) -> Rows:
    name, number = step.engine.engine, step.number
    tokens = step.record.num_scheduled_tokens or [1] * len(step.requests)
    admitted = {one.request: one for one in step.record.admitted}
    for request, computed, scheduled in zip(
        step.requests, step.num_computed_tokens, tokens, strict=True
    ):
        hit, resumed = None, False
        if admitted and (one := admitted.get(request.number)) is not None:
            hit = one.hit_tokens if one.session_prompt_tokens is None else None
            resumed = one.resumed
        yield REQUEST_STEPS, (name, number, request.number, computed, scheduled, hit, resumed)


def _evictions(step: Step) -> Rows:
    for event in step.before + step.record.events + step.after:
        if isinstance(event, Evicted):
            yield (
                EVICTIONS,
                (
                    step.engine.engine,
                    step.number,
                    event.block_id,
                    event.group,
                    event.hash,
                    _known(event.owner),
                    _known(event.request),
                ),
            )


def _known(request: int) -> int | None:
    return None if request == NO_REQUEST else request
