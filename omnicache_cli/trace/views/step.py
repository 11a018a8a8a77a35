"""`show RUN --step N`: one step as vLLM sees it, tensors in full."""

from typing import Any

from omnicache_cli.errors import BadInputError
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.phases import ALWAYS_RECORDED, Times, scheduler_times, worker_times
from omnicache_cli.trace.records import BatchDescriptor
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import ForwardView, GroupView, Request, ScheduledRequest, Step
from omnicache_cli.trace.views.view import View, engine_choices, of_engine, steps_of
from omnicache_cli.trace.views.words import event_data, event_text, milliseconds, runs_text

SHORT_ID = 12
"""Characters of an external id that still stands beside the request's number."""


def show_step(run: Run, number: int, engine: str | None) -> View:
    """BadInputError: no such step, or several engines have one."""
    found: dict[str, View] = {}
    last = -1
    past: set[str] = set()
    for step in steps_of(run, engine):
        last = max(last, step.number)
        if step.number == number:
            found[step.engine.engine] = _view(run, step)
        if step.number >= number:
            past.add(step.engine.engine)
        if found and past >= run.engines.keys():
            break
    if not found:
        raise BadInputError(
            f"{run.folder} has no step {number}; "
            + (f"its steps go up to {last}" if last >= 0 else "no step was recorded")
        )
    if len(found) > 1:
        raise BadInputError(
            f"{len(found)} engines have a step {number}; pass --engine: {engine_choices(run)}"
        )
    return next(iter(found.values()))


def _view(run: Run, step: Step) -> View:
    after = step.after
    sections: list[Section] = [_scheduler_facts(step), _request_table(step)]
    for view in step.forwards:
        sections.append(_forward_facts(step, view))
        sections += [_group_facts(step, view, group) for group in view.groups]
    if not step.forwards:
        sections.append(Lines("Forward pass", ["no worker recorded this step"]))
    if step.before:
        sections.append(Lines("Events before the step", [event_text(one) for one in step.before]))
    sections.append(
        Lines("Events while it was scheduled", [event_text(one) for one in step.record.events])
    )
    sections.append(Lines("Events after it", [event_text(one) for one in after]))
    report = Report(
        "show",
        f"Step {step.number} of engine {step.engine.engine}",
        {"run": str(run.folder), **_data(step)},
        tuple(sections),
        run.vllm_version,
    )
    first = step.scheduled[0].request if step.scheduled else None
    if first is None:
        return View(report)
    return View(report, of_engine(run, f'--request "#{first.number}"', step.engine.engine))


def _scheduler_facts(step: Step) -> Facts:
    record = step.record
    items: dict[str, Cell] = {
        "requests": len(step.requests),
        "total_num_scheduled_tokens": step.num_scheduled_tokens,
        "running, waiting": f"{record.num_running}, {record.num_waiting}",
        "free blocks": record.num_free_blocks,
        "num_common_prefix_blocks": runs_text(
            record.num_common_prefix_blocks or [0] * len(step.engine.groups)
        ),
        **_phase_facts(scheduler_times(record)),
    }
    if step.gap:
        items["before this step"] = "records were lost"
    return Facts("Scheduler", items)


def _request_table(step: Step) -> Table:
    several = len(step.engine.groups) > 1
    columns = ("request", "external id", "computed", "scheduled", "hit")
    rows: list[tuple[Cell, ...]] = []
    for one in step.scheduled:
        tables = _tables(one)
        for group, table in enumerate(tables):
            cells: tuple[Cell, ...] = (
                f"#{one.request.number}",
                one.request.external_id,
                one.num_computed_tokens,
                one.num_scheduled_tokens,
                one.hit_tokens,
            )
            text = "not known: records were lost" if table is None else runs_text(table)
            rows.append((*cells, group, text) if several else (*cells, text))
    return Table("Requests", (*columns, *(["group"] if several else []), "blocks"), rows)


def _tables(one: ScheduledRequest) -> list[list[int] | None]:
    """The scheduler's block table per group; None where lost records hide it."""
    if not one.request.num_admissions:
        return [None]
    return list(one.request.block_ids)


def _row_requests(step: Step, view: ForwardView) -> list[Request | None]:
    """The request in each batch row; None: the scheduler did not schedule it in this step."""
    scheduled = {one.request.record.request_id: one.request for one in step.scheduled}
    return [scheduled.get(request_id) for request_id in view.request_ids]


def _rows_text(step: Step, view: ForwardView) -> str:
    """`#3 p3, #1 p1`: by row, with the ids that clients gave where they are short."""
    names = []
    for request, request_id in zip(_row_requests(step, view), view.request_ids, strict=True):
        if request is None:
            names.append(f"{request_id} (not scheduled)")
        elif len(request.external_id) <= SHORT_ID:
            names.append(f"#{request.number} {request.external_id}")
        else:
            names.append(f"#{request.number}")
    return ", ".join(names) or "none"


def _forward_facts(step: Step, view: ForwardView) -> Facts:
    record = view.record
    items: dict[str, Cell] = {
        "num_reqs": record.num_reqs,
        "rows": _rows_text(step, view),
        "batch_descriptor": _descriptor_text(record.batch_descriptor),
        "cudagraph_mode": record.cudagraph_mode,
        **_phase_facts(worker_times(record)),
    }
    if record.num_ubatches:
        items["num_ubatches"] = f"{record.num_ubatches}; the groups were not recorded"
    return Facts(f"Forward pass of rank {view.worker.rank} on {view.worker.device}", items)


