"""`show RUN --requests`: every request in one line."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.records import (
    Admission,
    AnyEvent,
    Finished,
    Preempted,
    Runs,
    from_runs,
)
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Request, Step
from omnicache_cli.trace.views.view import View, engine_title, is_engine, of_engine, steps_of
from omnicache_cli.trace.views.words import counted

TEXT_ROWS = 1000
JSON_ROWS = 100_000
"""Requests listed; all are counted."""

_COLUMNS = (
    *("request", "id", "arrives", "prompt", "hit", "computed", "first", "last", "blocks"),
    *("preempted", "status", "with"),
)


@dataclass(slots=True)
class RequestRow:
    """What became of one request."""

    engine: str
    number: int
    external_id: str
    request_id: str
    arrival_step: int | None  # None: its record was lost
    num_prompt_tokens: int | None
    properties: str  # LoRA, salt, images: in words; empty without
    lora_name: str | None
    has_cache_salt: bool
    num_items: dict[str, int]  # multimodal items by modality
    skips_cache: bool
    hit_tokens: int | None = None  # of the first admission; None: never admitted
    queried_tokens: int | None = None
    resumed_hit_tokens: int | None = None
    computed_tokens: int = 0  # scheduled in all its steps
    num_steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    most_blocks: list[int] | None = None  # per group, the most that its table had
    num_preemptions: int = 0
    status: str | None = None  # None: not finished in this trace
    num_output_tokens: int | None = None


@dataclass(slots=True)
class _Live:
    """A request that has not ended yet, and the blocks that its table has now."""

    row: RequestRow
    num_blocks: list[int] = field(default_factory=list)  # per group, null blocks left out


class RequestFollower:
    """Yields a row when its request ends, and those of the rest at last.

    Memory is bounded by the live requests.
    """

    def __init__(self) -> None:
        self._live: defaultdict[str, dict[int, _Live]] = defaultdict(dict)

    def ended(self, step: Step) -> Iterator[RequestRow]:
        """Follow one step; the requests that it ended."""
        name = step.engine.engine
        live = self._live[name]
        for request in step.arrived:
            live[request.number] = _Live(row_of(name, request))
        self._schedule(step, live)
        for one in step.record.admitted:
            _admit(live.get(one.request), one)
        for number, additions in step.record.new_block_ids:
            _grow(live.get(number), additions)
        yield from self._apply(step.before, live)
        yield from self._apply(step.record.events, live)
        yield from self._apply(step.after, live)
        for request in step.arrived:  # aborted before a step came: the step before has its end
            if request.status is not None and request.number in live:
                yield live.pop(request.number).row

    def rest(self) -> Iterator[RequestRow]:
        """Requests that have not ended, after the last step."""
        for live in self._live.values():
            yield from (one.row for one in live.values())

    def _schedule(self, step: Step, live: dict[int, _Live]) -> None:
        tokens = step.record.num_scheduled_tokens or [1] * len(step.requests)
        for request, count in zip(step.requests, tokens, strict=True):
            one = live.get(request.number)
            if one is None:  # its record was lost
                one = live[request.number] = _Live(row_of(step.engine.engine, request))
            row = one.row
            row.computed_tokens += count
            row.num_steps += 1
            row.last_step = step.number
            if row.first_step is None:
                row.first_step = step.number

    def _apply(self, events: Iterable[AnyEvent], live: dict[int, _Live]) -> Iterator[RequestRow]:
        for event in events:
            if isinstance(event, Preempted) and event.request in live:
                live[event.request].row.num_preemptions += 1
            elif isinstance(event, Finished) and event.request in live:
                row = live.pop(event.request).row
                row.status, row.num_output_tokens = event.status, event.num_output_tokens
                yield row


def _admit(live: _Live | None, admission: Admission) -> None:
    if live is None:
        return
    row = live.row
    if admission.resumed:
        row.resumed_hit_tokens = (row.resumed_hit_tokens or 0) + admission.hit_tokens
    elif row.hit_tokens is None:
        row.hit_tokens, row.queried_tokens = admission.hit_tokens, admission.queried_tokens
    live.num_blocks = []
    _grow(live, admission.block_ids)


def _grow(live: _Live | None, tables: list[Runs]) -> None:
    if live is None:
        return
    more = [sum(block != 0 for block in from_runs(runs)) for runs in tables]
    live.num_blocks += [0] * (len(more) - len(live.num_blocks))
    for group, count in enumerate(more):
        live.num_blocks[group] += count
    most = live.row.most_blocks or []
    most += [0] * (len(live.num_blocks) - len(most))
    live.row.most_blocks = [max(pair) for pair in zip(most, live.num_blocks, strict=True)]


def row_of(engine: str, request: Request) -> RequestRow:
    record = request.record
    items = Counter(span.modality for span in record.multimodal)
    words = [counted(count, modality) for modality, count in items.items()]
    words += [f"LoRA {record.lora_name}"] if record.lora_name is not None else []
    words += ["salt"] if record.cache_salt is not None else []
    words += ["no cache read"] if record.skip_reading_prefix_cache else []
    known = not request.is_lost
    return RequestRow(
        engine=engine,
        number=request.number,
        external_id=request.external_id,
        request_id=record.request_id,
        arrival_step=record.arrival_step if known else None,
        num_prompt_tokens=record.num_prompt_tokens if known else None,
        properties=", ".join(words),
        lora_name=record.lora_name,
        has_cache_salt=record.cache_salt is not None,
        num_items=dict(items),
        skips_cache=record.skip_reading_prefix_cache,
        status=request.status,
        num_output_tokens=request.num_output_tokens,
    )


def request_rows(run: Run, engine: str | None) -> Iterator[RequestRow]:
    """One row per request, in the order in which they end; the unfinished ones last."""
    follower = RequestFollower()
    for step in steps_of(run, engine):
        yield from follower.ended(step)
    yield from follower.rest()
    for name, requests in run.never_scheduled_on.items():
        if is_engine(run, name, engine):
            yield from (row_of(name, request) for request in requests)


def show_requests(run: Run, engine: str | None, *, every_request: bool) -> View:
    """`every_request`: JSON_ROWS of them (JSON), else TEXT_ROWS; the ones that arrived first."""
    most = JSON_ROWS if every_request else TEXT_ROWS
    kept: list[RequestRow] = []
    num_requests = 0
    for row in request_rows(run, engine):
        num_requests += 1
        kept.append(row)
        if len(kept) >= 2 * most:
            kept = _first(run, kept, most)
    kept = _first(run, kept, most)
    sections: list[Section] = [Facts("", {"requests": num_requests})]
    for name in run.engines:
        rows = [_cells(row) for row in kept[:TEXT_ROWS] if row.engine == name]
        if rows:
            sections.append(Table(engine_title(run, name), _COLUMNS, rows, one_line_rows=True))
    if num_requests > TEXT_ROWS:
        more = counted(num_requests - TEXT_ROWS, "more request")
        sections.append(Lines("", [f"… and {more}; --request ID or --format json"]))
    report = Report(
        "show",
        f"Requests of {run.folder.name or run.folder}",
        {
            "run": str(run.folder),
            "num_requests": num_requests,
            "listed": len(kept),
            "requests": [row_data(row) for row in kept],
        },
        tuple(sections),
        run.vllm_version,
    )
    return View(report, _next(run, kept))


def _next(run: Run, kept: list[RequestRow]) -> str | None:
    if not kept:
        return None
    one = max(kept, key=lambda row: (row.num_preemptions, row.hit_tokens or 0, -row.number))
    return of_engine(run, f'--request "#{one.number}"', one.engine)


def _first(run: Run, rows: list[RequestRow], most: int) -> list[RequestRow]:
    """The ones that arrived first: the numbers of each engine go by arrival."""
    return sorted(rows, key=lambda row: (row.number, _place(run, row.engine)))[:most]


def _place(run: Run, engine: str) -> int:
    return list(run.engines).index(engine)


def _cells(row: RequestRow) -> tuple[Cell, ...]:
    blocks = None if row.most_blocks is None else ", ".join(map(str, row.most_blocks))
    return (
        f"#{row.number}",
        row.external_id,
        row.arrival_step,
        row.num_prompt_tokens,
        row.hit_tokens,
        row.computed_tokens,
        row.first_step,
        row.last_step,
        int(blocks) if blocks is not None and blocks.isdecimal() else blocks,
        row.num_preemptions,
        row.status or "not finished",
        row.properties or None,
    )


def row_data(row: RequestRow) -> dict[str, Any]:
    """One request for scripts."""
    return {
        "engine": row.engine,
        "number": row.number,
        "request": row.external_id,
        "request_id": row.request_id,
        "arrival_step": row.arrival_step,
        "num_prompt_tokens": row.num_prompt_tokens,
        "queried_tokens": row.queried_tokens,
        "hit_tokens": row.hit_tokens,
        "resumed_hit_tokens": row.resumed_hit_tokens,
        "computed_tokens": row.computed_tokens,
        "num_steps": row.num_steps,
        "first_step": row.first_step,
        "last_step": row.last_step,
        "most_blocks": row.most_blocks,
        "num_preemptions": row.num_preemptions,
        "status": row.status,
        "num_output_tokens": row.num_output_tokens,
        "lora_name": row.lora_name,
        "has_cache_salt": row.has_cache_salt,
        "multimodal_items": row.num_items,
        "skip_reading_prefix_cache": row.skips_cache,
    }
