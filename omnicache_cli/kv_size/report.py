"""An estimate as a Report: what people read and what scripts read, the same facts."""

from collections.abc import Sequence
from typing import Any

from omnicache_cli.kv_size import MIRRORED_VLLM
from omnicache_cli.kv_size.estimate import Estimate
from omnicache_cli.kv_size.groups import Group
from omnicache_cli.kv_size.hardware import GIB
from omnicache_cli.kv_size.model import Reading
from omnicache_cli.kv_size.pages import AttentionPage, MambaPage, Page
from omnicache_cli.kv_size.request_bytes import RequestBytes, request_bytes
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table

OLD_DEFINITION = "KV cache size, tokens (up to vLLM 0.20.0)"
NEW_DEFINITION = "KV cache size, tokens (vLLM 0.20.2 and later)"


def estimate_report(
    reading: Reading,
    found: Estimate,
    length: int,
    more: Sequence[Section] = (),
    result: dict[str, Any] | None = None,
    warnings: Sequence[str] = (),
) -> Report:
    """`length` is the request whose blocks and bytes are shown; `more` follows the tables."""
    request = request_bytes(found, length)
    refused = found.refusal()
    lines = [*found.model.notes, *warnings, *([f"vLLM refuses: {refused}"] if refused else [])]
    sections: list[Section] = [
        Facts("", _facts(reading, found, request)),
        Table("Groups (layers that share a block table)", *_group_table(found, length)),
        Facts(f"A request of {length:,} tokens", _request_facts(found, request)),
        *more,
    ]
    if lines:
        sections.insert(1, Lines("Warnings", lines))
    return Report(
        "kv-size",
        f"KV cache of {found.model.architecture}, counted as vLLM {MIRRORED_VLLM} counts",
        {**_result(reading, found, request, refused), "warnings": lines, **(result or {})},
        tuple(sections),
    )


def _facts(reading: Reading, found: Estimate, request: RequestBytes) -> dict[str, Cell]:
    settings, pool = found.settings, found.pool
    longest = found.longest_context(longest_limit(found))
    layers = f"{len(found.pages)} caching layers of {found.model.num_hidden_layers}"
    if found.model.num_shared_layers:
        layers += f"; {found.model.num_shared_layers} reuse another layer's cache"
    return {
        "model": str(reading.source.path),
        "layers": layers,
        "fields from": "config.json"
        if reading.defaults is None
        else f"config.json and {reading.defaults} (for {reading.asked_for})",
        "KV cache dtype": settings.dtype
        if settings.kv_cache_dtype == "auto"
        else settings.kv_cache_dtype,
        "block size, tokens": found.sizes.attention,
        "bytes per token": found.bytes_per_token,
        "bytes per block": pool.bytes_per_block,
        "KV cache memory, GiB": memory_text(found),
        "number of blocks": pool.num_blocks,
        NEW_DEFINITION: found.tokens,
        OLD_DEFINITION: found.tokens_old,
        f"maximum concurrency at {settings.max_model_len:,} tokens": _two(found.concurrency),
        "longest context that fits, tokens": longest,
    }


def longest_limit(found: Estimate) -> int:
    """Up to where the longest context is searched: the model's own limit, or what is asked."""
    return found.settings.derived_max_model_len or found.settings.max_model_len


def memory_text(found: Estimate) -> str | None:
    amounts = [worker.available_bytes for worker in found.pool.workers]
    if None in amounts:
        return None
    parts = [f"{(amount or 0) / GIB:.2f}" for amount in amounts]
    return parts[0] if len(set(parts)) == 1 else ", ".join(parts)


def _two(number: float | None) -> Cell:
    return None if number is None else f"{number:.2f}x"


def _group_table(found: Estimate, length: int) -> tuple[tuple[str, ...], list[tuple[Cell, ...]]]:
    columns = (
        *("kind", "layers", "window", "block, tokens", "page, bytes"),
        *("padding, bytes", "empty layers", "blocks at start", "blocks held"),
    )
    widest = max(len(group.pages) for group in found.pool.groups) if found.pool.groups else 0
    rows: list[tuple[Cell, ...]] = []
    for group in found.pool.groups:
        page = group.first
        rows.append(
            (
                group.kind.value,
                len(group.pages),
                page.window if isinstance(page, AttentionPage) else None,
                group.block_size,
                page.page_bytes if not group.is_mixed else group.bytes_per_block,
                page.page_bytes - page.unpadded_page_bytes,
                0 if group.is_mixed else widest - len(group.pages),
                group.reserved(found.settings, length),
                group.held(found.settings, length),
            )
        )
    return columns, rows


