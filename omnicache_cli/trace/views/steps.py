"""`show RUN`: one row per step."""

from collections.abc import Iterable, Iterator
from typing import Any

from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.phases import step_times
from omnicache_cli.trace.records import (
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
from omnicache_cli.trace.steps import Step
from omnicache_cli.trace.views.view import View, engine_title, of_engine, steps_of
from omnicache_cli.trace.views.words import counted, milliseconds

TEXT_ROWS = 1000
"""Text shows this many steps and says how many more there are."""

_COLUMNS = (
    *("step", "reqs", "tokens", "prefill", "hit", "free", "sched", "prep", "fwd", "samp"),
    *("adm", "res", "pre", "fin", "new", "cached", "evict", "freed"),
)
_COUNTS = (
    *("num_admitted", "num_resumed", "num_preempted", "num_finished"),
    *("allocated_blocks", "cached_blocks", "evicted_blocks", "freed_blocks"),
)
"""What stands under the columns from `adm` on."""

_LEGEND = (
    "adm, res, pre, fin: requests admitted, resumed, preempted, finished; new .. freed: blocks"
)
_TITLE = "Tokens, free blocks, times in ms"


def show_steps(run: Run, engine: str | None, *, every_step: bool) -> View:
    """The table of steps. `every_step`: all of them (JSON), else memory stays flat."""
    kept: list[dict[str, Any]] = []
    num_steps = 0
    for row in step_rows(steps_of(run, engine)):
        num_steps += 1
        if every_step or len(kept) < TEXT_ROWS:
            kept.append(row)
    sections: list[Section] = [_facts(run, num_steps)]
    several = len({row["engine"] for row in kept}) > 1
    for name in run.engines:
        mine = [row for row in kept[:TEXT_ROWS] if row["engine"] == name]
        if mine:
            heading = engine_title(run, name)
            titled = several or run.engines[name].stage is not None
            title = f"{heading}: {_TITLE.lower()}" if titled else _TITLE
            rows = [_cells(row) for row in mine]
            sections.append(Table(title, _COLUMNS, rows, one_line_rows=True))
    if not num_steps:
        sections.append(Lines("", ["no step was recorded"]))
    elif num_steps > TEXT_ROWS:
        more = num_steps - TEXT_ROWS
        sections.append(
            Lines("", [f"… and {counted(more, 'more step')}; --step N or --format json for all"])
        )
    report = Report(
        "show",
        f"Steps of {run.folder.name or run.folder}",
        {"run": str(run.folder), "num_steps": num_steps, "steps": kept},
        tuple(sections),
        run.vllm_version,
    )
    if not kept:
        return View(report)
    return View(report, of_engine(run, f"--step {kept[0]['step']}", kept[0]["engine"]))


def _facts(run: Run, num_steps: int) -> Facts:
    engines = list(run.engines.values())
    items: dict[str, Cell] = {"model": ", ".join(dict.fromkeys(one.model for one in engines))}
    items["steps"] = num_steps
    items["pool"] = ", ".join(
        dict.fromkeys(
            f"{one.num_gpu_blocks} blocks of {one.block_size} tokens, {len(one.groups)} KV cache "
            f"group{'s' if len(one.groups) > 1 else ''}, prefix caching "
            f"{'on' if one.enable_prefix_caching else 'off'}"
            for one in engines
        )
    )
    if num_steps:
        items["columns"] = _LEGEND
    return Facts("", items)


def step_rows(steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    """One flat record per step, as JSON shows it."""
    for step in steps:
        events = step.before + step.record.events + step.after
        prefill = num_prefill_tokens(step)
        first = [
            one.hit_tokens
            for one in step.record.admitted
            if not one.resumed and one.session_prompt_tokens is None
        ]
        again = [one.hit_tokens for one in step.record.admitted if one.resumed]
        yield {
            "engine": step.engine.engine,
            "step": step.number,
            "num_requests": len(step.requests),
            "num_scheduled_tokens": step.num_scheduled_tokens,
            "num_prefill_tokens": prefill,
            "num_decode_tokens": step.num_scheduled_tokens - prefill,
            "num_admitted": len(first),
            "num_resumed": len(again),
            "hit_tokens": sum(first) if first else None,
            "resumed_hit_tokens": sum(again) if again else None,
            **count_events(events),
            "num_free_blocks": step.record.num_free_blocks,
            **{f"{phase}_ns": duration for phase, duration in step_times(step).items()},
        }


def num_prefill_tokens(step: Step) -> int:
    """Scheduled tokens that were not sampled in the step before: prompts, and what a resumed
    request computes again."""
    total = 0
    for one in step.scheduled:
        prompt = one.request.record.num_prompt_tokens
        if one.resumed or one.num_computed_tokens < prompt:
            end = one.num_computed_tokens + one.num_scheduled_tokens
            total += one.num_scheduled_tokens if one.resumed else min(end, prompt)
            total -= 0 if one.resumed else one.num_computed_tokens
    return total


def count_events(events: Iterable[AnyEvent]) -> dict[str, int]:
    """Blocks and requests that these events touch."""
    counts = dict.fromkeys(
        ("allocated_blocks", "cached_blocks", "evicted_blocks", "freed_blocks"), 0
    )
    counts |= {"num_preempted": 0, "num_finished": 0}
    evicted: set[int] = set()  # a block may have several hashes
    for event in events:
        match event:
            case Allocated():
                counts["allocated_blocks"] += len(from_runs(event.block_ids))
            case Cached():
                counts["cached_blocks"] += len(from_runs(event.block_ids))
            case CachedPartial():
                counts["cached_blocks"] += 1
            case Evicted():
                evicted.add(event.block_id)
            case Freed():
                counts["freed_blocks"] += len(from_runs(event.block_ids))
            case Preempted():
                counts["num_preempted"] += 1
            case Finished():
                counts["num_finished"] += 1
    counts["evicted_blocks"] = len(evicted)
    return counts


def _cells(row: dict[str, Any]) -> tuple[Cell, ...]:
    return (
        row["step"],
        row["num_requests"],
        row["num_scheduled_tokens"],
        row["num_prefill_tokens"],
        row["hit_tokens"],
        row["num_free_blocks"],
        *(_narrow_ms(row[f"{phase}_ns"]) for phase in ("schedule", "prepare", "forward", "sample")),
        *(row[name] for name in _COUNTS),
    )


def _narrow_ms(nanoseconds: int | None) -> float | None:
    """At most two decimals: four characters below ten seconds."""
    time = milliseconds(nanoseconds)
    return None if time is None else round(time, 2)
