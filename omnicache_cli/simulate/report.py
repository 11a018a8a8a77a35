"""A study as a report: points, the picture, what happened to the blocks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.simulate.plot import Bar, plot
from omnicache_cli.simulate.replay import Replay, Replica
from omnicache_cli.simulate.study import Point, Setup, Study
from omnicache_cli.simulate.timeline import timeline_data, timeline_sections
from omnicache_cli.simulate.watch import Distribution

TEXT_ROWS = 1000
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Subject:
    """What was replayed, and on what."""

    workload: str
    form: str  # run, prompts, openai, hashes
    block_size: int  # tokens, of the first group
    groups: tuple[str, ...]
    current_blocks: int | None = None  # the size of the pool that there is
    notes: tuple[str, ...] = ()
    vllm_version: str | None = None


def study_report(study: Study, setup: Setup, subject: Subject) -> Report:
    """For people and for scripts."""
    sections: list[Section] = [Facts("", _facts(study, setup, subject))]
    if setup.timeline:
        sections += timeline_sections(study.moments)
    sections.append(_points(study, setup, subject))
    if len(study.points) > 1:
        sections.append(plot([_bar(one, subject) for one in study.points]))
    sections.append(_blocks(study))
    if setup.replicas > 1:
        sections.append(_replicas(study))
    if setup.lists_requests:
        sections.append(_requests(study))
    notes = [*subject.notes, *_refusals(study)]
    if notes:
        sections.append(Lines("Notes", notes))
    result = _result(study, setup, subject)
    title = _title(study, subject)
    return Report("simulate", title, result, tuple(sections), subject.vllm_version)


def _title(study: Study, subject: Subject) -> str:
    points = {one.size.num_blocks: one for one in study.points if one.replay.refused is None}
    point = points.get(subject.current_blocks or -1) or points[max(points)]
    rate = point.hit_rate
    found = "the cache was never asked" if rate is None else f"{100 * rate:.4g} % hit"
    return f"{found} with {point.size.num_blocks:,} blocks of {subject.block_size} tokens"


def _facts(study: Study, setup: Setup, subject: Subject) -> dict[str, Cell]:
    arrivals = setup.arrivals
    how = {
        "one-by-one": f"{arrivals.concurrency} at a time",
        "step": "by engine step",
        "clock": f"by clock: a step takes {1000 * arrivals.step_seconds:g} ms, and "
        f"{1e6 * arrivals.token_seconds:g} us a token",
    }
    facts: dict[str, Cell] = {
        "workload": subject.workload,
        "form": subject.form,
        "requests": study.num_requests,
        "prompt tokens": study.prompt_tokens,
        "output tokens": study.output_tokens,
        "arrivals": how[study.mode],
        "KV cache groups": ", ".join(subject.groups),
        "current size, blocks": subject.current_blocks,
    }
    if setup.replicas > 1:
        facts["replicas"] = f"{setup.replicas}, {setup.route}, each with a pool of its own"
    return facts


def _points(study: Study, setup: Setup, subject: Subject) -> Table:
    with_memory = any(one.size.kv_memory is not None for one in study.points)
    columns = ["blocks", *(["KV memory"] if with_memory else []), "hit rate, %"]
    columns += ["at most, %"] if setup.bound else []
    columns += ["hit tokens", "hit blocks", "queried tokens", "evictions", "preemptions"]
    rows = []
    for one in study.points:
        totals, ran = one.replay.totals, one.replay.refused is None
        row: list[Cell] = [one.size.num_blocks, *([one.size.kv_memory] if with_memory else [])]
        row.append(_percent(one.hit_rate))
        row += [_percent(_bound_rate(one))] if setup.bound else []
        counts = (
            *(totals.hit_tokens, totals.hit_blocks, totals.query_tokens),
            *(_evictions(one.replay), totals.preemptions),
        )
        row += counts if ran else [None] * len(counts)
        rows.append(tuple(row))
    return Table("Pool sizes", tuple(columns), rows)


def _blocks(study: Study) -> Table:
    columns = (
        *("blocks", "mean in use, %", "peak, %", "steps", "life p50, steps", "life p90"),
        *("reuse p50, blocks", "reuse p90"),
    )
    rows: list[tuple[Cell, ...]] = []
    for one in study.points:
        for number, replica in enumerate(one.replay.replicas):
            watch = replica.pool.watch
            name = one.size.num_blocks
            rows.append(
                (
                    name if len(one.replay.replicas) == 1 else f"{name} #{number}",
                    _percent(watch.usage.mean),
                    _percent(watch.usage.peak),
                    watch.usage.num_steps,
                    watch.lifetimes.percentile(50),
                    watch.lifetimes.percentile(90),
                    watch.reuse_distances.percentile(50),
                    watch.reuse_distances.percentile(90),
                )
            )
    return Table(
        "Blocks: in use; life until eviction; reuse, blocks taken between two uses", columns, rows
    )


def _replicas(study: Study) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for one in study.points:
        for number, replica in enumerate(one.replay.replicas):
            rows.append(
                (
                    one.size.num_blocks,
                    number,
                    replica.requests,
                    _percent(_replica_rate(replica)),
                    replica.hit_tokens,
                    replica.pool.watch.evictions,
                )
            )
    columns = ("blocks", "replica", "requests", "hit rate, %", "hit tokens", "evictions")
    return Table("Replicas", columns, rows)


def _requests(study: Study) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            one.num_blocks,
            one.replica,
            one.request + (" (resumed)" if one.resumed else ""),
            one.prompt_tokens,
            one.hit_tokens,
        )
        for one in study.listed[:TEXT_ROWS]
    ]
    more = study.num_admissions - len(rows)
    title = f"Requests, {more:,} more with --format json" if more else "Requests"
    columns = ("blocks", "replica", "request", "prompt", "hit")
    return Table(title, columns, rows, one_line_rows=True)


def _refusals(study: Study) -> list[str]:
    return [
        f"{one.size.num_blocks:,} blocks: {one.replay.refused}"
        for one in study.points
        if one.replay.refused is not None
    ]


def _bar(one: Point, subject: Subject) -> Bar:
    current = one.size.num_blocks == subject.current_blocks
    return Bar(one.size.num_blocks, one.hit_rate, _bound_rate(one), current)


# -- numbers ----------------------------------------------------------------------------------


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _bound_rate(one: Point) -> float | None:
    tokens, asked = one.bound_hit_tokens, one.replay.totals.query_tokens
    return tokens / asked if tokens is not None and asked else None


def _replica_rate(replica: Replica) -> float | None:
    return replica.hit_tokens / replica.query_tokens if replica.query_tokens else None


def _evictions(replay: Replay) -> int:
    return sum(one.pool.watch.evictions for one in replay.replicas)


# -- for scripts ------------------------------------------------------------------------------


def _result(study: Study, setup: Setup, subject: Subject) -> Mapping[str, Any]:
    arrivals = setup.arrivals
    clock = study.mode == "clock"
    result: dict[str, Any] = {
        "workload": subject.workload,
        "form": subject.form,
        "num_requests": study.num_requests,
        "prompt_tokens": study.prompt_tokens,
        "output_tokens": study.output_tokens,
        "arrivals": study.mode,
        "concurrency": arrivals.concurrency if study.mode == "one-by-one" else None,
        "step_seconds": arrivals.step_seconds if clock else None,
        "token_seconds": arrivals.token_seconds if clock else None,
        "block_size": subject.block_size,
        "groups": list(subject.groups),
        "current_blocks": subject.current_blocks,
        "replicas": setup.replicas,
        "route": setup.route if setup.replicas > 1 else None,
        "points": [_point(one, subject) for one in study.points],
        "notes": list(subject.notes),
    }
    if setup.lists_requests:
        result["num_admissions"] = study.num_admissions
        result["requests"] = [asdict(one) for one in study.listed]
    if setup.timeline:
        result["timeline"] = timeline_data(study.moments)
    return result


def _point(one: Point, subject: Subject) -> dict[str, Any]:
    totals = one.replay.totals
    return {
        "num_blocks": one.size.num_blocks,
        "kv_memory": one.size.kv_memory,
        "is_current": one.size.num_blocks == subject.current_blocks,
        "refused": one.replay.refused,
        "num_requests": totals.finished,
        "query_tokens": totals.query_tokens,
        "hit_tokens": totals.hit_tokens,
        "hit_blocks": totals.hit_blocks,
        "hit_rate": one.hit_rate,
        "bound_hit_tokens": one.bound_hit_tokens,
        "bound_hit_rate": _bound_rate(one),
        "resumed_hit_tokens": totals.resumed_hit_tokens,
        "evictions": _evictions(one.replay),
        "preemptions": totals.preemptions,
        "pools": [_pool(replica) for replica in one.replay.replicas],
    }


def _pool(replica: Replica) -> dict[str, Any]:
    watch = replica.pool.watch
    return {
        "requests": replica.requests,
        "query_tokens": replica.query_tokens,
        "hit_tokens": replica.hit_tokens,
        "hit_rate": _replica_rate(replica),
        "evictions": watch.evictions,
        "steps": watch.usage.num_steps,
        "mean_in_use": watch.usage.mean,
        "peak_in_use": watch.usage.peak,
        "peak_step": watch.usage.peak_step,
        "lifetime_steps": _distribution(watch.lifetimes),
        "reuse_distance_blocks": _distribution(watch.reuse_distances),
    }


def _distribution(one: Distribution) -> dict[str, int | None]:
    named = {f"p{percent}": one.percentile(percent) for percent in PERCENTILES}
    return {"count": one.count, **named}
