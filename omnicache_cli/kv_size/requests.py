"""How many blocks one request takes from a group. Mirrors max_memory_usage_bytes of each spec
(v1/kv_cache_interface.py): the reservation at start-up, and what a running request really holds.
"""

from omnicache_cli.kv_size.layers import Kind
from omnicache_cli.kv_size.options import Settings
from omnicache_cli.kv_size.pages import AttentionPage, MambaPage, Page


def blocks_reserved(page: Page, settings: Settings, length: int) -> int:
    """Blocks that vLLM counts for a request of `length` tokens when it starts.

    Tokens in flight are counted in full for sliding and chunked layers, because blocks outside the
    window are freed only when their step has been processed.
    """
    if isinstance(page, MambaPage):
        return _mamba_blocks(page, length)
    return _attention_blocks(page, settings, length, settings.max_in_flight_tokens)


def blocks_held(page: Page, settings: Settings, length: int) -> int:
    """Blocks that a decoding request of `length` tokens holds: in flight are decode steps only."""
    if isinstance(page, MambaPage):
        return _mamba_blocks(page, length)
    step = 1 + settings.num_speculative_tokens
    return _attention_blocks(page, settings, length, settings.max_concurrent_batches * step)


def _attention_blocks(page: AttentionPage, settings: Settings, length: int, in_flight: int) -> int:
    window = page.window or 0
    match page.kind:
        case Kind.SLIDING:
            # SlidingWindowSpec.max_admission_blocks_per_request
            tokens = min(window - 1 + page.extra_retained_tokens + in_flight, length)
            return _ceil(tokens, page.block_size) + 1
        case Kind.CHUNKED:
            # ChunkedLocalAttentionSpec.max_admission_blocks_per_request
            return _ceil(min(window + in_flight, length), page.block_size)
        case Kind.CROSS:
            # CrossAttentionSpec: scheduler_config.max_num_encoder_input_tokens
            return _ceil(settings.max_num_batched_tokens, page.block_size)
        case _:
            # FullAttentionSpec
            shard = _ceil(length, settings.decode_context_parallel_size)
            return _ceil(shard, page.block_size)


def _mamba_blocks(page: MambaPage, length: int) -> int:
    """MambaSpec.max_memory_usage_bytes."""
    if page.mode == "all":
        return _ceil(length, page.block_size) + page.num_speculative_blocks
    states = 2 if page.mode == "align" else 1
    return states + page.num_speculative_blocks


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit)
