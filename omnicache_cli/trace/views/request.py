"""`show RUN --request ID`: the life of one request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.records import (
    Admission,
    Allocated,
    AnyEvent,
    Cached,
    CachedPartial,
    Evicted,
    Finished,
    Freed,
    Preempted,
    from_runs,
)
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Request, ScheduledRequest, Step
from omnicache_cli.trace.views.names import RequestName, find_request
from omnicache_cli.trace.views.reasons import why_computed
from omnicache_cli.trace.views.view import View, of_engine
from omnicache_cli.trace.views.words import blocks_text, counted, freed_text, runs_text, who


@dataclass(slots=True)
class Entry:
    """One line of a life: what happened in steps first_step .. last_step."""

    first_step: int
    last_step: int
    kind: str  # arrive, admit, resume, continue, compute, decode, take, cache, evict, free, ...
    words: str
    data: dict[str, Any] = field(default_factory=dict)


def show_request(run: Run, wanted: str, engine: str | None) -> View:
    """BadInputError: no request has this name, or several have."""
    name = find_request(run, wanted, engine)
    life = _Life(name)
    for step in run.steps():
        if step.engine.engine == name.engine:
            life.add(step)
    for request in run.never_scheduled:
        if request.record.request_id == name.request_id and request.number == name.number:
            life.arrive(request)
    rows: list[tuple[Cell, ...]] = [(_steps(one), one.words) for one in life.entries]
    facts = _facts(name, life)
    sections: list[Section] = [Facts("", facts), Table("Life", ("step", "what happened"), rows)]
    if life.why_computed is not None:
        sections.append(Lines("", [life.why_computed]))
    report = Report(
        "show",
        f"Request #{name.number}: {name.external_id}",
        {"run": str(run.folder), **_data(name, life)},
        tuple(sections),
        run.vllm_version,
    )
    first = next((one for one in life.entries if one.kind != "arrive"), None)
    if first is None:
        return View(report)
    return View(report, of_engine(run, f"--step {first.first_step}", name.engine))


def _steps(entry: Entry) -> str:
    if entry.first_step == entry.last_step:
        return str(entry.first_step)
    return f"{entry.first_step} .. {entry.last_step}"


class _Life:
    """Gathers the entries of one request while steps go by."""

    def __init__(self, name: RequestName) -> None:
        self.name = name
        self.entries: list[Entry] = []
        self.request: Request | None = None
        self.admissions: list[Admission] = []
        self.num_preemptions = 0
        self.why_computed: str | None = None

    @property
    def hit_tokens(self) -> int | None:
        """Of the first admission; None: it is not in the trace."""
        return next((one.hit_tokens for one in self.admissions if not one.resumed), None)

    @property
    def resumed_hit_tokens(self) -> int | None:
        """Of all resumptions; None: it never resumed."""
        hits = [one.hit_tokens for one in self.admissions if one.resumed]
        return sum(hits) if hits else None

    def add(self, step: Step) -> None:
        for request in step.arrived:
            if request.number == self.name.number:
                self.arrive(request)
        self._add_events(step, step.before)
        admission = next((a for a in step.record.admitted if a.request == self.name.number), None)
        if admission is not None:
            self._admit(step, admission)
        self._add_events(step, step.record.events)
        for one in step.scheduled:
            if one.request.number == self.name.number:
                self.request = one.request
                self._add_share(step, one)
        self._add_events(step, step.after)

    def arrive(self, request: Request) -> None:
        self.request = request
        record = request.record
        words = (
            f"arrives: {counted(record.num_prompt_tokens, 'prompt token')}, "
            f"max_tokens {record.max_tokens}"
        )
        self._append(record.arrival_step, "arrive", words)

    def _add_share(self, step: Step, one: ScheduledRequest) -> None:
        first, count = one.num_computed_tokens, one.num_scheduled_tokens
        is_decode = count == 1 and first >= one.request.record.num_prompt_tokens
        last = self.entries[-1] if self.entries else None
        if is_decode and last is not None and last.kind == "decode":
            last.last_step = step.number
            last.data["end_position"] = first + 1
            num = first + 1 - last.data["first_position"]
            last.words = (
                f"decodes {counted(num, 'token')}, {_positions(first + 1 - num, first + 1)}"
            )
            return
        data = {"first_position": first, "end_position": first + count}
        if is_decode:
            words = f"decodes 1 token, {_positions(first, first + 1)}"
            self._append(step.number, "decode", words, data)
            return
        words = f"computes {counted(count, 'token')}, {_positions(first, first + count)}"
        left = one.request.record.num_prompt_tokens - first - count
        if left > 0:
            words += f"; {counted(left, 'prompt token')} left"
        self._append(step.number, "compute", words, data)

    def _admit(self, step: Step, admission: Admission) -> None:
        if admission.session_prompt_tokens is not None:
            tokens = counted(admission.session_prompt_tokens, "token")
            words = f"goes on with the next part of its prompt, {tokens} by now"
            data: dict[str, Any] = {
                "num_prompt_tokens": admission.session_prompt_tokens,
                "num_computed_tokens": admission.num_computed_tokens,
            }
            self._append(step.number, "continue", words, data)
            return
        self.admissions.append(admission)
        if not admission.resumed:
            self.why_computed = why_computed(step.engine, admission)
        words = "resumes" if admission.resumed else "starts to run"
        if admission.queried_tokens:
            words += f": hit {admission.hit_tokens} of {counted(admission.queried_tokens, 'token')}"
        else:
            words += ": the prefix cache was not asked"
        loaded = admission.num_computed_tokens - admission.hit_tokens
        if loaded > 0:
            words += f", {counted(loaded, 'token')} from a KV connector"
        tables = [from_runs(runs) for runs in admission.block_ids]
        for group, (table, spec) in enumerate(zip(tables, step.engine.groups, strict=False)):
            under = table[: -(-admission.hit_tokens // spec.block_size)]
            label = f" of group {group}" if len(tables) > 1 else ""
            if any(under):
                words += f"; reuses {blocks_text(under)}{label}"
        data = {
            "hit_tokens": admission.hit_tokens,
            "queried_tokens": admission.queried_tokens,
            "num_computed_tokens": admission.num_computed_tokens,
            "block_ids": tables,
        }
        self._append(step.number, "resume" if admission.resumed else "admit", words, data)

    def _add_events(self, step: Step, events: Sequence[AnyEvent]) -> None:
        lost: list[Evicted] = []
        for event in events:
            if isinstance(event, Evicted):
                if event.owner == self.name.number:
                    lost.append(event)
            elif isinstance(event, Preempted):
                if event.request == self.name.number:
                    self._preempt(step, while_scheduled=events is step.record.events)
            elif getattr(event, "request", None) == self.name.number:
                self._add_event(step.number, event)
        if lost:
            blocks = list(dict.fromkeys(one.block_id for one in lost))
            takers = ", ".join(dict.fromkeys(who(one.request) for one in lost))
            words = f"{blocks_text(blocks)} evicted, taken by {takers}"
            data = {"block_ids": blocks, "taken_by": [one.request for one in lost]}
            self._append(step.number, "evict", words, data)

    def _add_event(self, step: int, event: AnyEvent) -> None:
        data: dict[str, Any]
        match event:
            case Allocated():
                blocks = from_runs(event.block_ids)
                self._append(step, "take", f"takes {blocks_text(blocks)}", {"block_ids": blocks})
            case Cached():
                blocks, indices = from_runs(event.block_ids), from_runs(event.block_indices)
                words = f"caches {blocks_text(blocks)}, its {blocks_text(indices)}"
                words += f" of group {event.group}" if event.group else ""
                data = {"block_ids": blocks, "block_indices": indices, "group": event.group}
                self._append(step, "cache", words, data)
            case CachedPartial():
                words = f"caches block {event.block_id} for a prefix of {event.num_tokens} tokens"
                data = {"block_ids": [event.block_id], "group": event.group}
                self._append(step, "cache", words, data)
            case Freed():
                data = {
                    "block_ids": from_runs(event.block_ids),
                    "still_held": from_runs(event.still_held),
                }
                self._append(step, "free", freed_text(event), data)
            case Finished():
                output = counted(event.num_output_tokens, "output token")
                data = {"status": event.status, "num_output_tokens": event.num_output_tokens}
                self._append(step, "finish", f"finishes: {event.status}, {output}", data)

    def _preempt(self, step: Step, *, while_scheduled: bool) -> None:
        self.num_preemptions += 1
        taker = _preempted_for(step).get(self.name.number) if while_scheduled else None
        words = "is preempted"
        if taker == self.name.number:
            words += ": it needs blocks itself and none is left"
        elif taker is not None:
            words += f": {who(taker)} needs blocks"
        self._append(step.number, "preempt", words, {"preempted_for": taker})

    def _append(self, step: int, kind: str, words: str, data: dict[str, Any] | None = None) -> None:
        self.entries.append(Entry(step, step, kind, words, data or {}))


def _preempted_for(step: Step) -> dict[int, int]:
    """For which request the scheduler preempted others, as far as the events tell.

    It preempts until the request at hand has its blocks, or is itself the one that has to go; then
    nothing is allocated in this step any more. With a KV connector it may give up earlier.
    """
    found: dict[int, int] = {}
    waiting: list[int] = []
    for event in step.record.events:
        if isinstance(event, Preempted):
            waiting.append(event.request)
        elif isinstance(event, Allocated):
            found |= dict.fromkeys(waiting, event.request)
            waiting = []
    if waiting and step.engine.options.get("kv_connector") is False:
        found |= dict.fromkeys(waiting, waiting[-1])
    return found


def _positions(first: int, end: int) -> str:
    if end == first + 1:
        return f"position {first}"
    return f"positions {runs_text(range(first, end))}"


def _facts(name: RequestName, life: _Life) -> dict[str, Cell]:
    facts: dict[str, Cell] = {"engine": name.engine, "internal id": name.request_id}
    if life.request is None:
        return facts
    record = life.request.record
    facts |= {
        "prompt tokens": record.num_prompt_tokens,
        "max_tokens": record.max_tokens,
        "hit tokens": life.hit_tokens,
        "preemptions": life.num_preemptions,
        "status": life.request.status or "not finished in this trace",
        "output tokens": life.request.num_output_tokens,
    }
    if life.resumed_hit_tokens is not None:
        facts["hit tokens after a preemption"] = life.resumed_hit_tokens
    for number, span in enumerate(record.multimodal):
        facts[f"{span.modality} {number}"] = (
            f"{_positions(span.offset, span.offset + span.length)}, hash {span.hash}"
        )
    if record.lora_name is not None:
        facts["LoRA"] = f"{record.lora_name} (id {record.lora_id})"
    if record.cache_salt is not None:
        facts["cache salt"] = f"digest {record.cache_salt}"
    if record.skip_reading_prefix_cache:
        facts["prefix cache"] = "not read: the request asked so"
    return facts


def _data(name: RequestName, life: _Life) -> dict[str, Any]:
    request = life.request
    record = None if request is None else request.record
    return {
        "engine": name.engine,
        "number": name.number,
        "request": name.external_id,
        "request_id": name.request_id,
        "num_prompt_tokens": None if record is None else record.num_prompt_tokens,
        "max_tokens": None if record is None else record.max_tokens,
        "hit_tokens": life.hit_tokens,
        "resumed_hit_tokens": life.resumed_hit_tokens,
        "why_computed": life.why_computed,
        "num_preemptions": life.num_preemptions,
        "status": None if request is None else request.status,
        "num_output_tokens": None if request is None else request.num_output_tokens,
        "multimodal": []
        if record is None
        else [
            {"modality": one.modality, "offset": one.offset, "length": one.length, "hash": one.hash}
            for one in record.multimodal
        ],
        "life": [
            {
                "first_step": one.first_step,
                "last_step": one.last_step,
                "what": one.kind,
                "words": one.words,
                **one.data,
            }
            for one in life.entries
        ],
    }
