"""The fast path against vLLM's own answer, and vLLM's answer as a report of its own."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from omnicache_cli.kv_size.estimate import Estimate
from omnicache_cli.kv_size.hardware import GIB
from omnicache_cli.kv_size.options import Settings
from omnicache_cli.kv_size.pool import refusal_of
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table


class ExactAnswer(Protocol):
    """What the engine room answers (engine/kv_size/accounting.py); bytes, tokens, blocks."""

    @property
    def vllm_version(self) -> str: ...
    @property
    def layers(self) -> Mapping[str, Mapping[str, Any]]: ...
    @property
    def groups(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def bytes_per_block(self) -> Sequence[int]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int | None: ...
    @property
    def kv_cache_tokens(self) -> int | None: ...
    @property
    def max_concurrency(self) -> float | None: ...
    @property
    def needed_bytes(self) -> Sequence[int]: ...
    @property
    def longest_context(self) -> int | None: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def notes(self) -> Sequence[str]: ...


def exact_refusal(
    answer: ExactAnswer, settings: Settings, available: Sequence[int] | None
) -> str | None:
    """As Estimate.refusal; `available` is bytes per worker, or one figure for all."""
    length, override = settings.max_model_len, settings.num_gpu_blocks_override
    for rank, (needed, block) in enumerate(
        zip(answer.needed_bytes, answer.bytes_per_block, strict=True)
    ):
        if override is not None:
            memory = override * block
        elif available is not None:
            memory = available[rank % len(available)]
        else:
            return None
        refused = refusal_of(memory - block, needed, length, answer.longest_context)
        if block and refused is not None:
            return refused
    return None


def compared(found: Estimate, answer: ExactAnswer) -> list[tuple[str, Any, Any]]:
    """(quantity, fast, exact) of everything that both paths count."""
    length = found.settings.max_model_len
    fast_groups = sorted(
        (
            group.kind.value,
            len(group.pages),
            group.block_size,
            group.first.page_bytes,
            group.reserved(found.settings, length),
        )
        for group in found.pool.groups
    )
    exact_groups = sorted(
        (
            group["kind"],
            group["layers"],
            group["block_size"],
            group["page_bytes"],
            group["blocks_per_request"],
        )
        for group in answer.groups
    )
    needed = [
        worker.bytes_per_block
        * sum(group.reserved(found.settings, length) for group in worker.groups)
        for worker in found.pool.workers
    ]
    return [
        ("caching layers", len(found.pages), len(answer.layers)),
        (
            "page bytes of all layers",
            sum(page.page_bytes for page in found.pages.values()),
            sum(layer["page_bytes"] for layer in answer.layers.values()),
        ),
        ("attention block, tokens", found.sizes.attention, answer.block_size),
        ("groups", fast_groups, exact_groups),
        (
            "bytes per block, per worker",
            [worker.bytes_per_block for worker in found.pool.workers],
            list(answer.bytes_per_block),
        ),
        ("bytes that a request needs, per worker", needed, list(answer.needed_bytes)),
        ("number of blocks", found.pool.num_blocks, answer.num_blocks),
        ("KV cache size, tokens", found.tokens, answer.kv_cache_tokens),
        ("maximum concurrency", found.concurrency, answer.max_concurrency),
        ("longest context, tokens", found.longest_context(length), answer.longest_context),
    ]


def check_sections(
    found: Estimate, answer: ExactAnswer
) -> tuple[list[Section], dict[str, Any], bool]:
    """The comparison as sections and as JSON, and whether both paths agree."""
    rows = compared(found, answer)
    different = [name for name, fast, exact in rows if fast != exact]
    word = "agree" if not different else f"differ in: {', '.join(different)}"
    sections: list[Section] = [
        Table(
            f"Fast path against vLLM {answer.vllm_version}: they {word}",
            ("quantity", "fast", "vLLM", "same"),
            [(name, _cell(fast), _cell(exact), fast == exact) for name, fast, exact in rows],
        )
    ]
    result = {
        "check": {
            "vllm_version": answer.vllm_version,
            "equal": not different,
            "rows": [
                {"quantity": name, "fast": fast, "exact": exact, "equal": fast == exact}
                for name, fast, exact in rows
            ],
            "weight_bytes": answer.weight_bytes,
            "notes": list(answer.notes),
        }
    }
    return sections, result, not different


def exact_report(
    model: str,
    settings: Settings,
    answer: ExactAnswer,
    more: tuple[Sequence[Section], Mapping[str, Any]],
    refused: str | None = None,
) -> Report:
    """vLLM's own answer; the names in JSON are the fast path's. `more` joins both."""
    growing = [
        layer
        for layer in answer.layers.values()
        if layer["kind"] not in ("mamba", "cross_attention")
    ]
    full = [layer for layer in growing if "sliding" not in layer["kind"]] or growing
    token = sum(layer["page_bytes"] // layer["block_size"] for layer in full)
    blocks = answer.num_blocks
    old = None
    if blocks is not None and answer.groups:
        smallest = min(group["block_size"] for group in answer.groups)
        old = blocks // len(answer.groups) * smallest * settings.decode_context_parallel_size
    weights = answer.weight_bytes
    facts: dict[str, Cell] = {
        "model": model,
        "caching layers": len(answer.layers),
        "block size, tokens": answer.block_size,
        "bytes per token": token,
        "bytes per block": max(answer.bytes_per_block, default=0),
        "number of blocks": blocks,
        "KV cache size, tokens (vLLM 0.20.2 and later)": answer.kv_cache_tokens,
        "KV cache size, tokens (up to vLLM 0.20.0)": old,
        f"maximum concurrency at {settings.max_model_len:,} tokens": answer.max_concurrency,
        "longest context that fits, tokens": answer.longest_context,
        "weights of the first stage, GiB": f"{weights / GIB:.2f}",
    }
    columns = ("kind", "layers", "block, tokens", "page, bytes", "blocks at start")
    names = ("kind", "layers", "block_size", "page_bytes", "blocks_per_request")
    sections: list[Section] = [
        Facts("", facts),
        Table("Groups", columns, [tuple(group[name] for name in names) for group in answer.groups]),
        *more[0],
    ]
    if refused is not None:
        sections.insert(1, Lines("Warnings", [f"vLLM refuses: {refused}"]))
    if answer.notes:
        sections.append(Lines("Notes", list(dict.fromkeys(answer.notes))))
    result = {
        "path": "exact",
        "model": model,
        "num_blocks": blocks,
        "kv_cache_tokens": answer.kv_cache_tokens,
        "kv_cache_tokens_old": old,
        "max_concurrency": answer.max_concurrency,
        "bytes_per_token": token,
        "bytes_per_block": max(answer.bytes_per_block, default=0),
        "block_size": answer.block_size,
        "longest_context": answer.longest_context,
        "fits": None if blocks is None else refused is None,
        "refusal": refused,
        "groups": [dict(group) for group in answer.groups],
        "needed_bytes": list(answer.needed_bytes),
        "weight_bytes": weights,
        "notes": list(dict.fromkeys(answer.notes)),
        "settings": settings.as_json(),
        "sources": dict(settings.sources),
        **more[1],
    }
    title = f"KV cache counted by vLLM {answer.vllm_version}'s own code on the meta device"
    return Report("kv-size", title, result, tuple(sections), answer.vllm_version)


def _cell(value: Any) -> Cell:
    if isinstance(value, list):
        return ", ".join(
            " ".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value
        )
    return f"{value:.4f}" if isinstance(value, float) else value
