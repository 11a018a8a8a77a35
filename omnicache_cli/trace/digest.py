"""A digest of what one rank saw in one forward pass, the same by live tensors and by records.

Tensor-parallel ranks of one pipeline stage must see the same batch. The first writes it in full,
the others write this digest: equal digests, equal batches. It covers the vectors themselves, not
how a record encodes them, so it does not matter what either rank had written before. What is
copied from a device comes too late for a digest and is left out.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence

from omnicache_cli.trace.records import COPIED
from omnicache_cli.trace.steps import ForwardView

DIGEST_BYTES = 8

BOARD_PREFIX = ".digests."
"""Begins the name of the file in which ranks compare digests while they run; not for readers."""

BOARD_MAGIC = b"omnicache ranks\n"
"""First bytes of that file."""


class BatchDigest:
    """Feed it the parts of a forward pass in order: request ids, then each group."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._hash.update("\0".join(request_ids).encode())

    def add_numbers(self, numbers: Sequence[int | None]) -> None:
        """Scalars; None is a value of its own."""
        self._hash.update(repr(list(numbers)).encode())

    def add_vector(self, little_endian_int64: bytes | None) -> None:
        """A vector as raw integers of 8 bytes; None: not read."""
        if little_endian_int64 is None:
            self._hash.update(b"none")
            return
        self._hash.update(len(little_endian_int64).to_bytes(8, "little"))
        self._hash.update(little_endian_int64)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def digest_of(view: ForwardView) -> str:
    """The digest of a forward pass that was recorded in full."""
    digest = BatchDigest(view.request_ids)
    copied = [name for name, source in view.worker.read_from.items() if source == COPIED]
    for group in view.groups:
        digest.add_numbers((group.num_actual_tokens, group.max_query_len, group.max_seq_len))
        table = None if "block_table" in copied else group.block_table
        vectors = (
            group.query_start_loc,
            group.seq_lens,
            None if "slot_mapping" in copied else group.slot_mapping,
            None if table is None else [len(row) for row in table],
            None if table is None else [block for row in table for block in row],
        )
        for vector in vectors:
            digest.add_vector(None if vector is None else _raw(vector))
    return digest.hexdigest()


def _raw(values: list[int]) -> bytes:
    numbers = array("q", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
