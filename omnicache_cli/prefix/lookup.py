"""vLLM 0.30's prefix lookup as a pure function of what is in the cache.

`find_hit` follows `find_longest_cache_hit` of vLLM's coordinators and managers, so that the same
question can be asked of a cache that was different: with evicted blocks back in it, without the
rule of the last token, with one group left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from omnicache_cli.trace.records import CacheGroup, EngineSource

Kind = Literal["full", "window", "state"]

FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "RSWASpec", "SinkFullAttentionSpec"})
WINDOW = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
STATE = frozenset({"MambaSpec"})

Has = Callable[[int, int], bool]
"""(KV cache group, entry of the request's block hashes) -> the group has that block."""


@dataclass(frozen=True, slots=True)
class SpecGroup:
    """KV cache groups of one spec: vLLM looks them up together."""

    numbers: tuple[int, ...]
    kind: Kind
    spec: str
    block_size: int  # tokens, over all ranks of decode context parallelism
    window: int | None
    drops_block: bool  # EAGLE/MTP: the last matched unit is computed again


@dataclass(frozen=True, slots=True)
class Layout:
    """What a lookup depends on besides the cache."""

    groups: tuple[SpecGroup, ...]  # full attention first
    hash_block_size: int  # tokens under one block hash
    unit: int  # every hit is a multiple, tokens
    num_groups: int  # of the engine, those without a prefix cache included

    @property
    def drops_block(self) -> bool:
        return any(group.drops_block for group in self.groups)


@dataclass(frozen=True, slots=True)
class Query:
    """One request's lookup, or a variant of it."""

    has: Has
    num_hashes: int
    max_tokens: int  # of the hit; vLLM: the request's tokens without the last
    drop_block: bool = True  # False: as if there were no speculative decoding


def effective(engine: EngineSource) -> EngineSource:
    """Block sizes as the managers see them: decode context parallelism shards full attention."""
    ranks = engine.parallel.get("decode_context_parallel_size", 1)
    if ranks <= 1:
        return engine
    groups = [
        replace(group, block_size=group.block_size * ranks) if group.spec in FULL else group
        for group in engine.groups
    ]
    return replace(engine, groups=groups)


def layout_of(engine: EngineSource) -> Layout | None:
    """None: the cache is off, or a group's kind has a lookup that is not known here."""
    unit = engine.cache_hit_alignment_tokens
    if unit is None:
        unit = engine.block_size
    merged: dict[tuple[object, ...], list[int]] = {}
    groups: list[SpecGroup] = []
    for number, group in enumerate(engine.groups):
        if group.prefix_cacheable or len(engine.groups) == 1:
            merged.setdefault(_spec_of(group), []).append(number)
    for numbers in merged.values():
        group = engine.groups[numbers[0]]
        kind = kind_of(group)
        if kind is None:
            return None
        drops = any(engine.groups[number].is_eagle_group for number in numbers)
        groups.append(
            SpecGroup(
                tuple(numbers), kind, group.spec, group.block_size, group.sliding_window, drops
            )
        )
    if not groups or not engine.enable_prefix_caching:
        return None
    groups.sort(key=lambda one: one.kind != "full")
    return Layout(tuple(groups), engine.hash_block_size, unit, len(engine.groups))


def _spec_of(group: CacheGroup) -> tuple[object, ...]:
    """What groups of one spec have in common."""
    return (
        *(group.spec, group.block_size, group.page_size_bytes, group.sliding_window),
        *(group.num_kv_heads, group.head_size, group.dtype),
    )


def kind_of(group: CacheGroup) -> Kind | None:
    if group.spec in FULL:
        return "full"
    if group.spec in WINDOW and group.sliding_window is not None:
        return "window"
    return "state" if group.spec in STATE else None


def find_hit(layout: Layout, query: Query) -> int:
    """Tokens that vLLM would take from the cache."""
    if layout.num_groups == 1:
        (only,) = layout.groups
        return group_hit(layout, only, query, query.max_tokens, only.drops_block)
    hit = query.max_tokens
    answers: list[int | None] = [None] * len(layout.groups)
    simple = len(layout.groups) == 2 and layout.groups[0].kind == "full"
    dropped: set[int] = set()  # groups whose drop is verified at this length
    while True:
        current = hit
        for index, group in enumerate(layout.groups):
            before = answers[index]
            if group.kind == "full" and before is not None:
                current = min(current, before)
                continue
            drop = group.drops_block and index not in dropped
            longest = current
            if drop and query.drop_block and group.kind != "state":
                fine = layout.unit < group.block_size and group.kind == "full"
                margin = layout.unit if fine else group.block_size
                longest = min(current + margin, query.max_tokens)
            answer = group_hit(layout, group, query, longest, drop)
            if drop:
                dropped.add(index)
            elif answer < current:
                dropped.clear()
            current = answers[index] = answer
        if current >= hit:
            return hit
        hit = current
        if simple:
            return hit


def own_hits(layout: Layout, query: Query) -> list[int]:
    """Each KV cache group's answer by itself; 0 where it takes no part."""
    hits = [0] * layout.num_groups
    for group in layout.groups:
        answer = group_hit(layout, group, query, query.max_tokens, group.drops_block)
        for number in group.numbers:
            hits[number] = answer
    return hits


def group_hit(layout: Layout, group: SpecGroup, query: Query, max_tokens: int, drop: bool) -> int:
    """The longest hit of one group that is no longer than `max_tokens`."""
    drop = drop and query.drop_block
    finder = {"full": _full_hit, "window": _window_hit, "state": _state_hit}[group.kind]
    return finder(layout, group, query, max_tokens, drop)


def entry_of(layout: Layout, group: SpecGroup, block: int) -> int:
    """The hash entry that stands for a full block, by its index in the group's table."""
    return (block + 1) * group.block_size // layout.hash_block_size - 1


def _has(layout: Layout, group: SpecGroup, query: Query, block: int) -> bool:
    entry = entry_of(layout, group, block)
    return entry < query.num_hashes and all(query.has(one, entry) for one in group.numbers)


def _has_entry(group: SpecGroup, query: Query, entry: int) -> bool:
    return all(query.has(number, entry) for number in group.numbers)


def _is_fine(layout: Layout, group: SpecGroup) -> bool:
    """Hits may end inside a block of the group."""
    return layout.unit < group.block_size and group.block_size % layout.unit == 0


def _full_hit(layout: Layout, group: SpecGroup, query: Query, max_tokens: int, drop: bool) -> int:
    size, unit = group.block_size, layout.unit
    blocks = 0
    while blocks < max_tokens // size and _has(layout, group, query, blocks):
        blocks += 1
    hit = blocks * size
    if _is_fine(layout, group):
        first = blocks * (size // unit)
        last = min(first + size // unit - 1, max_tokens // unit, query.num_hashes)
        for entry in range(last - 1, first - 1, -1):
            if _has_entry(group, query, entry):
                hit = (entry + 1) * unit
                break
    if drop and hit:
        hit -= min(unit, size)
    return hit - hit % unit


def _window_hit(layout: Layout, group: SpecGroup, query: Query, max_tokens: int, drop: bool) -> int:
    size, unit = group.block_size, layout.unit
    needed = blocks_in_window(group, drop)
    row = 0  # contiguous blocks, from right to left
    length = None
    for block in range(max_tokens // size - 1, -1, -1):
        if not _has(layout, group, query, block):
            row = 0
            continue
        end = block if drop else block + 1
        if row == 0 and end * size % unit:
            continue
        row += 1
        if row >= needed:
            length = block + row
            break
    if length is None:
        length = _aligned(row, size, unit)
    if drop and length:
        length = _aligned(length - 1, size, unit)
    return length * size


def _state_hit(layout: Layout, group: SpecGroup, query: Query, max_tokens: int, drop: bool) -> int:
    del drop  # draft models have no states
    size, unit = group.block_size, layout.unit
    if _is_fine(layout, group):
        for entry in range(min(max_tokens // unit, query.num_hashes) - 1, -1, -1):
            if _has_entry(group, query, entry):
                return (entry + 1) * unit
        return 0
    for block in range(max_tokens // size - 1, -1, -1):
        if (block + 1) * size % unit == 0 and _has(layout, group, query, block):
            return (block + 1) * size
    return 0


def blocks_in_window(group: SpecGroup, drop: bool) -> int:
    """Contiguous blocks that a hit in a sliding window needs."""
    return -(-((group.window or 1) - 1) // group.block_size) + drop


def _aligned(blocks: int, size: int, unit: int) -> int:
    while blocks * size % unit:
        blocks -= 1
    return blocks
