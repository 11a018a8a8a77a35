"""Sections that the command adds to an estimate on demand: memory, items, host memory, what-ifs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from omnicache_cli.kv_size.estimate import Estimate
from omnicache_cli.kv_size.hardware import GIB
from omnicache_cli.kv_size.memory import Budget, Interval
from omnicache_cli.kv_size.modalities import ItemTokens
from omnicache_cli.kv_size.omni_cache import KeyMemory
from omnicache_cli.kv_size.startup_log import Finding, StartupLog
from omnicache_cli.kv_size.sweep import Point, bars
from omnicache_cli.kv_size.whatif import LABEL, Share
from omnicache_cli.report.model import Cell, Facts, Lines, Section, Table

Answer = tuple[list[Section], dict[str, Any]]
"""Sections for people, and what joins the JSON result."""


class Capacity(NamedTuple):
    """What a pool holds; None where it is unknown."""

    num_blocks: int | None
    tokens: int | None
    concurrency: float | None


def memory_answer(budget: Budget, low: Capacity, high: Capacity) -> Answer:
    """`low` and `high` are the pools at the two ends of the memory interval."""
    columns = ("part", "GiB, least", "GiB, most", "source")
    rows: list[tuple[Cell, ...]] = [
        ("card", _gib(budget.card.bytes), _gib(budget.card.bytes), budget.card.source),
        (
            f"requested, utilization {budget.utilization:g}",
            _gib(budget.requested_bytes),
            _gib(budget.requested_bytes),
            "request_memory: the card's memory times the utilization",
        ),
    ]
    rows += [
        (name, _gib(one.low), _gib(one.high), one.source) for name, one in budget.parts.items()
    ]
    left = budget.available
    source = "what is left" if left.low >= 0 else "what is left; below zero that much is missing"
    rows.append(("KV cache", _gib(left.low), _gib(left.high), source))
    facts: dict[str, Cell] = {
        "number of blocks, from": low.num_blocks,
        "number of blocks, to": high.num_blocks,
        "KV cache size, tokens, from": low.tokens,
        "KV cache size, tokens, to": high.tokens,
    }
    result = {
        "memory": {
            "card_bytes": budget.card.bytes,
            "card_source": budget.card.source,
            "gpu_memory_utilization": budget.utilization,
            "requested_bytes": budget.requested_bytes,
            "parts": {name: _interval(one) for name, one in budget.parts.items()},
            "available_bytes": [budget.available.low, budget.available.high],
            "num_blocks": [low.num_blocks, high.num_blocks],
            "kv_cache_tokens": [low.tokens, high.tokens],
            "max_concurrency": [low.concurrency, high.concurrency],
        }
    }
    title = "Memory of a GPU (figures above are for the least)"
    return [Table(title, columns, rows), Facts("", facts)], result


def items_answer(items: Sequence[ItemTokens], found: Estimate) -> Answer:
    columns = ("item", "tokens", "fit", "source")
    rows: list[tuple[Cell, ...]] = []
    plain = []
    for one in items:
        fit = None
        if one.tokens and found.tokens is not None:
            fit = found.tokens // one.tokens
        rows.append((f"{one.item.modality} {one.item.text}", one.tokens, fit, one.source))
        plain.append(
            {
                "modality": one.item.modality,
                "item": one.item.text,
                "tokens": one.tokens,
                "fit": fit,
                "source": one.source,
            }
        )
    return [Table("Items, and how many of each fit into the cache", columns, rows)], {
        "items": plain
    }


def host_answer(memory: Sequence[KeyMemory]) -> Answer:
    columns = ("key", "width", "dtype", "pool, GiB", "status, GiB", "pinned staging, GiB")
    rows: list[tuple[Cell, ...]] = [
        (
            one.key.name,
            one.key.width,
            one.key.dtype,
            _gib(one.pool_bytes),
            _gib(one.status_bytes),
            _gib(one.staging_bytes),
        )
        for one in memory
    ]
    total = sum(one.total_bytes for one in memory)
    title = (
        f"Host memory of the Omni tensor prefix cache: {total / GIB:.2f} GiB, slots x width x bytes"
    )
    keys = [
        {
            "key": one.key.name,
            "width": one.key.width,
            "dtype": one.key.dtype,
            "pool_bytes": one.pool_bytes,
            "status_bytes": one.status_bytes,
            "staging_bytes": one.staging_bytes,
        }
        for one in memory
    ]
    return [Table(title, columns, rows)], {"tensor_cache": {"bytes": total, "keys": keys}}


def whatif_answer(shares: Sequence[Share]) -> Answer:
    columns = ("modality", "share", "kept", "tokens", "items")
    rows: list[tuple[Cell, ...]] = [
        (one.modality, f"{one.share:g}", f"{one.kept:g}", one.tokens, one.items) for one in shares
    ]
    plain = [
        {
            "modality": one.modality,
            "share": one.share,
            "kept": one.kept,
            "tokens": one.tokens,
            "items": one.items,
        }
        for one in shares
    ]
    return [Table(LABEL, columns, rows)], {"what_if": {"label": LABEL, "shares": plain}}


def sweep_answer(name: str, points: Sequence[Point]) -> Answer:
    """tokens(value) as a table and as bars; without memory the blocks that a request reserves."""
    has_memory = any(point.found.tokens is not None for point in points)
    columns = (name, "blocks", "tokens", "concurrency", "blocks per request", "GiB per request")
    rows: list[tuple[Cell, ...]] = []
    plain = []
    for point in points:
        found = point.found
        length = found.settings.max_model_len
        reserved = found.reserved_blocks(length)
        size = reserved * sum(worker.bytes_per_block for worker in found.pool.workers)
        concurrency = None if found.concurrency is None else f"{found.concurrency:.2f}x"
        rows.append(
            (point.value, found.pool.num_blocks, found.tokens, concurrency, reserved, _gib(size))
        )
        plain.append(
            {
                name: point.value,
                "num_blocks": found.pool.num_blocks,
                "kv_cache_tokens": found.tokens,
                "max_concurrency": found.concurrency,
                "blocks_per_request": reserved,
                "bytes_per_request": size,
            }
        )
    values = [row[2] if has_memory else row[4] for row in rows]
    lines = bars(
        [f"{point.value:,}" for point in points],
        [value if isinstance(value, int) else None for value in values],
    )
    what = "KV cache size in tokens" if has_memory else "blocks per request"
    sections: list[Section] = [
        Table(f"Sweep of {name}", columns, rows),
        Lines(f"{what} over {name}", lines),
    ]
    return sections, {"sweep": {"name": name, "points": plain}}


def log_answer(log: StartupLog, findings: Sequence[Finding], taken: Sequence[str]) -> Answer:
    columns = ("quantity", "printed", "estimated", "verdict")
    rows: list[tuple[Cell, ...]] = [
        (one.name, one.printed, one.estimated, one.verdict) for one in findings
    ]
    version = log.version or "not stated"
    title = f"Start-up log (vLLM {version}): estimate against what was printed"
    result = {
        "startup_log": {
            "vllm_version": log.version,
            "available_gib": list(log.available_gib),
            "options_from_log": list(taken),
            "findings": [
                {
                    "quantity": one.name,
                    "printed": one.printed,
                    "estimated": one.estimated,
                    "verdict": one.verdict,
                }
                for one in findings
            ],
        }
    }
    sections: list[Section] = [Table(title, columns, rows)]
    if taken:
        sections.append(Lines("", [f"options taken from the log: {', '.join(taken)}"]))
    return sections, result


def _gib(number: int) -> str:
    return f"{number / GIB:.2f}"


def _interval(one: Interval) -> dict[str, Any]:
    return {"bytes": [one.low, one.high], "source": one.source}
