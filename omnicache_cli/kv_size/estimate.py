"""The whole way from a reading and options to an estimate, in one function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omnicache_cli.errors import UsageError
from omnicache_cli.kv_size.blocks import BlockSizes, block_sizes
from omnicache_cli.kv_size.groups import grouped
from omnicache_cli.kv_size.hardware import Card
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, Layer, Model
from omnicache_cli.kv_size.model import Reading
from omnicache_cli.kv_size.options import Options, Settings, resolve
from omnicache_cli.kv_size.pages import AttentionPage, Page, attention_page, mamba_page
from omnicache_cli.kv_size.pool import (
    Pool,
    blocks_held_per_request,
    blocks_per_request,
    build_pool,
    kv_cache_tokens,
    kv_cache_tokens_old,
    longest_context,
    max_concurrency,
    refusal,
)

_WORDS = {Kind.CROSS: "cross"}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Everything that a report or a what-if reads."""

    model: Model
    settings: Settings
    sizes: BlockSizes
    pages: Mapping[str, Page]
    pool: Pool

    @property
    def concurrency(self) -> float | None:
        return max_concurrency(self.pool, self.settings)

    @property
    def tokens(self) -> int | None:
        return kv_cache_tokens(self.pool, self.settings)

    @property
    def tokens_old(self) -> int | None:
        return kv_cache_tokens_old(self.pool, self.settings)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token adds once every window is full, over all stages of a rank.

        Where every layer is windowed nothing grows any more: then what it adds before that.
        """
        growing = [page for page in self._attention if not page.window or page.kind is Kind.FULL]
        return sum(map(_token_bytes, growing or self._attention))

    @property
    def bytes_per_token_naive(self) -> int:
        """Bytes of one token were every attention layer full."""
        return sum(map(_token_bytes, self._attention))

    @property
    def _attention(self) -> list[AttentionPage]:
        return [
            page
            for page in self.pages.values()
            if isinstance(page, AttentionPage) and page.kind is not Kind.CROSS
        ]

    def reserved_blocks(self, length: int) -> int:
        return blocks_per_request(self.pool.groups, self.settings, length)

    def held_blocks(self, length: int) -> int:
        return blocks_held_per_request(self.pool.groups, self.settings, length)

    def refusal(self) -> str | None:
        return refusal(self.pool, self.settings)

    def longest_context(self, limit: int) -> int | None:
        """Tokens of the longest request that fits on every worker; None without memory."""
        lengths = [
            longest_context(worker, self.settings, limit)
            for worker in self.pool.workers
            if worker.available_bytes is not None and worker.groups
        ]
        return min(lengths) if lengths else None


def estimate(
    reading: Reading,
    options: Options,
    available: Sequence[int] | None = None,
    card: Card | None = None,
    draft: Sequence[Layer] = (),
) -> Estimate:
    """`available` is bytes per worker, or one figure for all; `draft` are a drafter's layers."""
    settings = resolve(options, reading.model, reading.config, reading.text, card)
    return account(reading.model, settings, available, draft)


def account(
    model: Model,
    settings: Settings,
    available: Sequence[int] | None = None,
    draft: Sequence[Layer] = (),
) -> Estimate:
    """layers -> pages -> groups -> pool, for settings that are already resolved."""
    sizes = block_sizes(model, settings)
    pages = layer_pages((*model.layers, *draft), settings, sizes)
    groups = grouped(pages, settings)
    stages = stage_layers(pages, (*model.layers, *draft), model.num_hidden_layers, settings)
    if available is not None and len(available) not in (1, len(stages)):
        raise UsageError(
            f"--available-kv-memory is given {len(available)} times for {len(stages)} pipeline "
            "stages; give it once, or once for each stage"
        )
    pool = build_pool(groups, stages, available, settings.num_gpu_blocks_override)
    return Estimate(model, settings, sizes, pages, pool)


def layer_pages(layers: Sequence[Layer], settings: Settings, sizes: BlockSizes) -> dict[str, Page]:
    """Pages by layer name, in vLLM's order of registration."""
    pages: dict[str, Page] = {}
    for layer in layers:
        page: Page
        if isinstance(layer, AttentionLayer):
            page = attention_page(layer, settings, sizes.attention, sizes.skipped_page_padded)
            word = "indexer" if layer.is_indexer else _WORDS.get(layer.kind, "attn")
        else:
            page = mamba_page(layer, settings, sizes.mamba, sizes.mamba_page_padded)
            word = "mamba"
        pages[_free_name(f"layers.{layer.index}.{word}", pages)] = page
    return pages


def stage_layers(
    pages: Mapping[str, Page], layers: Sequence[Layer], count: int, settings: Settings
) -> list[list[str]]:
    """Layer names per pipeline stage; a drafter's layers are on the last one."""
    size = settings.pipeline_parallel_size
    stages: list[list[str]] = [[] for _ in range(size)]
    bounds = pipeline_bounds(count, size)
    for name, layer in zip(pages, layers, strict=True):
        rank = next(
            (rank for rank, (start, end) in enumerate(bounds) if start <= layer.index < end),
            size - 1,
        )
        stages[rank].append(name)
    return stages


def pipeline_bounds(count: int, size: int) -> list[tuple[int, int]]:
    """get_pp_indices (distributed/utils.py): the first and last stages get the fewer layers."""
    parts = [count // size] * size
    for index in range(2, count % size + 2):
        parts[-index] += 1
    starts = [sum(parts[:rank]) for rank in range(size)]
    return [(start, start + part) for start, part in zip(starts, parts, strict=True)]


def _token_bytes(page: AttentionPage) -> int:
    return page.unpadded_page_bytes // page.block_size


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}.{number}"
    return free


def with_memory(found: Estimate, available: Sequence[int]) -> Estimate:
    """The same model and settings with another amount of memory."""
    pool = build_pool(
        found.pool.groups,
        [
            [name for group in worker.groups for name in group.pages]
            for worker in found.pool.workers
        ],
        available,
        found.settings.num_gpu_blocks_override,
    )
    return replace(found, pool=pool)
