"""`show RUN --summary`: the run in one screen."""

from typing import Any

from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.phases import ALWAYS_RECORDED
from omnicache_cli.trace.records import MISSING_HOOK
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import PoolUsage, Summary, summarize
from omnicache_cli.trace.views.view import View, steps_of
from omnicache_cli.trace.views.words import counted, milliseconds

_PHASE_COLUMNS = ("phase", "steps", "total ms", "p50 ms", "p90 ms", "p99 ms", "max ms")


def show_summary(run: Run, engine: str | None) -> View:
    steps = None if engine is None else steps_of(run, engine)
    return View(summary_report(run, summarize(run, steps)), "--check")


def summary_report(run: Run, summary: Summary, command: str = "show") -> Report:
    """Totals as a report; `trace` ends with the same one."""
    sections: list[Section] = [_facts(summary)]
    remarks = [one for one in (no_hit_reason(summary), version_remark(summary)) if one is not None]
    if remarks:
        sections.append(Lines("", remarks))
    if summary.stages:
        sections.append(_stage_table(summary))
    if len(summary.queried_tokens_by_modality) > 1:
        sections.append(_modality_table(summary))
    if len(summary.pools) > 1:
        sections.append(_pool_table(summary))
    sections.append(phase_table(summary))
    warnings = _warnings(summary)
    if warnings:
        sections.append(Lines("Incomplete", warnings))
    return Report(
        command,
        f"Summary of {run.folder.name or run.folder}",
        {"run": str(run.folder), **summary_data(summary)},
        tuple(sections),
        run.vllm_version,
    )


def _facts(summary: Summary) -> Facts:
    endings = ", ".join(f"{count} {status}" for status, count in summary.num_finished.items())
    items: dict[str, Cell] = {"engines": len(summary.pools)} if len(summary.pools) > 1 else {}
    items |= {
        "steps": summary.num_steps,
        "forward passes": summary.num_forwards,
        "requests": summary.num_arrived,
        "finished": endings or "none",
        "not finished": summary.num_unfinished,
        "prompt tokens": summary.prompt_tokens,
        "scheduled tokens": summary.scheduled_tokens,
        "queried tokens": summary.queried_tokens,
        "hit tokens": summary.hit_tokens,
        "hit rate": "not known: the prefix cache was never asked"
        if summary.kv_cache_hit_rate is None
        else f"{_percent(summary.kv_cache_hit_rate)} of the queried tokens",
        "evicted blocks": summary.evicted_blocks,
        "evicted blocks per step": summary.eviction_frequency,
        "preemptions": summary.preemptions,
        "prefix cache resets": summary.resets,
    }
    if summary.preemptions:
        items["hit tokens after a preemption"] = summary.resumed_hit_tokens
    if summary.external_tokens:
        items["tokens from a KV connector"] = summary.external_tokens
    if len(summary.pools) == 1:
        items["pool in use"] = _pool_text(next(iter(summary.pools.values())))
    if summary.broken_invariants is not None:
        items["broken invariants"] = summary.broken_invariants
    return Facts("", items)


def no_hit_reason(summary: Summary) -> str | None:
    """Why nothing hit, where the prompts were simply too short."""
    block = summary.too_short_for
    if block is None:
        return None
    short = "fills a block" if summary.longest_prompt_tokens < block else "is longer than a block"
    return f"no prompt {short} of {counted(block, 'token')}, so nothing could hit"


def version_remark(summary: Summary) -> str | None:
    """What is known of the hook points of a vLLM that omnicache was never tried with."""
    if summary.untested_vllm is None:
        return None
    if summary.missing_hooks:
        found = f"it lacks {', '.join(summary.missing_hooks)}"
    elif summary.unfinished_files:
        found = "whether it has all hook points is not known: a file has no end record"
    else:
        found = "it has all hook points that were looked for"
    failed = sorted(hook for hook in summary.probe_errors if not hook.startswith(MISSING_HOOK))
    if failed:
        found += f", and the probe failed in {', '.join(failed)}"
    return f"omnicache was not tried with vLLM {summary.untested_vllm}; {found}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"


def _usage(share: float | None) -> str | None:
    """Three digits: a large pool is used by a hundredth of a percent."""
    return None if share is None else f"{100 * share:.3g} %"


def _pool_text(pool: PoolUsage) -> str:
    if pool.peak is None:
        return "not known: the pool has no block"
    return (
        f"{_usage(pool.mean)} on average, {_usage(pool.peak)} at most (step {pool.peak_step}), "
        f"{_usage(pool.final)} in the last step"
    )


def _pool_table(summary: Summary) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            f"{number}, {name}",
            pool.num_blocks,
            *map(_usage, (pool.mean, pool.peak)),
            pool.peak_step,
            _usage(pool.final),
        )
        for number, (name, pool) in enumerate(summary.pools.items())
    ]
    return Table(
        "Pool in use", ("engine", "blocks", "mean", "peak", "in step", "in the last step"), rows
    )


