"""Phase times as a report: of `show --phases`, and a part of what `profile` says."""

from collections.abc import Iterator, Sequence
from typing import Any

from omnicache_cli.profile.phases import (
    REST,
    SCHEDULER,
    EnginePhases,
    PhaseTime,
    RunPhases,
    measure,
)
from omnicache_cli.profile.slowest import SlowStep
from omnicache_cli.report.model import Cell, Lines, Report, Section, Table
from omnicache_cli.trace.phases import INSIDE, OF_SCHEDULER, OF_WORKER, PHASES, TENSOR_PHASES
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import Histogram
from omnicache_cli.trace.views.view import View, engine_title, stage_title
from omnicache_cli.trace.views.words import counted, milliseconds

_COLUMNS = (*("phase", "of", "steps", "total ms", "share", "p50 ms", "p90 ms", "p99 ms", "max ms"),)
_ORDER = (*OF_SCHEDULER[:-1], *OF_WORKER, "output")
"""As they follow one another in a step."""


def show_phases(run: Run, engine: str | None = None) -> View:
    """`show RUN --phases`. BadInputError: no such engine."""
    phases = measure(run, engine)
    report = Report(
        "show",
        f"Phases of {run.folder.name or run.folder}",
        {"run": str(run.folder), **phase_data(run, phases)},
        tuple(phase_sections(run, phases)),
        run.vllm_version,
    )
    return View(report, _options_of_slowest(run, phases))


def _options_of_slowest(run: Run, phases: RunPhases) -> str | None:
    """What shows the slowest step; None: there is no step."""
    if not phases.slowest:
        return None
    slowest = phases.slowest[0]
    number = list(run.engines).index(slowest.engine)
    engine = f"--engine {number} " if len(run.engines) > 1 else ""
    return f"{engine}--step {slowest.step}"


def phase_sections(run: Run, phases: RunPhases) -> list[Section]:
    """Tables and sentences about a run that has been read."""
    sections: list[Section] = []
    for name, engine in phases.engines.items():
        title = engine_title(run, name)
        sections += _engine_sections(f"{title}: " if title else "", engine)
    if phases.slowest:
        sections.append(_slowest_table(run, phases.slowest))
    else:
        sections.append(Lines("", ["no step was recorded"]))
    return sections


def phase_data(run: Run, phases: RunPhases) -> dict[str, Any]:
    """The same for scripts; names as in docs/phases.md."""
    return {
        "engines": [_engine_data(run, name, one) for name, one in phases.engines.items()],
        "slowest_steps": [_slow_step_data(one) for one in phases.slowest],
    }


# -- text -----------------------------------------------------------------------------------------


def _engine_sections(prefix: str, engine: EnginePhases) -> list[Section]:
    rows = [
        (
            f"{name}, in {INSIDE[name]}" if name in INSIDE else name,
            "scheduler" if rank is SCHEDULER else f"rank {rank}",
            *_cells(engine, phase),
        )
        for name, rank, phase in _phases_in_order(engine)
    ]
    if engine.rest.durations.count:
        rows.append((REST, "", *_cells(engine, engine.rest)))
    if engine.steps.count:
        rows.append(("whole step", "", *_times(engine.steps, 1.0)))
    title = f"{prefix}phases of {counted(engine.num_steps, 'step')}"
    table = Table(title[:1].upper() + title[1:], _COLUMNS, rows)
    return [table, Lines("", list(_sentences(engine)))]


def _phases_in_order(engine: EnginePhases) -> Iterator[tuple[str, int | None, PhaseTime]]:
    """What was recorded, by phase and then by rank."""
    ranks = sorted(rank for _, rank in engine.phases if rank is not None)
    for name in _ORDER:
        for rank in (SCHEDULER, *dict.fromkeys(ranks)):
            phase = engine.phases.get((name, rank))
            if phase is not None:
                yield name, rank, phase


def _cells(engine: EnginePhases, phase: PhaseTime) -> tuple[Cell, ...]:
    return _times(phase.durations, engine.share(phase))


def _times(durations: Histogram, share: float | None) -> tuple[Cell, ...]:
    return (
        durations.count,
        milliseconds(durations.total_ns),
        None if share is None else f"{100 * share:.1f} %",
        *(milliseconds(durations.percentile(percent)) for percent in (50, 90, 99)),
        milliseconds(durations.longest_ns),
    )