def _request_facts(found: Estimate, request: RequestBytes) -> dict[str, Cell]:
    settings = found.settings
    flags = (
        f"max_num_batched_tokens {settings.max_num_batched_tokens:,} x "
        f"{settings.max_concurrent_batches} batches in flight"
    )
    return {
        "blocks reserved at start-up": request.reserved_blocks,
        "GiB reserved at start-up": f"{request.reserved_bytes / GIB:.4f}",
        "blocks held while decoding": request.held_blocks,
        "GiB held while decoding": f"{request.held_bytes / GIB:.4f}",
        "of that needed, GiB": f"{request.ideal_bytes / GIB:.4f}",
        "were every layer full, GiB": f"{request.naive_bytes / GIB:.4f}",
        "the reservation hangs on": flags
        + f", prefix caching {'on' if settings.enable_prefix_caching else 'off'}"
        + (
            f", mamba cache mode {settings.mamba_cache_mode}"
            if any(isinstance(page, MambaPage) for page in found.pages.values())
            else ""
        ),
    }


def tensor_shape(page: Page, num_blocks: int | None) -> list[Any]:
    """One layer's cache as vLLM's attention kernels see it; states are listed one by one."""
    blocks: Any = "num_blocks" if num_blocks is None else num_blocks
    if isinstance(page, MambaPage):
        return [[blocks, *shape] for shape in page.shapes]
    if page.state_content_bytes is not None:
        return [
            blocks,
            page.num_head_slots or page.num_kv_heads,
            page.block_size,
            page.state_content_bytes,
        ]
    if page.head_size_v == 0:
        return [blocks, page.block_size, page.head_size]
    if page.head_size_v != page.head_size:
        return [blocks, page.block_size, page.num_kv_heads, page.head_size + page.head_size_v]
    return [2, blocks, page.block_size, page.num_kv_heads, page.head_size]


def _result(
    reading: Reading, found: Estimate, request: RequestBytes, refused: str | None
) -> dict[str, Any]:
    settings, pool = found.settings, found.pool
    return {
        "mirrors_vllm": MIRRORED_VLLM,
        "path": "fast",
        "model": str(reading.source.path),
        "architecture": found.model.architecture,
        "stage": reading.source.stage,
        "fields_from": reading.defaults or "config.json",
        "num_blocks": pool.num_blocks,
        "kv_cache_tokens": found.tokens,
        "kv_cache_tokens_old": found.tokens_old,
        "max_concurrency": found.concurrency,
        "bytes_per_token": found.bytes_per_token,
        "bytes_per_token_naive": found.bytes_per_token_naive,
        "bytes_per_block": pool.bytes_per_block,
        "block_size": found.sizes.attention,
        "longest_context": found.longest_context(longest_limit(found)),
        "fits": None if pool.num_blocks is None else refused is None,
        "refusal": refused,
        "groups": [_group_result(found, group, request.length) for group in pool.groups],
        "workers": [
            {
                "available_bytes": worker.available_bytes,
                "bytes_per_block": worker.bytes_per_block,
                "num_blocks": worker.num_blocks,
                "layers": sum(len(group.pages) for group in worker.groups),
            }
            for worker in pool.workers
        ],
        "request": {
            "length": request.length,
            "blocks_reserved": request.reserved_blocks,
            "bytes_reserved": request.reserved_bytes,
            "bytes_reserved_without_group_padding": request.summed_bytes,
            "blocks_held": request.held_blocks,
            "bytes_held": request.held_bytes,
            "bytes_ideal": request.ideal_bytes,
            "bytes_naive": request.naive_bytes,
            "state_bytes": request.state_bytes,
        },
        "settings": settings.as_json(),
        "sources": dict(settings.sources),
    }


def _group_result(found: Estimate, group: Group, length: int) -> dict[str, Any]:
    page = group.first
    return {
        "kind": group.kind.value,
        "layers": len(group.pages),
        "block_size": group.block_size,
        "page_bytes": page.page_bytes,
        "padding_bytes": page.page_bytes - page.unpadded_page_bytes,
        "window": page.window if isinstance(page, AttentionPage) else None,
        "blocks_reserved": group.reserved(found.settings, length),
        "blocks_held": group.held(found.settings, length),
        "tensor_shape": tensor_shape(page, found.pool.num_blocks),
        "dtype": list(page.dtypes) if isinstance(page, MambaPage) else page.dtype,
        "layer_names": list(group.pages),
    }
