"""`show RUN --summary`: the run in one screen."""

from typing import Any

from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.records import MISSING_HOOK
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import Summary, summarize
from omnicache_cli.trace.views.view import View, steps_of
from omnicache_cli.trace.views.words import counted, milliseconds


def show_summary(run: Run, engine: str | None) -> View:
    steps = None if engine is None else steps_of(run, engine)
    return View(summary_report(run, summarize(run, steps)), "--check")


def summary_report(run: Run, summary: Summary, command: str = "show") -> Report:
    """Totals as a report; `trace` ends with the same one."""
    sections: list[Section] = [_facts(summary)]
    remarks = [one for one in (no_hit_reason(summary), version_remark(summary)) if one is not None]
    if remarks:
        sections.append(Lines("", remarks))
    ratio = summary.modal_cache_ratio
    if ratio is not None and len(ratio) > 1:
        rows = [
            (modality, tokens, _percent(tokens / summary.hit_tokens))
            for modality, tokens in sorted(summary.hit_tokens_by_modality.items())
        ]
        sections.append(Table("Hit tokens by modality", ("modality", "tokens", "share"), rows))
    sections.append(_phase_table(summary))
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
    items: dict[str, Cell] = {
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


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _phase_table(summary: Summary) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            phase.count,
            milliseconds(phase.total_ns if phase.count else None),
            milliseconds(phase.percentile(50)),
            milliseconds(phase.percentile(99)),
        )
        for name, phase in summary.phases.items()
    ]
    return Table("Phase times", ("phase", "steps", "total ms", "p50 ms", "p99 ms"), rows)


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
        "phases": {
            name: {
                "steps": phase.count,
                "total_ns": phase.total_ns if phase.count else None,
                "p50_ns": phase.percentile(50),
                "p99_ns": phase.percentile(99),
            }
            for name, phase in summary.phases.items()
        },
    }
