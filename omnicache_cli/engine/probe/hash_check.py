"""Invariant 8, while recording: a block enters the cache under the hash of the tokens in it.

An option, since it hashes every block a second time, with vLLM's own functions.
"""

from collections.abc import Iterator
from typing import Any


class HashCheck:
    """Recomputes the entries of `Request.block_hashes` of one scheduler's requests."""

    def __init__(self, scheduler: Any) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name

        algorithm = scheduler.vllm_config.cache_config.prefix_caching_hash_algo
        self._hash = get_hash_fn_by_name(algorithm)
        self._size = int(scheduler.hash_block_size)

    def wrong(self, request: Any, first: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Of the entries under tokens [first, end): index, and the hash that it should be.

        Each entry is checked upon the one before it as it stands: a stale one is told once, not
        again for every block behind it.
        """
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

        size = self._size
        for index in range(first // size, end // size):
            start = index * size
            keys, _ = generate_block_hash_extra_keys(request, start, start + size, 0)
            parent = request.block_hashes[index - 1] if index else None
            tokens = request.all_token_ids[start : start + size]
            right = hash_block_tokens(self._hash, parent, tokens, keys)
            if right != request.block_hashes[index]:
                yield index, right
