"""How vLLM puts layers into groups that share a block table. Mirrors get_kv_cache_groups and what
it calls (v1/core/kv_cache_utils.py), for layer-outermost layouts such as the default LBNHC.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omnicache_cli.errors import BadInputError
from omnicache_cli.kv_size.layers import Kind
from omnicache_cli.kv_size.options import Settings
from omnicache_cli.kv_size.pages import AttentionPage, MambaPage, Page
from omnicache_cli.kv_size.requests import blocks_held, blocks_reserved

FULL_KINDS = frozenset({Kind.FULL, Kind.MLA})
"""FullAttentionSpec and its subclasses: one base type for grouping."""

NOT_PADDED = frozenset({Kind.MLA})
LITTLE_MORE = 1.5
"""The factor up to which smaller groups are padded to the largest type's layer count."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table. Pages differ only where all have one type (`is_mixed`)."""

    pages: Mapping[str, Page]  # by layer name
    is_mixed: bool = False

    @property
    def first(self) -> Page:
        return next(iter(self.pages.values()))

    @property
    def kind(self) -> Kind:
        return self.first.kind

    @property
    def block_size(self) -> int:
        return self.first.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block of this group takes over its layers, without group padding."""
        return sum(page.page_bytes for page in self.pages.values())

    def reserved(self, settings: Settings, length: int) -> int:
        """Blocks a request reserves: UniformTypeKVCacheSpecs.max_memory_usage_pages for mixed."""
        return max(blocks_reserved(page, settings, length) for page in set(self.pages.values()))

    def held(self, settings: Settings, length: int) -> int:
        return max(blocks_held(page, settings, length) for page in set(self.pages.values()))

    def on(self, names: Sequence[str]) -> "Group":
        """_project_kv_cache_groups_to_worker."""
        wanted = set(names)
        kept = {name: page for name, page in self.pages.items() if name in wanted}
        return Group(kept, self.is_mixed)


def grouped(pages: Mapping[str, Page], settings: Settings) -> list[Group]:
    """get_kv_cache_groups. BadInputError: vLLM itself cannot put these layers side by side."""
    pages = dict(pages)
    if not pages:
        return []
    if settings.disable_hybrid_kv_cache_manager:
        pages = _all_full(pages)
    if is_uniform(list(pages.values())):
        return [Group(pages)]
    if is_one_type(list(pages.values())):
        return [Group(pages, is_mixed=True)]
    try:
        pages = _one_page_size(pages)
    except _CannotUnify as error:
        promoted = _promoted_beside_mla(pages)
        if promoted is None:
            raise BadInputError(f"{error}; vLLM refuses this model too") from None
        return [Group(promoted, is_mixed=True)]
    return _uniform_page_size_groups(pages)


def is_uniform(pages: Sequence[Page]) -> bool:
    """is_kv_cache_spec_uniform: pages that differ at most in what their merge reconciles."""
    return len({_merge_key(page) for page in pages}) == 1


def is_one_type(pages: Sequence[Page]) -> bool:
    """UniformTypeKVCacheSpecs.is_uniform_type: one block size, one way of taking slots."""
    return len({page.block_size for page in pages}) == 1 and (
        len({_type_key(page) for page in pages}) == 1
    )


def _merge_key(page: Page) -> object:
    """What FullAttentionSpec.merge and MLAAttentionSpec.merge leave free: windows."""
    if isinstance(page, AttentionPage) and page.kind in FULL_KINDS:
        return replace(page, window=None)
    return page


def _type_key(page: Page) -> object:
    """is_uniform_with_collection of each spec."""
    if isinstance(page, MambaPage):
        return (page.kind, page.num_speculative_blocks, page.page_bytes)
    if page.kind in FULL_KINDS:
        return Kind.FULL
    if page.kind in (Kind.SLIDING, Kind.CHUNKED):
        return (page.kind, page.window)
    return page.kind


class _CannotUnify(Exception):
    pass


def _one_page_size(pages: dict[str, Page]) -> dict[str, Page]:
    """unify_kv_cache_spec_page_size: larger blocks, or padding, until all pages are equal."""
    largest = max(page.page_bytes for page in pages.values())
    unified: dict[str, Page] = {}
    for name, page in pages.items():
        own = page.page_bytes
        if own == largest:
            unified[name] = page
        elif isinstance(page, MambaPage):
            unified[name] = replace(page, page_size_padded=largest)
        elif largest % own == 0 and page.page_size_padded is not None:
            raise BadInputError(
                f"layer {name} has a page padded to {own:,} bytes beside pages of {largest:,}; "
                "vLLM fails on this too: name other --kv-cache-dtype-skip-layers"
            )
        elif largest % own == 0:
            unified[name] = replace(page, block_size=page.block_size * (largest // own))
        elif page.kind not in NOT_PADDED:
            unified[name] = replace(page, page_size_padded=largest)
        else:
            raise _CannotUnify(
                f"layer {name} has a page of {own} bytes, which neither divides the largest page "
                f"of {largest} bytes nor can be padded to it"
            )
    return unified


def _uniform_page_size_groups(pages: dict[str, Page]) -> list[Group]:
    """_get_kv_cache_groups_uniform_page_size: groups of about as many layers each."""
    buckets: list[dict[str, Page]] = []
    for name, page in pages.items():
        for bucket in buckets:
            if is_uniform([next(iter(bucket.values())), page]):
                bucket[name] = page
                break
        else:
            buckets.append({name: page})
    smallest = min(len(bucket) for bucket in buckets)
    largest = max(len(bucket) for bucket in buckets)
    size = largest if largest < smallest * LITTLE_MORE else smallest
    groups = []
    for bucket in buckets:
        names = list(bucket)
        count = -(-len(names) // size)
        groups += [
            Group({name: bucket[name] for name in names[index::count]}) for index in range(count)
        ]
    return groups


def _all_full(pages: dict[str, Page]) -> dict[str, Page]:
    """unify_hybrid_kv_cache_specs and _promote_local_kv_cache_specs: windows keep every block."""
    values = list(pages.values())
    if is_uniform(values) or is_one_type(values):
        return pages
    promoted = _promoted(pages)
    values = list(promoted.values())
    if not (is_uniform(values) or is_one_type(values)):
        raise BadInputError(
            "with the hybrid KV cache manager off these layers have no common type; vLLM refuses "
            "this too: leave out --disable-hybrid-kv-cache-manager"
        )
    return promoted


def _promoted(pages: dict[str, Page]) -> dict[str, Page]:
    full = {page.block_size for page in pages.values() if page.kind in FULL_KINDS}
    if not full:
        return pages
    common = full.pop() if len(full) == 1 else None
    promoted: dict[str, Page] = {}
    for name, page in pages.items():
        if isinstance(page, AttentionPage) and page.kind in (Kind.SLIDING, Kind.CHUNKED):
            block = common or page.block_size
            padded = page.page_size_padded
            if padded is not None:
                padded = max(padded, page.unpadded_page_bytes * block // page.block_size)
            promoted[name] = replace(
                page, kind=Kind.FULL, block_size=block, page_size_padded=padded
            )
        else:
            promoted[name] = page
    return promoted


def _promoted_beside_mla(pages: dict[str, Page]) -> dict[str, Page] | None:
    """_try_get_full_allocation_fallback_groups: MLA next to a plain sliding window."""
    kinds = {page.kind for page in pages.values()}
    if Kind.MLA not in kinds or Kind.SLIDING not in kinds or Kind.CHUNKED in kinds:
        return None
    promoted = _promoted(pages)
    return promoted if is_one_type(list(promoted.values())) else None
