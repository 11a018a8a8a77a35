"""Steps as a reader sees them, and the state that rebuilds them from records.

Records say only what changed. `SchedulerState` and `WorkerState` each follow one source and
restore the rest: a step that names no batch has the batch of the step before.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.records import (
    AnyEvent,
    CacheGroup,
    EngineSource,
    Finished,
    ForwardStep,
    Freed,
    GroupForward,
    Hashed,
    Preempted,
    RankStep,
    RequestRecord,
    Runs,
    SchedulerStep,
    WorkerSource,
    external_id,
    from_runs,
)

NOT_CACHED = CacheGroup("no KV cache", 1, 0, [], 0, maps_slots=False, prefix_cacheable=False)
"""A group that the scheduler does not know."""


@dataclass(slots=True, eq=False)
class Request:
    """One request's life as far as the trace has been read."""

    record: RequestRecord
    external_id: str
    num_computed_tokens: int = 0  # when it was last part of a batch that has changed
    block_hashes: list[str] = field(default_factory=list)
    block_ids: list[list[int]] = field(default_factory=list)  # per group, the scheduler's view
    num_admissions: int = 0
    status: str | None = None  # RequestStatus name once finished
    num_output_tokens: int | None = None
    is_lost: bool = False  # its record was lost: what `record` says is made up

    @property
    def number(self) -> int:
        """Arrival number in its engine."""
        return self.record.request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of one step: tokens [computed, computed + scheduled)."""

    request: Request
    num_computed_tokens: int  # when the step began, the hit included
    num_scheduled_tokens: int
    hit_tokens: int | None  # prefix-cache hit; None: the cache is not asked, it runs already
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class GroupView:
    """Attention metadata of one KV cache group in one forward pass, rebuilt in full.

    `block_table` has one list per row with the used columns only: what stands behind them is
    left over from earlier requests and no kernel reads it. None: not read in this step.
    """

    group: int
    record: GroupForward
    base: GroupForward  # of group 0, for the vectors that all groups share
    block_table: tuple[list[int], ...] | None  # (num_reqs, used columns)

    @property
    def num_actual_tokens(self) -> int | None:
        return self.record.num_actual_tokens

    @property
    def max_query_len(self) -> int | None:
        return self.record.max_query_len

    @property
    def max_seq_len(self) -> int | None:
        return self.record.max_seq_len

    @property
    def query_start_loc(self) -> list[int] | None:
        """(num_reqs + 1,)"""
        own = self.record.query_start_loc
        runs = self.base.query_start_loc if own is None else own
        return None if runs is None else from_runs(runs)

    @property
    def seq_lens(self) -> list[int] | None:
        """(num_reqs,)"""
        own = self.record.seq_lens
        return self.base.seq_lens if own is None else own

    @property
    def slot_runs(self) -> Runs | None:
        """`slot_mapping` without its padding, as runs."""
        slots = self.record.slots
        if slots is None:
            return self.record.slot_mapping
        return [part for slot in slots for part in (slot, 1)]

    @property
    def slot_mapping(self) -> list[int] | None:
        """(num_tokens,) padding included; None: not read, or the group maps no slots."""
        slots = self.record.slots
        if slots is None:
            runs = self.record.slot_mapping
            if runs is None:
                return None
            slots = from_runs(runs)
        return slots + [-1] * self.record.num_slot_padding


@dataclass(frozen=True, slots=True)
class ForwardView:
    """One forward pass on one rank."""

    worker: WorkerSource
    record: ForwardStep
    request_ids: list[str]  # internal id per batch row
    groups: list[GroupView]


@dataclass(frozen=True, slots=True)
class RankView:
    """One forward pass of a rank that recorded only a digest of its batch."""

    worker: WorkerSource
    record: RankStep


@dataclass(slots=True)
class Step:
    """One engine step, scheduler and workers together."""

    engine: EngineSource
    record: SchedulerStep
    requests: list[Request]  # that the step scheduled, in the scheduler's order
    num_computed_tokens: list[int]  # of each request when the step began, the hit included
    forwards: list[ForwardView] = field(default_factory=list)  # by rank; empty: none recorded
    ranks: list[RankView] = field(default_factory=list)  # further tensor-parallel ranks
    before: list[AnyEvent] = field(default_factory=list)  # only where events preceded step 0
    after: list[AnyEvent] = field(default_factory=list)  # until the next step
    after_ns: list[int] = field(default_factory=list)  # when each of `after` was recorded
    arrived: list[Request] = field(default_factory=list)  # since the step before
    gap: bool = False  # records were lost before this step

    @property
    def number(self) -> int:
        return self.record.step

    @property
    def passes(self) -> list[ForwardView | RankView]:
        """The forward passes of all ranks, those that recorded only a digest last."""
        return [*self.forwards, *self.ranks]

    @property
    def scheduled(self) -> list[ScheduledRequest]:
        """Every request's share, in the scheduler's order; made anew at each call."""
        tokens = self.record.num_scheduled_tokens or [1] * len(self.requests)
        admitted = {one.request: one for one in self.record.admitted}
        shares = []
        for request, computed, scheduled in zip(
            self.requests, self.num_computed_tokens, tokens, strict=True
        ):
            admission = admitted.get(request.number)
            hit = None
            if admission is not None and admission.session_prompt_tokens is None:
                hit = admission.hit_tokens
            resumed = admission is not None and admission.resumed
            shares.append(ScheduledRequest(request, computed, scheduled, hit, resumed))
        return shares

    @property
    def num_scheduled_tokens(self) -> int:
        tokens = self.record.num_scheduled_tokens
        return len(self.requests) if tokens is None else sum(tokens)

    def group_spec(self, group: int) -> CacheGroup:
        """The scheduler's word on a group. A runner may have more: encoder-only layers."""
        groups = self.engine.groups
        return groups[group] if 0 <= group < len(groups) else NOT_CACHED


