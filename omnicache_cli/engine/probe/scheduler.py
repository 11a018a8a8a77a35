"""Follows one vLLM Scheduler: admissions, pool events, finished requests, one record a step.

Counts hits at admission only: a waiting request is looked up again in every step.
"""

import time
from typing import Any

from msgspec.structs import force_setattr

from omnicache_cli.engine.adapter import engine_source, request_record, short_hash
from omnicache_cli.engine.probe.hash_check import HashCheck
from omnicache_cli.engine.probe.recorder import Recorder
from omnicache_cli.trace.records import (
    NO_REQUEST,
    Admission,
    AfterStep,
    Allocated,
    AnyEvent,
    Cached,
    CachedPartial,
    CacheReset,
    Evicted,
    Finished,
    Freed,
    Hashed,
    HashesMoved,
    Preempted,
    Runs,
    SchedulerStep,
    WrongHash,
    to_runs,
)

STEP_ATTRIBUTE = "omnicache_step"
"""Set on SchedulerOutput, (engine, step): it reaches the workers and joins the two sides."""

MAX_OPEN = 64
"""Steps in flight whose output may still come; vLLM has two, or one for each pipeline stage."""


class SchedulerProbe:
    """State of one traced scheduler. Its methods are called by the wrappers in `hooks`."""

    def __init__(self, recorder: Recorder, scheduler: Any) -> None:
        self.recorder = recorder
        self.busy = False  # inside a wrapped method: a subclass that calls super() counts once
        self.updating = False  # inside update_from_output, likewise
        self.lookup_ns = 0  # in get_computed_blocks, since schedule() began
        self.allocate_ns = 0  # in allocate_slots, likewise
        self.request: Any = None  # the vLLM Request whose blocks are being handled
        self._scheduler = scheduler
        self._source = recorder.new_source()
        self.engine = recorder.new_engine(self._source)
        self._hash_block_size = int(scheduler.hash_block_size)
        self._step = 0
        self._next_number = 0
        self._numbers: dict[str, int] = {}  # live requests: internal id -> arrival number
        self._hashes_seen: dict[str, int] = {}  # entries of Request.block_hashes recorded
        self._computed: dict[str, int] = {}  # where the next step must start, if nothing is said
        self._lookups: dict[str, tuple[int, int]] = {}  # queried and hit tokens of this step
        self._preempted: set[str] = set()
        self._admitted: set[str] = set()  # live requests that have run
        self._finished: set[int] = set()
        self._owners: dict[int, int] = {}  # block -> request that cached it; bounded by the pool
        self._events: list[AnyEvent] = []
        self._batch: list[str] = []  # requests of the step before, and where they stand after it
        self._next: list[int] = []
        self._generation = recorder.generation
        self._group_hits: dict[str, list[int]] = {}  # of this step's lookups
        self._open: dict[int, SchedulerStep] = {}  # by number: their output has not come yet
        self._hash_check: HashCheck | None = None
        if recorder.settings.check_hashes and scheduler.kv_cache_manager.enable_caching:
            self._hash_check = HashCheck(scheduler)
        recorder.on_close.append(self.flush)
        self._declare_engine()

    # -- requests -----------------------------------------------------------------------------

    def is_live(self, request_id: str) -> bool:
        """The request is there already: what comes is the next part of a streaming session."""
        return request_id in self._numbers

    def add_request(self, request: Any) -> None:
        self._restate_after_loss()
        self._numbers[request.request_id] = self._next_number
        self._next_number += 1
        self._declare(request)

    def preempt(self, request: Any) -> None:
        if request.request_id in self._preempted:  # an override called the method it overrides
            return
        self._preempted.add(request.request_id)
        self._events.append(Preempted(self._number(request)))

    def finish(self, request: Any) -> None:
        number = self._numbers.get(request.request_id)
        if number is not None and number not in self._finished:
            self._finished.add(number)
            status = str(request.status)
            self._events.append(Finished(number, status, int(request.num_output_tokens)))

    def forget(self, request: Any) -> None:
        """After its blocks were freed: nothing names this request again."""
        request_id = request.request_id
        self._finished.discard(self._number(request))
        for table in (self._numbers, self._hashes_seen, self._computed, self._lookups):
            table.pop(request_id, None)
        self._preempted.discard(request_id)
        self._admitted.discard(request_id)

    # -- the pool -----------------------------------------------------------------------------

    def lookup(self, request: Any, queried_tokens: int, hit_tokens: int) -> None:
        self._lookups[request.request_id] = (queried_tokens, hit_tokens)

    def group_hits(self, request: Any, hits: list[int]) -> None:
        """Each group's own answer to the lookup that has just been made."""
        if hits:
            self._group_hits[request.request_id] = hits

    def allocate(self, blocks: list[Any]) -> None:
        if blocks:
            ids = to_runs([block.block_id for block in blocks])
            self._events.append(Allocated(self._number(self.request), ids))

    def cache(
        self,
        request: Any,
        blocks: list[Any],
        first: int,
        end: int,
        block_size: int,
        group: int,
        mask: list[bool] | None,
    ) -> None:
        self._note_hashes(request)
        indices, ids = [], []
        number = self._number(request)
        for index in range(first, end):
            block = blocks[index]
            if block.is_null or (mask is not None and not mask[index - first]):
                continue
            indices.append(index)
            ids.append(block.block_id)
            self._owners[block.block_id] = number
        if ids:
            self._events.append(Cached(number, group, to_runs(indices), to_runs(ids)))
            if self._hash_check is not None:
                for index, block_id in zip(indices, ids, strict=True):
                    tokens = (index * block_size, (index + 1) * block_size)
                    for entry, right in self._hash_check.wrong(request, *tokens):
                        hashes = short_hash(right), short_hash(request.block_hashes[entry])
                        self._events.append(WrongHash(number, group, block_id, entry, *hashes))

    def cache_partial(self, request: Any, block: Any, num_tokens: int, group: int) -> None:
        self._note_hashes(request)
        number = self._number(request)
        self._owners[block.block_id] = number
        self._events.append(CachedPartial(number, group, block.block_id, num_tokens))

    def evict(self, block_id: int, hashes: list[bytes]) -> None:
        """`hashes` are vLLM's BlockHashWithGroupId: the hash, then the group in 4 bytes."""
        owner = self._owners.pop(block_id, NO_REQUEST)
        number = self._number(self.request)
        for one in hashes:
            group = int.from_bytes(one[-4:], "big")
            self._events.append(Evicted(block_id, group, short_hash(one[:-4]), owner, number))

    def move_hashes(self, source_block_id: int, target_block_id: int) -> None:
        if source_block_id in self._owners:
            self._owners[target_block_id] = self._owners.pop(source_block_id)
        self._events.append(HashesMoved(source_block_id, target_block_id))

    def free(self, blocks: list[Any]) -> None:
        given = [block for block in blocks if not block.is_null]
        if given:
            freed = to_runs([block.block_id for block in given if block.ref_cnt == 0])
            held = to_runs([block.block_id for block in given if block.ref_cnt])
            self._events.append(Freed(self._number(self.request), freed, held))

    def reset(self, *, successful: bool) -> None:
        if successful:
            self._owners.clear()
        self._events.append(CacheReset(successful))

    # -- steps --------------------------------------------------------------------------------

    def step(self, output: Any, started: int, ended: int) -> None:
        """Record one `schedule()` and mark its output for the workers."""
        if not output.total_num_scheduled_tokens:
            self.flush()
            return
        number = self._step
        self._step += 1
        setattr(output, STEP_ATTRIBUTE, (self.engine, number))
        self._restate_after_loss()
        batch = list(output.num_scheduled_tokens)
        scheduled = list(output.num_scheduled_tokens.values())
        decodes = scheduled.count(1) == len(scheduled)
        if batch != self._batch:
            self._computed.update(zip(self._batch, self._next, strict=True))
            self._next = []
        admitted, counts, new_block_ids = self._requests(output, batch)
        expected = self._next or [self._computed.get(one, -1) for one in batch]
        self._next = (
            [count + 1 for count in counts]
            if decodes
            else [count + more for count, more in zip(counts, scheduled, strict=True)]
        )
        numbers = self._numbers
        scheduler = self._scheduler
        common = list(output.num_common_prefix_blocks)
        record = SchedulerStep(
            source=self._source,
            step=number,
            start_ns=self.recorder.since_start(started),
            schedule_ns=ended - started,
            num_running=len(scheduler.running),
            num_waiting=_num_waiting(scheduler),
            num_free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            scheduled=None if batch == self._batch else [numbers[one] for one in batch],
            num_scheduled_tokens=None if decodes else scheduled,
            num_computed_tokens=None if counts == expected else counts,
            admitted=admitted,
            new_block_ids=new_block_ids,
            events=self._events,
            num_common_prefix_blocks=common if any(common) else [],
            scheduled_encoder_inputs=[
                (numbers[one], list(items))
                for one, items in output.scheduled_encoder_inputs.items()
            ],
            spec_tokens=[
                (numbers[one], len(ids)) for one, ids in output.scheduled_spec_decode_tokens.items()
            ],
            lookup_ns=self.lookup_ns,
            allocate_ns=self.allocate_ns,
        )
        self._batch = batch
        self._events = []
        self._lookups.clear()
        self._group_hits.clear()
        self.recorder.hold(record)  # until its output comes; a worker of this process writes behind
        self._open[number] = record
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]

    def output(self, output: Any, started: int, ended: int) -> None:
        """vLLM took in the results of a step: its record is whole."""
        mark = getattr(output, STEP_ATTRIBUTE, None)
        step = -1 if mark is None else mark[1]
        record = self._open.get(step)
        if record is not None:
            for name, value in (
                ("output_start_ns", self.recorder.since_start(started)),
                ("output_ns", ended - started),
            ):
                force_setattr(record, name, value)  # nobody has seen it yet
            self.recorder.settle(record)
            self._open = {number: one for number, one in self._open.items() if number > step}
        self.flush()

    def flush(self) -> None:
        """Write events that no step will carry."""
        if self._events:
            self._restate_after_loss()
            events, self._events = self._events, []
            now = self.recorder.since_start(time.perf_counter_ns())
            self.recorder.write(AfterStep(self._source, self._step - 1, now, events))
        else:
            self.recorder.flush()

    def _declare_engine(self) -> None:
        self.recorder.write(
            engine_source(
                self._scheduler,
                source=self._source,
                engine=self.engine,
                checks_hashes=self._hash_check is not None,
            )
        )

    def _declare(self, request: Any) -> None:
        self._hashes_seen[request.request_id] = len(request.block_hashes)
        self.recorder.write(
            request_record(
                request,
                source=self._source,
                number=self._numbers[request.request_id],
                arrival_ns=self.recorder.since_start(time.perf_counter_ns()),
                arrival_step=self._step,
                hash_block_size=self._hash_block_size,
                digest_salt=self.recorder.salt_digest,
                with_token_ids=self.recorder.settings.token_ids,
            )
        )

    def _restate_after_loss(self) -> None:
        """After a lost record: declare the engine, the live requests and the next batch again."""
        if self._generation == self.recorder.generation:
            return
        self._generation = self.recorder.generation
        self._batch = []
        self._next = []
        self._computed.clear()
        self._declare_engine()
        for request_id, request in list(self._scheduler.requests.items()):
            if self._generation != self.recorder.generation:
                return  # still no room: try again at the next record
            if request_id in self._numbers:
                self._declare(request)

    def _requests(
        self, output: Any, batch: list[str]
    ) -> tuple[list[Admission], list[int], list[tuple[int, list[Runs]]]]:
        """Admissions, computed tokens aligned with `batch`, block additions of running requests."""
        cached = output.scheduled_cached_reqs
        resumed_ids = cached.resumed_req_ids
        admitted = []
        for one in output.scheduled_new_reqs:
            resumed = one.req_id in self._preempted  # the V2 runner gets resumed ones as new
            session = one.req_id in self._admitted and not resumed
            admitted.append(
                self._admission(
                    *(one.req_id, one.num_computed_tokens, one.block_ids, resumed), session=session
                )
            )
        additions = []
        for index, block_ids in enumerate(cached.new_block_ids):
            request_id = cached.req_ids[index]
            if request_id in resumed_ids:
                computed = cached.num_computed_tokens[index]
                admitted.append(self._admission(request_id, computed, block_ids, resumed=True))
            elif block_ids is not None:
                additions.append((self._numbers[request_id], [to_runs(ids) for ids in block_ids]))
        if cached.req_ids == batch:
            return admitted, list(cached.num_computed_tokens), additions
        computed_by_id = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed_by_id.update(
            (one.req_id, one.num_computed_tokens) for one in output.scheduled_new_reqs
        )
        return admitted, [computed_by_id[one] for one in batch], additions

    def _admission(
        self,
        request_id: str,
        num_computed: int,
        block_ids: Any,
        resumed: bool,
        *,
        session: bool = False,
    ) -> Admission:
        """`session`: a streaming-input session goes on with the next part of its prompt."""
        queried, hit = self._lookups.get(request_id, (0, 0))
        self._preempted.discard(request_id)
        self._admitted.add(request_id)
        self._computed[request_id] = num_computed
        return Admission(
            request=self._numbers[request_id],
            num_computed_tokens=num_computed,
            hit_tokens=hit,
            queried_tokens=queried,
            block_ids=[to_runs(ids) for ids in block_ids],
            resumed=resumed,
            group_hit_tokens=self._group_hits.get(request_id, []),
            session_prompt_tokens=int(self._scheduler.requests[request_id].num_prompt_tokens)
            if session
            else None,
        )

    def _number(self, request: Any) -> int:
        return NO_REQUEST if request is None else self._numbers.get(request.request_id, NO_REQUEST)

    def _note_hashes(self, request: Any) -> None:
        seen = self._hashes_seen.get(request.request_id)
        hashes = request.block_hashes
        if seen is not None and len(hashes) > seen:
            self._hashes_seen[request.request_id] = len(hashes)
            new = [short_hash(one) for one in hashes[seen:]]
            self._events.append(Hashed(self._numbers[request.request_id], seen, new))


def _num_waiting(scheduler: Any) -> int:
    """vLLM 0.30 keeps the requests it passed over apart; 0.31 puts them back into the queue."""
    waiting = len(scheduler.waiting)
    return waiting + len(getattr(scheduler, "skipped_waiting", ()))
