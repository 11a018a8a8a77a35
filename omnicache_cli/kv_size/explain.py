"""The arithmetic of an estimate, line by line, each number with where it comes from."""

from omnicache_cli.kv_size.dtypes import bytes_of
from omnicache_cli.kv_size.estimate import Estimate
from omnicache_cli.kv_size.layers import Kind
from omnicache_cli.kv_size.model import Reading
from omnicache_cli.kv_size.pages import MambaPage, Page
from omnicache_cli.kv_size.pool import gib, needed_bytes


def explain(reading: Reading, found: Estimate, length: int) -> list[str]:
    """From fields to the printed figures; every multiplication is written out."""
    settings, pool = found.settings, found.pool
    origin = reading.defaults or "config.json"
    lines = [
        f"fields: {reading.source.path}"
        + ("" if reading.defaults is None else f", class defaults from {origin}"),
        f"architecture {found.model.architecture}: {found.model.num_hidden_layers} layers, "
        f"{len(found.pages)} with a cache",
    ]
    lines += [
        f"{name} = {getattr(settings, name)}   [{source}]"
        for name, source in settings.sources.items()
    ]
    lines.append(
        f"in flight = {settings.max_num_batched_tokens:,} max_num_batched_tokens x "
        f"{settings.max_concurrent_batches} = {settings.max_in_flight_tokens:,} tokens   "
        "[VllmConfig.max_in_flight_tokens]"
    )
    lines.append(f"block = {found.sizes.attention} tokens   [{found.sizes.why}]")
    for page in dict.fromkeys(found.pages.values()):
        count = sum(one == page for one in found.pages.values())
        lines.append(f"{count} x {page.kind.value}: page = {_page(page, settings.dtype)}")
    for number, group in enumerate(pool.groups):
        lines.append(
            f"group {number}: {len(group.pages)} layers, {group.kind.value}, block "
            f"{group.block_size}; a request of {length:,} tokens reserves "
            f"{_blocks(group.first, found, length)} = {group.reserved(settings, length):,} blocks"
        )
    if pool.groups:
        lines.append(
            "bytes per block = the widest group = "
            + " max ".join(f"{group.bytes_per_block:,}" for group in pool.groups)
            + f" = {pool.bytes_per_block:,}   [_get_kv_cache_bytes_per_block]"
        )
    for rank, worker in enumerate(pool.workers):
        if worker.available_bytes is not None:
            lines.append(
                f"worker {rank}: {worker.available_bytes:,} bytes // {worker.bytes_per_block:,} = "
                f"{worker.num_blocks:,} blocks"
            )
    if pool.num_blocks is None:
        lines.append("number of blocks: unknown, no KV cache memory is given")
        return lines
    own = found.reserved_blocks(settings.max_model_len)
    lines += [
        f"number of blocks = the least of the workers = {pool.num_blocks:,}",
        f"maximum concurrency = {pool.num_blocks:,} / {own:,} blocks of a request of "
        f"{settings.max_model_len:,} tokens = {found.concurrency:.4f}   "
        "[get_max_concurrency_for_kv_cache_config]",
        f"KV cache size = int({found.concurrency:.4f} x {settings.max_model_len:,}) = "
        f"{found.tokens:,} tokens   [get_kv_cache_capacity, vLLM 0.20.2 and later]",
        f"KV cache size, old = {pool.num_blocks:,} // {len(pool.groups)} groups x "
        f"{min(group.block_size for group in pool.groups)} = {found.tokens_old:,} tokens   "
        "[up to vLLM 0.20.0]",
    ]
    for rank, worker in enumerate(pool.workers):
        needed = needed_bytes(worker, settings, settings.max_model_len)
        lines.append(
            f"admission, worker {rank}: {gib(needed)} GiB needed, {gib(worker.checked_bytes or 0)} "
            "GiB there without the null block   [_check_enough_kv_cache_memory]"
        )
    return lines


def _page(page: Page, dtype: str) -> str:
    if isinstance(page, MambaPage):
        states = " + ".join(
            f"{' x '.join(map(str, shape))} x {bytes_of(kind)} ({kind})"
            for shape, kind in zip(page.shapes, page.dtypes, strict=True)
        )
        padded = f", padded to {page.page_bytes:,}" if page.page_size_padded else ""
        return f"{states} = {page.unpadded_page_bytes:,} bytes{padded}"
    slots = page.num_head_slots or page.num_kv_heads
    if page.state_content_bytes is not None:
        content = f"{page.state_content_bytes} bytes ({page.packed_as})"
    else:
        size = bytes_of(page.dtype)
        content = f"({page.head_size} + {page.head_size_v}) x {size} ({page.dtype})"
    padded = f", padded to {page.page_bytes:,}" if page.page_size_padded else ""
    return (
        f"{page.block_size} tokens x {slots} heads on a rank x {content} = "
        f"{page.unpadded_page_bytes:,} bytes{padded}"
    )


def _blocks(page: Page, found: Estimate, length: int) -> str:
    settings = found.settings
    if isinstance(page, MambaPage):
        return f"mode {page.mode}, {page.num_speculative_blocks} speculative"
    match page.kind:
        case Kind.SLIDING:
            return (
                f"ceil(min({page.window} - 1 + {settings.max_in_flight_tokens:,}, {length:,}) / "
                f"{page.block_size}) + 1"
            )
        case Kind.CHUNKED:
            return (
                f"ceil(min({page.window} + {settings.max_in_flight_tokens:,}, {length:,}) / "
                f"{page.block_size})"
            )
        case Kind.CROSS:
            return f"ceil({settings.max_num_batched_tokens:,} encoder tokens / {page.block_size})"
        case _:
            ranks = settings.decode_context_parallel_size
            shard = f" / {ranks} ranks" if ranks > 1 else ""
            return f"ceil({length:,}{shard} / {page.block_size})"
