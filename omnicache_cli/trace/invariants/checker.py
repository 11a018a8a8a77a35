"""Checks the steps of a run, one after the other, and counts what it looked at.

Owns the order in which the parts of a step take effect: events before, `schedule()`, the forward
passes, events after. The invariants themselves are in the modules beside this one.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from omnicache_cli.trace.invariants import admissions, batch, owners, ranks, slots, tables
from omnicache_cli.trace.invariants import violation as why
from omnicache_cli.trace.invariants.hits import Writes, WrittenBlocks
from omnicache_cli.trace.invariants.rows import Row, SlotRuns, ascending, rows_of, split_by_row
from omnicache_cli.trace.invariants.violation import (
    INVARIANTS,
    OF_THE_SCHEDULER,
    Coverage,
    Violation,
)
from omnicache_cli.trace.records import (
    AnyEvent,
    Cached,
    CacheGroup,
    EngineSource,
    WrongHash,
    external_id,
    from_runs,
    num_values,
)
from omnicache_cli.trace.steps import (
    NOT_CACHED,
    ForwardView,
    GroupView,
    RankView,
    ScheduledRequest,
    Step,
)

Names = Sequence[tuple[str, ScheduledRequest | None]]
"""External id and scheduled request of each batch row."""

_CONTEXT_PARALLEL = ("decode_context_parallel_size", "prefill_context_parallel_size")


class _EngineState:
    """What must be remembered of one engine from step to step."""

    def __init__(self, engine: EngineSource) -> None:
        self.blocks = WrittenBlocks(engine)
        self.scheduler = owners.SchedulerOwners()
        self.workers: defaultdict[tuple[int, int], owners.WorkerOwners] = defaultdict(
            owners.WorkerOwners
        )  # by rank and group
        self.tables: defaultdict[tuple[int, int], tables.ComparedTables] = defaultdict(
            tables.ComparedTables
        )  # by rank and group
        self.hits: dict[int, set[int]] = {}  # of this step: block -> requests that hit it
        self.context_parallel = any(engine.parallel.get(key, 1) > 1 for key in _CONTEXT_PARALLEL)


class InvariantChecker:
    """Feed it every step of a run in order. Memory is bounded by the pool, not by the trace."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.coverage: dict[int, Coverage] = {number: Coverage() for number in INVARIANTS}
        self._engines: dict[str, _EngineState] = {}
        self._found: list[Violation] = []

    @property
    def num_checked(self) -> int:
        """Of what a worker did: without that a run is not sound, whatever its scheduler said."""
        return sum(
            one.checked for number, one in self.coverage.items() if number not in OF_THE_SCHEDULER
        )

    @property
    def num_broken(self) -> int:
        return sum(one.broken for one in self.coverage.values())

    def unchecked(self) -> Counter[str]:
        """Reason -> units that were not checked, over all invariants."""
        return sum((one.unchecked for one in self.coverage.values()), Counter())

    def check(self, step: Step) -> list[Violation]:
        """The invariants that this step breaks; empty when it is sound."""
        self._found = []
        self.num_steps += 1
        state = self._engines.get(step.engine.engine)
        if state is None:
            state = self._engines[step.engine.engine] = _EngineState(step.engine)
            if step.number > 0 or step.gap:
                state.blocks.forget_all(why.LOST)
        elif step.gap:
            state.blocks.forget_all(why.LOST)
            state.scheduler.forget_all()
        whole = [view for view in step.forwards if not view.record.restated]
        state.blocks.begin({view.worker.rank for view in whole})
        for events in (step.before, step.record.events):
            state.blocks.apply(events)
        state.scheduler.apply(step.before)
        state.scheduler.schedule(step)
        state.hits = owners.hits_of(step)
        self._check_events(step, step.before, step.record.events)
        self._check_admissions(step)
        self._check_step(step, state)
        self._check_events(step, step.after)
        state.blocks.apply(step.after)
        state.scheduler.apply(step.after)
        return self._found

    def _check_events(self, step: Step, *parts: Sequence[AnyEvent]) -> None:
        """What the recording itself found out about hashes."""
        if not step.engine.checks_hashes:
            return
        names = {one.number: one.external_id for one in step.requests}
        for event in (event for events in parts for event in events):
            if isinstance(event, Cached):
                self.coverage[8].checked += num_values(event.block_ids)
            elif isinstance(event, WrongHash):
                what = f"hash of block {event.block_id}, entry {event.hash_index} of the request"
                name = names.get(event.request, f"#{event.request}")
                found = f"{event.found}, the hash of other tokens"
                where = {"group": event.group}
                self._add(8, step, what, event.expected, found, request=name, **where)

    def _check_admissions(self, step: Step) -> None:
        names = {one.number: one.external_id for one in step.requests}
        for one in step.record.admitted:
            self.coverage[7].checked += 1
            reason = admissions.why_not(step.engine, one)
            if reason is not None:
                self.coverage[7].unchecked[reason] += 1
            for group, what, expected, found in admissions.wrong_hit(step.engine, one):
                name = names[one.request]
                self._add(7, step, what, expected, found, request=name, group=group)

    def _check_step(self, step: Step, state: _EngineState) -> None:
        by_id = {one.request.record.request_id: one for one in step.scheduled}
        writes: dict[int, Writes] = {}  # by request
        unseen: dict[int, str] = {}  # request -> why its writes are not known
        randomized = step.engine.randomized_request_ids
        for view in step.forwards:
            names = [
                (external_id(row, randomized=randomized), by_id.get(row))
                for row in view.request_ids
            ]
            self._check_batch(step, view, names, by_id)
            if view.record.num_ubatches:
                unseen |= dict.fromkeys(
                    (r.request.number for r in step.scheduled), why.MICROBATCHES
                )
            for group in view.groups:
                self._check_group(step, view, group, names, state, writes, unseen)
                self._check_tables(step, view, group, names, state)
        self._check_ranks(step)
        silent = state.blocks.ranks - {view.worker.rank for view in step.forwards}
        reason = why.NO_WORKER if silent or not step.forwards else None
        if not step.forwards:
            for number in (1, 2, 3, 4, 12):
                self.coverage[number].unchecked[why.NO_WORKER] += 1
        self._check_hits(step, state, writes, unseen, reason)

    def _check_ranks(self, step: Step) -> None:
        """Compare each further rank with the first of its pipeline stage."""
        first = {view.worker.pp_rank: view for view in step.forwards if view.worker.tp_rank == 0}
        further: list[ForwardView | RankView] = [*step.ranks]
        further += [view for view in step.forwards if view.worker.tp_rank > 0]
        for one in further:
            view = first.get(one.worker.pp_rank)
            if view is None:
                self.coverage[11].unchecked[why.NO_WORKER] += 1
                continue
            self.coverage[11].checked += 1
            findings = (
                ranks.wrong_digest(view, one.record.digest)
                if isinstance(one, RankView)
                else ranks.differences(view, one)
            )
            for group, row, what, expected, found in findings:
                rank = one.worker.rank
                self._add(11, step, what, expected, found, rank=rank, group=group, row=row)

    def _check_batch(
        self, step: Step, view: ForwardView, names: Names, by_id: Mapping[str, ScheduledRequest]
    ) -> None:
        self.coverage[4].checked += 1
        if view.record.num_ubatches:
            for number in (1, 2, 3, 4):
                self.coverage[number].unchecked[why.MICROBATCHES] += 1
        for row, name, what, expected, found in batch.wrong_rows(view, names, by_id):
            self._add(4, step, what, expected, found, rank=view.worker.rank, request=name, row=row)
        if len(view.groups) > 1:
            self.coverage[9].checked += 1
        for number, what, expected, found in tables.shared(view):
            self._add(9, step, what, expected, found, rank=view.worker.rank, group=number)
        for group in view.groups:
            if step.group_spec(group.group).spec == "CrossAttentionSpec":
                self.coverage[4].unchecked[why.CROSS_ATTENTION] += 1
                continue
            for row, name, what, expected, found in batch.wrong_group(view, group, names):
                where = {"rank": view.worker.rank, "group": group.group, "row": row}
                self._add(4, step, what, expected, found, request=name, **where)

    def _check_tables(
        self, step: Step, view: ForwardView, group: GroupView, names: Names, state: _EngineState
    ) -> None:
        """The block table against the scheduler's, and against what is said to be common."""
        spec = step.group_spec(group.group)
        table = group.block_table
        if spec is NOT_CACHED or table == ():
            return
        rank, number = view.worker.rank, group.group
        kernel = _kernel_block_size(view, group, spec)
        rows = [(row, one) for row, (_, one) in enumerate(names) if one is not None]
        known = [(row, one) for row, one in rows if one.request.num_admissions]
        if len(known) < len(rows):
            self.coverage[12].unchecked[why.LOST] += len(rows) - len(known)
        if table is None:
            self.coverage[12].unchecked[why.TABLE_NOT_READ] += len(known)
        else:
            self.coverage[12].checked += len(known)
            compared = state.tables[rank, number]
            for row, what, expected, found in compared.wrong(number, table, spec, kernel, known):
                where = {"rank": rank, "group": number, "row": row}
                self._add(12, step, what, expected, found, request=names[row][0], **where)
        common = step.record.num_common_prefix_blocks
        claims = []
        if number < len(common) and common[number]:
            blocks = common[number] * (spec.block_size // kernel)
            claims.append((blocks, "num_common_prefix_blocks"))
        if group.record.use_cascade and group.record.common_prefix_len:
            claims.append((group.record.common_prefix_len // kernel, "cascade attention"))
        if table is None:
            if claims:
                self.coverage[5].unchecked[why.TABLE_NOT_READ] += 1
            return
        self.coverage[5].checked += bool(claims)
        for blocks, source in claims:
            for which, what, expected, found in tables.wrong_cascade(group, blocks, source):
                self._add(5, step, what, expected, found, rank=rank, group=number, row=which)

    def _check_group(
        self,
        step: Step,
        view: ForwardView,
        group: GroupView,
        names: Names,
        state: _EngineState,
        writes: dict[int, Writes],
        unseen: dict[int, str],
    ) -> None:
        spec = step.group_spec(group.group)
        reason, rows = _why_not(view, group, spec, names, state)
        if reason is not None or rows is None:
            for number, units in ((1, len(names)), (2, 1), (3, len(names))):
                self.coverage[number].unchecked[reason or why.NO_VECTORS] += units
            if spec.maps_slots:
                for _, one in names:
                    if one is not None:
                        unseen[one.request.number] = reason or why.NO_VECTORS
            return
        recorded = group.slot_runs
        assert recorded is not None
        runs = ascending(recorded)
        parts = split_by_row(runs, rows)
        where = {"rank": view.worker.rank, "group": group.group}
        kernel = _kernel_block_size(view, group, spec)
        table = group.block_table
        if table is None:
            self.coverage[1].unchecked[why.TABLE_NOT_READ] += len(rows)
            self.coverage[3].unchecked[why.TABLE_NOT_READ] += len(rows)
        else:
            self.coverage[1].checked += len(rows)
            for row, what, expected, found in slots.wrong_slots(rows, parts, table, kernel):
                self._add_row(1, step, row, what, expected, found, where)
        self.coverage[2].checked += 1
        num_real = _num_real_tokens(view, group)
        for owner, what, expected, found in slots.wrong_padding(
            rows, runs, group.record.num_slot_padding, num_real, spec.block_size
        ):
            self._add_row(2, step, owner, what, expected, found, where)
        if table is not None:
            self._check_owners(step, group, table, spec, rows, parts, state, where, kernel)
        for row, part in zip(rows, parts, strict=True):
            if row.scheduled is not None and not view.record.restated:
                mine = writes.setdefault(row.scheduled.request.number, [])
                mine.append((view.worker.rank, spec.block_size, part))

    def _check_owners(
        self,
        step: Step,
        group: GroupView,
        table: Sequence[list[int]],
        spec: CacheGroup,
        rows: Sequence[Row],
        parts: Sequence[SlotRuns],
        state: _EngineState,
        where: dict[str, int],
        kernel: int,
    ) -> None:
        self.coverage[3].checked += len(rows)
        workers = state.workers[where["rank"], group.group]
        workers.update(table)
        for row, what, expected, found in owners.overlaps(rows, parts):
            self._add_row(3, step, row, what, expected, found, where)
        for row, what, expected, found in owners.foreign_writes(
            rows,
            parts,
            table=table,
            group=spec,
            kernel_block_size=kernel,
            workers=workers,
            scheduler=state.scheduler,
            hits=state.hits,
        ):
            self._add_row(3, step, row, what, expected, found, where)

    def _check_hits(
        self,
        step: Step,
        state: _EngineState,
        writes: dict[int, Writes],
        unseen: dict[int, str],
        reason: str | None,
    ) -> None:
        """In the scheduler's order: a request may hit what one before it writes in this step."""
        admitted = {one.request: one for one in step.record.admitted}
        coverage = self.coverage[6]
        for one in step.scheduled:
            number = one.request.number
            admission = admitted.get(number)
            tables: list[list[int]] = one.request.block_ids
            if admission is not None:
                tables = [from_runs(runs) for runs in admission.block_ids]
                for unchecked, finding in state.blocks.check_hit(admission):
                    if unchecked is not None:
                        coverage.unchecked[unchecked] += 1
                        continue
                    coverage.checked += 1
                    if finding is not None:
                        rank, group, what, expected, found = finding
                        where = {"rank": rank, "group": group}
                        name = one.request.external_id
                        self._add(6, step, what, expected, found, request=name, **where)
                if admission.session_prompt_tokens is None:
                    loaded = admission.hit_tokens, admission.num_computed_tokens
                    state.blocks.mark_unknown(tables, *loaded, why.LOADED)
            state.blocks.write(writes.get(number, []))
            hidden = reason or unseen.get(number)
            if hidden is None and not writes.get(number) and not state.context_parallel:
                hidden = why.NO_VECTORS
            if hidden is not None:
                first = one.num_computed_tokens
                end = first + one.num_scheduled_tokens
                state.blocks.mark_unknown(tables, first, end, hidden)

    def _add_row(
        self,
        invariant: int,
        step: Step,
        row: Row | None,
        what: str,
        expected: str,
        found: str,
        where: Mapping[str, int | None],
    ) -> None:
        request, number = (None, None) if row is None else (row.name, row.number)
        self._add(invariant, step, what, expected, found, request=request, row=number, **where)

    def _add(
        self,
        invariant: int,
        step: Step,
        what: str,
        expected: str,
        found: str,
        *,
        rank: int | None = None,
        group: int | None = None,
        request: str | None = None,
        row: int | None = None,
    ) -> None:
        self.coverage[invariant].broken += 1
        engine = step.engine.engine
        self._found.append(
            Violation(
                invariant, engine, step.number, rank, group, request, row, what, expected, found
            )
        )


def _why_not(
    view: ForwardView, group: GroupView, spec: CacheGroup, names: Names, state: _EngineState
) -> tuple[str | None, list[Row] | None]:
    """Why the slots of this group cannot be checked, else its rows."""
    if not spec.maps_slots:
        return why.NO_SLOTS, None
    if spec.spec == "CrossAttentionSpec":
        return why.CROSS_ATTENTION, None
    if state.context_parallel:
        return why.CONTEXT_PARALLEL, None
    if group.slot_runs is None:
        return why.NOT_READ, None
    return None, rows_of(view, group, names)


def _kernel_block_size(view: ForwardView, group: GroupView, spec: CacheGroup) -> int:
    sizes = view.worker.kernel_block_sizes
    return sizes[group.group] if group.group < len(sizes) else spec.block_size


def _num_real_tokens(view: ForwardView, group: GroupView) -> int:
    """Tokens that must have slots. A full CUDA graph counts its padding in num_actual_tokens."""
    starts = group.query_start_loc
    rows_end = starts[min(view.record.num_reqs, len(starts) - 1)] if starts else 0
    found = group.num_actual_tokens
    if found is None:
        return rows_end
    return min(found, rows_end) if batch.is_padded(view) else found