def _phase_facts(times: Times) -> dict[str, Cell]:
    """Phases that came later than the format are left out where they were not recorded."""
    return {
        phase: None if duration is None else f"{milliseconds(duration)} ms"
        for phase, duration in times.items()
        if duration is not None or phase in ALWAYS_RECORDED
    }


def _descriptor_text(one: BatchDescriptor | None) -> str | None:
    if one is None:
        return None
    words = [f"num_tokens {one.num_tokens}"]
    words += [f"num_reqs {one.num_reqs}"] if one.num_reqs is not None else []
    words += ["uniform"] if one.uniform else []
    words += [f"{one.num_active_loras} active LoRAs"] if one.has_lora else []
    return ", ".join(words)


def _group_facts(step: Step, view: ForwardView, group: GroupView) -> Facts:
    spec = step.group_spec(group.group)
    classes = view.worker.metadata_classes
    metadata = classes[group.group] if group.group < len(classes) else ""
    items: dict[str, Cell] = {
        "num_actual_tokens": group.num_actual_tokens,
        "max_query_len": group.max_query_len,
        "query_start_loc": _vector(group.query_start_loc),
        "max_seq_len": group.max_seq_len,
        "seq_lens": _vector(group.seq_lens),
        "slot_mapping": _vector(group.slot_mapping)
        if spec.maps_slots
        else "the group maps no tokens to slots",
    }
    requests = _row_requests(step, view)
    if group.block_table is None:
        items["block_table"] = "not read"
    for row, table in enumerate(group.block_table or ()):
        request = requests[row] if row < len(requests) else None
        label = "" if request is None else f" #{request.number}"
        items[f"block_table[{row}]{label}"] = runs_text(table)
    shape = group.record.table_shape
    if shape is not None:
        items["block_table.shape"] = f"{shape[0]}, {shape[1]}"
    record = group.record
    items |= {"causal": record.causal, "use_cascade": record.use_cascade}
    items["common_prefix_len"] = record.common_prefix_len
    words = [spec.spec, f"block size {spec.block_size}", *([metadata] if metadata else [])]
    rank = f"Rank {view.worker.rank}, " if len(step.forwards) > 1 else ""
    return Facts(f"{rank}KV cache group {group.group}: {', '.join(words)}", items)


def _vector(values: list[int] | None) -> str:
    return "not read" if values is None else runs_text(values)


def _data(step: Step) -> dict[str, Any]:
    record = step.record
    return {
        "engine": step.engine.engine,
        "step": step.number,
        "num_running": record.num_running,
        "num_waiting": record.num_waiting,
        "num_free_blocks": record.num_free_blocks,
        "num_scheduled_tokens": step.num_scheduled_tokens,
        "num_common_prefix_blocks": record.num_common_prefix_blocks
        or [0] * len(step.engine.groups),
        **{f"{phase}_ns": duration for phase, duration in scheduler_times(record).items()},
        "records_lost_before": step.gap,
        "requests": [_request_data(one) for one in step.scheduled],
        "forwards": [_forward_data(step, view) for view in step.forwards],
        "events_before": [event_data(one) for one in step.before],
        "events": [event_data(one) for one in record.events],
        "events_after": [event_data(one) for one in step.after],
    }


def _request_data(one: ScheduledRequest) -> dict[str, Any]:
    tables = _tables(one)
    return {
        "number": one.request.number,
        "request": one.request.external_id,
        "request_id": one.request.record.request_id,
        "num_computed_tokens": one.num_computed_tokens,
        "num_scheduled_tokens": one.num_scheduled_tokens,
        "hit_tokens": one.hit_tokens,
        "resumed": one.resumed,
        "block_ids": None if None in tables else tables,
    }


def _forward_data(step: Step, view: ForwardView) -> dict[str, Any]:
    record = view.record
    descriptor = record.batch_descriptor
    return {
        "rank": view.worker.rank,
        "num_reqs": record.num_reqs,
        "request_ids": view.request_ids,
        "request_numbers": [
            None if one is None else one.number for one in _row_requests(step, view)
        ],
        **{f"{phase}_ns": duration for phase, duration in worker_times(record).items()},
        "batch_descriptor": None
        if descriptor is None
        else {name: getattr(descriptor, name) for name in descriptor.__struct_fields__},
        "cudagraph_mode": record.cudagraph_mode,
        "num_ubatches": record.num_ubatches,
        "groups": [
            {
                "group": group.group,
                "num_actual_tokens": group.num_actual_tokens,
                "max_query_len": group.max_query_len,
                "query_start_loc": group.query_start_loc,
                "max_seq_len": group.max_seq_len,
                "seq_lens": group.seq_lens,
                "slot_mapping": group.slot_mapping,
                "block_table": None if group.block_table is None else list(group.block_table),
                "block_table_shape": group.record.table_shape,
                "causal": group.record.causal,
                "use_cascade": group.record.use_cascade,
                "common_prefix_len": group.record.common_prefix_len,
            }
            for group in view.groups
        ],
    }