def _sentences(engine: EnginePhases) -> Iterator[str]:
    largest = engine.largest
    if largest is not None:
        total = sum(engine.own_ns.values())
        share = f", {100 * engine.own_ns[largest] / total:.0f} % of it" if total else ""
        yield f"most of the time is in {_named(largest)}{share}"
    if not engine.source.enable_prefix_caching:
        yield "prefix caching is off on this engine"
    if missing := not_recorded(engine):
        yield f"not recorded: {', '.join(missing)}"
    if engine.hashing.count:
        hashing = engine.hashing
        yield (
            f"beside the steps: hashing {counted(hashing.count, 'prompt')}, "
            f"{milliseconds(hashing.total_ns)} ms in all, p50 "
            f"{milliseconds(hashing.percentile(50))} ms, max {milliseconds(hashing.longest_ns)} ms"
        )
    if engine.overlap:
        yield "steps are in flight together: shares are of the time in flight, not of the clock"
    if engine.devices - {"cpu"}:
        yield (
            "on a device the forward phase is the launch: kernels run on, and what waits for them "
            "is in sample or in the rest"
        )


def _named(phase: str) -> str:
    if phase == REST:
        return "no phase (rest)"
    parts = [part for part, outer in INSIDE.items() if outer == phase]
    return f"{phase}, without {' and '.join(parts)}" if parts else phase


def not_recorded(engine: EnginePhases) -> list[str]:
    """Phases that no step of this engine has a time of.

    A tensor cache that does not exist has nothing to record: its phases are left out.
    """
    found = {name for name, _ in engine.phases}
    return [name for name in PHASES if name not in found and name not in TENSOR_PHASES]


def _slowest_table(run: Run, steps: Sequence[SlowStep]) -> Table:
    several = len({one.engine for one in steps}) > 1
    order = list(run.engines)
    rows: list[tuple[Cell, ...]] = [
        (
            *([order.index(one.engine)] if several else []),
            one.step,
            milliseconds(one.duration_ns),
            f"{one.largest} {milliseconds(one.times[one.largest]):g}",
            one.num_requests,
            one.num_scheduled_tokens,
            one.num_prefill_tokens,
            _graph(one),
            ", ".join(one.special) or "nothing that the records tell",
        )
        for one in steps
    ]
    columns = ("step", "ms", "most of it", "reqs", "tokens", "prefill", "graph", "special")
    whole = all(one.is_whole for one in steps)
    return Table(
        "Slowest steps" if whole else "Slowest steps, by the phases that were recorded",
        (*(["engine"] if several else []), *columns),
        rows,
    )


def _graph(step: SlowStep) -> str | None:
    if step.cudagraph_mode is None:
        return None
    padding = f", {step.num_padding_tokens} padding" if step.num_padding_tokens else ""
    return f"{step.cudagraph_mode}{padding}"


# -- for scripts ----------------------------------------------------------------------------------


def _engine_data(run: Run, name: str, engine: EnginePhases) -> dict[str, Any]:
    return {
        "engine": name,
        "stage": stage_title(run, name),
        "num_steps": engine.num_steps,
        "steps": _durations(engine.steps),
        "phases": [
            {
                "phase": phase,
                "rank": rank,
                "inside": INSIDE.get(phase),
                "share": engine.share(time),
                **_durations(time.durations),
            }
            for phase, rank, time in _phases_in_order(engine)
        ],
        "rest": {
            "share": engine.share(engine.rest) if engine.rest.durations.count else None,
            **_durations(engine.rest.durations),
        },
        "hashing": _durations(engine.hashing),
        "largest": engine.largest,
        "not_recorded": not_recorded(engine),
        "overlap": engine.overlap,
    }


def _durations(histogram: Histogram) -> dict[str, int | None]:
    return {
        "count": histogram.count,
        "total_ns": histogram.total_ns if histogram.count else None,
        "p50_ns": histogram.percentile(50),
        "p90_ns": histogram.percentile(90),
        "p99_ns": histogram.percentile(99),
        "max_ns": histogram.longest_ns,
    }


def _slow_step_data(step: SlowStep) -> dict[str, Any]:
    return {
        "engine": step.engine,
        "step": step.step,
        "duration_ns": step.duration_ns,
        "is_whole": step.is_whole,
        "times_ns": step.times,
        "largest": step.largest,
        "num_requests": step.num_requests,
        "num_scheduled_tokens": step.num_scheduled_tokens,
        "num_prefill_tokens": step.num_prefill_tokens,
        "hit_tokens": step.hit_tokens,
        "cudagraph_mode": step.cudagraph_mode,
        "num_padding_tokens": step.num_padding_tokens,
        "special": list(step.special),
    }