class SchedulerState:
    """Follows one scheduler."""

    def __init__(self, source: EngineSource) -> None:
        self.source = source
        self.lossy = False  # records were lost: what they declared may be unknown
        self.requests: dict[int, Request] = {}  # live ones by arrival number
        self._batch: list[Request] = []  # of the step before, and where they stand after it
        self._next: list[int] = []

    def add_request(self, record: RequestRecord) -> Request:
        name = external_id(record.request_id, randomized=self.source.randomized_request_ids)
        request = Request(record, name, block_hashes=list(record.block_hashes))
        self.requests[record.request] = request
        return request

    def step(self, record: SchedulerStep) -> Step:
        """Apply one step. BadTraceError: it contradicts itself or names an unknown request."""
        free, size = record.num_free_blocks, self.source.num_gpu_blocks
        if free >= size:  # one of them is the null block
            raise BadTraceError(
                f"step {record.step} of engine {self.source.engine} has {free} free blocks in a "
                f"pool of {size}; the trace is damaged, record it again"
            )
        self.apply(record.events)
        for one in record.admitted:
            request = self._request(one.request, record.step)
            request.block_ids = [from_runs(runs) for runs in one.block_ids]
            request.num_admissions += 1
            if one.session_prompt_tokens is not None:
                request.record = replace(
                    request.record, num_prompt_tokens=one.session_prompt_tokens
                )
        for number, additions in record.new_block_ids:
            _extend_table(self._request(number, record.step).block_ids, additions)
        if record.scheduled is not None:
            for request, position in zip(self._batch, self._next, strict=True):
                request.num_computed_tokens = position
            self._batch = [self._request(number, record.step) for number in record.scheduled]
            self._next = [request.num_computed_tokens for request in self._batch]
        if record.admitted:
            start = {one.request: one.num_computed_tokens for one in record.admitted}
            self._next = [
                start.get(request.number, position)
                for request, position in zip(self._batch, self._next, strict=True)
            ]
        computed = record.num_computed_tokens
        if computed is None:
            computed = self._next
        tokens = record.num_scheduled_tokens
        if len(computed) != len(self._batch) or (tokens and len(tokens) != len(self._batch)):
            raise BadTraceError(
                f"step {record.step} of engine {self.source.engine} lists {len(self._batch)} "
                f"requests, {len(tokens or self._batch)} scheduled and {len(computed)} computed "
                "counts; the trace is damaged, record it again"
            )
        self._next = (
            [position + 1 for position in computed]
            if tokens is None
            else [position + count for position, count in zip(computed, tokens, strict=True)]
        )
        return Step(self.source, record, self._batch, computed)

    def apply(self, events: list[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, Hashed):
                request = self._request(event.request, None)
                request.block_hashes[event.first :] = event.hashes
            elif isinstance(event, Finished):
                request = self._request(event.request, None)
                request.status = event.status
                request.num_output_tokens = event.num_output_tokens
            elif isinstance(event, Preempted):
                self._request(event.request, None).block_ids = []
            elif isinstance(event, Freed):
                self._empty_columns(event)

    def _empty_columns(self, event: Freed) -> None:
        """What a running request frees lies behind a window or an older state: null blocks now."""
        request = self.requests.get(event.request)
        if request is None or request.status is not None:
            return
        gone = {*from_runs(event.block_ids), *from_runs(event.still_held)}
        request.block_ids = [
            [0 if block in gone else block for block in table] for table in request.block_ids
        ]

    def forget(self, events: list[AnyEvent]) -> None:
        """Drop the requests that these events finished; nothing later may name them."""
        for event in events:
            if isinstance(event, Finished):
                self.requests.pop(event.request, None)

    def _request(self, number: int, step: int | None) -> Request:
        try:
            return self.requests[number]
        except KeyError:
            if self.lossy:
                request = self.add_request(_lost_request(self.source.source, number))
                request.is_lost = True
                return request
            where = "an event" if step is None else f"step {step}"
            raise BadTraceError(
                f"{where} of engine {self.source.engine} names request {number}, which no record "
                "before it declares; the trace is damaged, record it again"
            ) from None


def _lost_request(source: int, number: int) -> RequestRecord:
    """Stands for a request whose record was lost."""
    return RequestRecord(
        source=source,
        request=number,
        request_id=f"(lost #{number})",
        arrival_ns=0,
        arrival_step=0,
        num_prompt_tokens=0,
        max_tokens=0,
        block_hashes=[],
    )


def _extend_table(table: list[list[int]], additions: list[Runs]) -> None:
    table += [[] for _ in range(len(additions) - len(table))]
    for ids, runs in zip(table, additions, strict=False):
        ids.extend(from_runs(runs))


class WorkerState:
    """Follows one model runner. Rows are replaced, never changed: views may keep them."""

    def __init__(self, source: WorkerSource) -> None:
        self.source = source
        self._names: dict[int, str] = {}
        self._rows: list[int] = []
        self._tables: list[list[list[int]]] = []  # per group, per row

    def step(self, record: ForwardStep) -> ForwardView:
        """Apply one forward pass. BadTraceError: it names a row that was never declared."""
        if record.restated:
            self._names, self._rows, self._tables = {}, [], []
        self._names.update(record.new_requests)
        if record.rows is not None:
            self._rows = record.rows
        try:
            ids = [self._names[name] for name in self._rows]
        except KeyError as error:
            raise BadTraceError(
                f"the forward pass of step {record.step} on rank {self.source.rank} names batch "
                f"row {error}, which no record before it declares; the trace is damaged, record it "
                "again"
            ) from None
        views = []
        for number, group in enumerate(record.groups):
            if number == len(self._tables):
                self._tables.append([])
            table = None
            if group.block_table is not None:
                self._tables[number] = _updated(self._tables[number], group.block_table, record)
                table = tuple(self._tables[number])
            views.append(GroupView(number, group, record.groups[0], table))
        return ForwardView(self.source, record, ids, views)


def _updated(
    table: list[list[int]], changes: list[tuple[int, int, Runs]], record: ForwardStep
) -> list[list[int]]:
    table = table[: record.num_reqs] + [[] for _ in range(record.num_reqs - len(table))]
    for row, first, runs in changes:
        if not 0 <= row < len(table) or not 0 <= first <= len(table[row]):
            raise BadTraceError(
                f"the forward pass of step {record.step} changes block table row {row} from column "
                f"{first} on, which is not there; the trace is damaged, record it again"
            )
        table[row] = table[row][:first] + from_runs(runs)
    return table
