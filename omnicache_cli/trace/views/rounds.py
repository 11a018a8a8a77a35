"""`show RUN --rounds`: the first round of each prompt beside the rounds that follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omnicache_cli.errors import BadInputError
from omnicache_cli.report.model import Cell, Lines, Report, Section, Table
from omnicache_cli.trace.manifest import COMMAND_LAYOUT, Manifest, parse_request_name
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import GroupView, ScheduledRequest, Step
from omnicache_cli.trace.views.reasons import why_computed
from omnicache_cli.trace.views.view import View, engine_choices, of_engine, steps_of
from omnicache_cli.trace.views.words import blocks_text, counted, runs_text

TEXT_PROMPTS = 20
"""Text shows this many prompts and says how many more there are."""

TEXT_RUNS = 4
"""Text shows this many runs of a long vector; --step and JSON have it in full."""


@dataclass(frozen=True, slots=True)
class GroupShare:
    """One request's part of one group's metadata in one forward pass."""

    seq_len: int | None
    slots: list[int] | None  # padding included where the request's row is the last one
    block_ids: list[int] | None  # None: not read
    num_hit_blocks: int  # leading blocks that the request found in the cache
    maps_slots: bool

    @property
    def reused_blocks(self) -> list[int] | None:
        return None if self.block_ids is None else self.block_ids[: self.num_hit_blocks]

    @property
    def new_blocks(self) -> list[int] | None:
        return None if self.block_ids is None else self.block_ids[self.num_hit_blocks :]


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward pass that carried one request in one step."""

    step: int
    num_actual_tokens: int | None  # of the whole batch
    num_reqs: int
    num_scheduled_tokens: int  # of this request
    groups: list[GroupShare]


@dataclass(slots=True)
class Round:
    """One prompt in one round."""

    prompt: int
    round_number: int  # from 0
    request: str
    num_prompt_tokens: int
    engine: str
    hit_tokens: int | None = None
    why_computed: str | None = None  # where plain arithmetic says it
    num_prefill_steps: int = 0
    first: Pass | None = None
    decode: Pass | None = None

    def add(self, step: Step, one: ScheduledRequest) -> None:
        if self.hit_tokens is None and one.hit_tokens is not None:
            self.hit_tokens = one.hit_tokens
            self.why_computed = next(
                why_computed(step.engine, admission)
                for admission in step.record.admitted
                if admission.request == one.request.number
            )
        is_decode = one.num_computed_tokens >= self.num_prompt_tokens
        self.num_prefill_steps += not is_decode
        if self.first is None:
            self.first = _pass(step, one, self.hit_tokens or 0)
        elif is_decode and self.decode is None:
            self.decode = _pass(step, one, self.hit_tokens or 0)


def show_rounds(run: Run, engine: str | None) -> View:
    """BadInputError: the run has no rounds."""
    manifest = run.manifest
    if manifest is None or manifest.layout == COMMAND_LAYOUT:
        raise BadInputError(
            f"{run.folder} has no rounds: only `omnicache trace MODEL --rounds N` makes them; "
            f"try: omnicache show {run.folder}"
        )
    if manifest.num_rounds < 2:
        raise BadInputError(f"{run.folder} has one round only; record it again with --rounds 2")
    found = _read_rounds(run, manifest, engine)
    if not found:
        raise BadInputError(f"{run.folder}: no request of any round was scheduled")
    prompts = sorted({prompt for prompt, _ in found})
    sections: list[Section] = []
    for prompt in prompts[:TEXT_PROMPTS]:
        sections += _prompt_sections([found[key] for key in sorted(found) if key[0] == prompt])
    if len(prompts) > TEXT_PROMPTS:
        more = counted(len(prompts) - TEXT_PROMPTS, "more prompt")
        sections.append(Lines("", [f"… and {more}; --format json for all"]))
    report = Report(
        "show",
        f"{counted(manifest.num_rounds, 'round')} of {counted(len(prompts), 'prompt')}",
        {
            "run": str(run.folder),
            "num_rounds": manifest.num_rounds,
            "rounds": [_data(found[key]) for key in sorted(found)],
        },
        tuple(sections),
        run.vllm_version,
    )
    last = found[max(key for key in found if key[0] == prompts[0])]
    return View(report, of_engine(run, f"--request {last.request}", last.engine))


def _read_rounds(run: Run, manifest: Manifest, engine: str | None) -> dict[tuple[int, int], Round]:
    found: dict[tuple[int, int], Round] = {}
    for step in steps_of(run, engine):
        for one in step.scheduled:
            key = parse_request_name(one.request.external_id, manifest.num_rounds)
            if key is None:
                continue
            mine = found.get(key)
            if mine is not None and mine.engine != step.engine.engine:
                raise BadInputError(
                    f"{run.folder} has {one.request.external_id} on several engines; choose one "
                    f"with --engine: {engine_choices(run)}"
                )
            if mine is None:
                name, record = one.request.external_id, one.request.record
                mine = found[key] = Round(*key, name, record.num_prompt_tokens, step.engine.engine)
            mine.add(step, one)
    return found


def _pass(step: Step, one: ScheduledRequest, hit_tokens: int) -> Pass | None:
    """On the lowest rank; None where no worker recorded the request."""
    for view in step.forwards:
        if one.request.record.request_id not in view.request_ids or not view.groups:
            continue
        row = view.request_ids.index(one.request.record.request_id)
        shares = []
        for group in view.groups:
            spec = step.group_spec(group.group)
            sizes = view.worker.kernel_block_sizes
            size = sizes[group.group] if group.group < len(sizes) else spec.block_size
            num_hit_blocks = hit_tokens // size
            shares.append(_share(group, row, view.record.num_reqs, num_hit_blocks, spec.maps_slots))
        total = view.groups[0].num_actual_tokens
        return Pass(step.number, total, view.record.num_reqs, one.num_scheduled_tokens, shares)
    return None