def _stage_table(summary: Summary) -> Table:
    """What each stage of a pipeline hit: counted from its scheduler's output."""
    rows: list[tuple[Cell, ...]] = []
    for name, one in summary.stages.items():
        rate = one.hit_tokens / one.queried_tokens if one.queried_tokens else None
        place = one.stage if one.stage_id is None else f"{one.stage_id} {one.stage}"
        caching = "on" if one.enable_prefix_caching else "off"
        counts = (one.num_steps, one.num_arrived, one.queried_tokens, one.hit_tokens)
        rows.append((place, name, caching, *counts, _percent(rate)))
    columns = ("stage", "engine", "prefix caching", "steps", "requests", "queried", "hit", "rate")
    return Table("Stages", columns, sorted(rows, key=lambda row: str(row[0])))


def _modality_table(summary: Summary) -> Table:
    rates = summary.hit_rate_by_modality
    rows: list[tuple[Cell, ...]] = []
    for modality, queried in sorted(summary.queried_tokens_by_modality.items()):
        hit = summary.hit_tokens_by_modality[modality]
        share = hit / summary.hit_tokens if summary.hit_tokens else None
        rows.append((modality, queried, hit, _percent(rates.get(modality)), _percent(share)))
    return Table(
        "Tokens by modality", ("modality", "queried", "hit", "hit rate", "share of hits"), rows
    )


def phase_table(summary: Summary) -> Table:
    """Time of the steps' phases."""
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            phase.count,
            milliseconds(phase.total_ns if phase.count else None),
            *(milliseconds(phase.percentile(percent)) for percent in (50, 90, 99)),
            milliseconds(phase.longest_ns),
        )
        for name, phase in summary.phases.items()
        if phase.count or name in ALWAYS_RECORDED
    ]
    return Table("Phase times", _PHASE_COLUMNS, rows)


def _warnings(summary: Summary) -> list[str]:
    lines = [
        f"{name} has no end record: its process was stopped, or is still running"
        for name in summary.unfinished_files
    ]
    if summary.dropped_records:
        count = summary.dropped_records
        lines.append(f"{count} records or more could not be written and are missing")
    if summary.unjoined_forwards:
        lines.append(f"{summary.unjoined_forwards} forward passes belong to no recorded step")
    if summary.num_steps and not summary.num_forwards:
        lines.append("no forward pass was recorded: no worker process wrote one")
    lines += [
        f"{count} probe errors in {hook}"
        for hook, count in summary.probe_errors.items()
        if not hook.startswith(MISSING_HOOK)
    ]
    lines += [
        f"this vLLM has no {hook}: what the probe reads there is missing"
        for hook in summary.missing_hooks
    ]
    return lines


def summary_data(summary: Summary) -> dict[str, Any]:
    """The names that scripts rely on (docs/show.md)."""
    return {
        "steps": summary.num_steps,
        "forwards": summary.num_forwards,
        "requests": summary.num_arrived,
        "finished_requests": dict(summary.num_finished),
        "unfinished_requests": summary.num_unfinished,
        "prompt_tokens": summary.prompt_tokens,
        "longest_prompt_tokens": summary.longest_prompt_tokens,
        "scheduled_tokens": summary.scheduled_tokens,
        "queried_tokens": summary.queried_tokens,
        "hit_tokens": summary.hit_tokens,
        "resumed_hit_tokens": summary.resumed_hit_tokens,
        "external_tokens": summary.external_tokens,
        "kv_cache_hit_rate": summary.kv_cache_hit_rate,
        "no_hit_reason": no_hit_reason(summary),
        "modal_cache_ratio": summary.modal_cache_ratio,
        "modalities": {
            modality: {
                "queried_tokens": queried,
                "hit_tokens": summary.hit_tokens_by_modality[modality],
                "hit_rate": summary.hit_rate_by_modality.get(modality),
            }
            for modality, queried in sorted(summary.queried_tokens_by_modality.items())
        },
        "pools": [
            {
                "engine": name,
                "usable_blocks": pool.num_blocks,
                "mean_usage": pool.mean,
                "peak_usage": pool.peak,
                "peak_step": pool.peak_step,
                "final_usage": pool.final,
            }
            for name, pool in summary.pools.items()
        ],
        "stages": [
            {
                "engine": name,
                "stage_id": one.stage_id,
                "stage": one.stage,
                "enable_prefix_caching": one.enable_prefix_caching,
                "steps": one.num_steps,
                "requests": one.num_arrived,
                "queried_tokens": one.queried_tokens,
                "hit_tokens": one.hit_tokens,
            }
            for name, one in summary.stages.items()
        ],
        "evicted_blocks": summary.evicted_blocks,
        "eviction_frequency": summary.eviction_frequency,
        "preemptions": summary.preemptions,
        "prefix_cache_resets": summary.resets,
        "broken_invariants": summary.broken_invariants,
        "dropped_records": summary.dropped_records,
        "unjoined_forwards": summary.unjoined_forwards,
        "unfinished_files": summary.unfinished_files,
        "probe_errors": dict(summary.probe_errors),
        "missing_hooks": summary.missing_hooks,
        "untested_vllm": summary.untested_vllm,
        "phases": phase_data(summary),
    }


def phase_data(summary: Summary) -> dict[str, Any]:
    """Nanoseconds; null where no step has the phase."""
    return {
        name: {
            "steps": phase.count,
            "total_ns": phase.total_ns if phase.count else None,
            "p50_ns": phase.percentile(50),
            "p90_ns": phase.percentile(90),
            "p99_ns": phase.percentile(99),
            "max_ns": phase.longest_ns,
        }
        for name, phase in summary.phases.items()
    }
