"""What one request of a given length costs, in blocks and bytes, from several points of view."""

from dataclasses import dataclass

from omnicache_cli.kv_size.estimate import Estimate
from omnicache_cli.kv_size.layers import Kind
from omnicache_cli.kv_size.pages import AttentionPage, MambaPage
from omnicache_cli.kv_size.requests import blocks_reserved


@dataclass(frozen=True, slots=True)
class RequestBytes:
    """Bytes are over all workers of one tensor-parallel rank."""

    length: int  # tokens
    reserved_blocks: int
    reserved_bytes: int  # vLLM's reservation at start-up, with the padding of groups
    summed_bytes: int  # the same layer by layer, without that padding
    held_blocks: int
    held_bytes: int  # while it decodes
    ideal_bytes: int  # its tokens (or one window) and one state, without blocks and padding
    naive_bytes: int  # were every attention layer full
    state_bytes: int  # one state of each mamba layer, unpadded


def request_bytes(found: Estimate, length: int) -> RequestBytes:
    block = sum(worker.bytes_per_block for worker in found.pool.workers)
    reserved, held = found.reserved_blocks(length), found.held_blocks(length)
    summed = ideal = naive = states = 0
    for page in found.pages.values():
        summed += page.page_bytes * blocks_reserved(page, found.settings, length)
        if isinstance(page, MambaPage):
            states += page.unpadded_page_bytes
            continue
        kept = _tokens_needed(page, found, length)
        ideal += page.unpadded_page_bytes * kept // page.block_size
        naive += page.unpadded_page_bytes * length // page.block_size
    return RequestBytes(
        length,
        reserved,
        reserved * block,
        summed,
        held,
        held * block,
        ideal + states,
        naive,
        states,
    )


def _tokens_needed(page: AttentionPage, found: Estimate, length: int) -> int:
    if page.kind is Kind.CROSS:
        return found.model.encoder_tokens or 0
    shard = -(-length // found.settings.decode_context_parallel_size)
    return min(shard, page.window) if page.window and page.kind is not Kind.FULL else shard