def _share(
    group: GroupView, row: int, num_reqs: int, num_hit_blocks: int, maps_slots: bool
) -> GroupShare:
    lens, starts, slots = group.seq_lens, group.query_start_loc, group.slot_mapping
    mine = None
    if slots is not None and starts is not None and row + 1 < len(starts):
        is_last = row + 1 == num_reqs
        mine = slots[starts[row] : None if is_last else starts[row + 1]]
    table = group.block_table
    return GroupShare(
        lens[row] if lens is not None and row < len(lens) else None,
        mine,
        None if table is None else list(table[row]) if row < len(table) else [],
        num_hit_blocks,
        maps_slots,
    )


_COLUMNS = ("round", "pass", "num_actual_tokens", "seq_lens", "hit", "slot_mapping", "block_table")


def _prompt_sections(rounds: Sequence[Round]) -> list[Section]:
    first = rounds[0]
    num_groups = max((len(one.first.groups) for one in rounds if one.first), default=1)
    sections: list[Section] = []
    for group in range(num_groups):
        title = f"Prompt {first.prompt}: {counted(first.num_prompt_tokens, 'token')}"
        title += f", KV cache group {group}" if num_groups > 1 else ""
        rows = [row for one in rounds for row in _rows(one, group)]
        sections.append(Table(title, _COLUMNS, rows))
    notes = _why_computed(rounds) + [note for one in rounds for note in _notes(one)]
    before = first.first
    for later in rounds[1:]:
        notes += _same_blocks(before, later)
    if notes:
        sections.append(Lines("", notes))
    return sections


def _rows(one: Round, group: int) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for name, found, hit in (("first", one.first, one.hit_tokens), ("decode", one.decode, None)):
        if found is None or group >= len(found.groups):
            continue
        share = found.groups[group]
        rows.append(
            (
                one.round_number + 1,
                f"{name}, step {found.step}",
                _tokens_cell(found),
                share.seq_len,
                hit,
                _slots_text(share),
                _marked_blocks(share),
            )
        )
    return rows


def _tokens_cell(one: Pass) -> Cell:
    """`1 of 64`: this request's tokens, of those of the batch."""
    if one.num_reqs == 1 or one.num_actual_tokens is None:
        return one.num_actual_tokens
    return f"{one.num_scheduled_tokens} of {one.num_actual_tokens}"


def _slots_text(share: GroupShare) -> str:
    if not share.maps_slots:
        return "no slots"
    return "not read" if share.slots is None else runs_text(share.slots, most=TEXT_RUNS)


def _marked_blocks(share: GroupShare) -> str:
    reused, own = share.reused_blocks, share.new_blocks
    if own is None:
        return "not read"
    if not reused:
        return runs_text(own, most=TEXT_RUNS)
    text = f"{runs_text(reused, most=TEXT_RUNS)} reused"
    return f"{text}; {runs_text(own, most=TEXT_RUNS)} new" if own else text


def _why_computed(rounds: Sequence[Round]) -> list[str]:
    """Rounds with the same reason share a line."""
    reasons: dict[str, list[int]] = {}
    for one in rounds:
        if one.why_computed is not None:
            reasons.setdefault(one.why_computed, []).append(one.round_number + 1)
    return [
        f"{'round' if len(numbers) == 1 else 'rounds'} {runs_text(numbers)}: {reason}"
        for reason, numbers in reasons.items()
    ]


def _notes(one: Round) -> list[str]:
    notes = []
    if one.num_prefill_steps > 1:
        notes.append(
            f"round {one.round_number + 1}: the prompt took {one.num_prefill_steps} steps, "
            "the first is shown"
        )
    if one.first is not None and any(0 in (share.block_ids or ()) for share in one.first.groups):
        notes.append(
            f"round {one.round_number + 1}: block 0 is the null block: what stood there is not "
            "needed any more (behind a sliding window, or before a state)"
        )
    if one.first is None:
        notes.append(f"round {one.round_number + 1}: no worker recorded its forward pass")
    return notes


def _same_blocks(before: Pass | None, later: Round) -> list[str]:
    """New blocks of a later round whose ids the first round had: freed and taken again."""
    if before is None or later.first is None:
        return []
    lines = []
    for old, new in zip(before.groups, later.first.groups, strict=False):
        known = set(old.block_ids or ())
        again = [block for block in new.new_blocks or () if block in known]
        if again:
            verb = "was" if len(again) == 1 else "were"
            lines.append(
                f"round {later.round_number + 1}: new {blocks_text(again)} {verb} in the table of "
                "the first round too: freed in between and taken again"
            )
    return lines


def _data(one: Round) -> dict[str, Any]:
    return {
        "prompt": one.prompt,
        "round": one.round_number + 1,
        "request": one.request,
        "num_prompt_tokens": one.num_prompt_tokens,
        "hit_tokens": one.hit_tokens,
        "why_computed": one.why_computed,
        "num_prefill_steps": one.num_prefill_steps,
        "first_forward": _pass_data(one.first),
        "first_decode": _pass_data(one.decode),
    }


def _pass_data(one: Pass | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "step": one.step,
        "num_actual_tokens": one.num_actual_tokens,
        "num_reqs": one.num_reqs,
        "num_scheduled_tokens": one.num_scheduled_tokens,
        "groups": [
            {
                "group": number,
                "seq_len": share.seq_len,
                "slot_mapping": share.slots,
                "block_table": share.block_ids,
                "reused_blocks": share.reused_blocks,
                "new_blocks": share.new_blocks,
            }
            for number, share in enumerate(one.groups)
        ],
    }
