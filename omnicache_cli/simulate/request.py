"""One request of a workload, whatever form it was written in."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from omnicache_cli.errors import BadInputError
from omnicache_cli.prefix.prompts import Adapter, MediaItem

ID_BYTES = 16
"""Digest that stands for one hash id and all before it."""


@dataclass(frozen=True, slots=True)
class KnownHashes:
    """Block hashes of a request whose tokens are not known, each of the whole prefix up to its end.

    They go on with the output as far as it is known. `divisible`: a block may be cut into smaller
    ones that are equal where the block is.
    """

    tokens_each: int
    hashes: Sequence[bytes]
    divisible: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """One request to replay. At least one of `token_ids` and `known` is set.

    Without `output_token_ids` the answer is made up: equal for equal prompts where their tokens are
    known, else equal to no other.
    """

    name: str
    num_prompt_tokens: int
    num_output_tokens: int  # at least 1
    token_ids: list[int] | None = None
    known: KnownHashes | None = None
    output_token_ids: Sequence[int] = ()
    media: tuple[MediaItem, ...] = ()
    cache_salt: str | None = None
    adapter: Adapter | None = None
    skip_reading_prefix_cache: bool = False
    arrival_step: int | None = None
    arrival_seconds: float | None = None  # since some moment, the same for the whole workload
    abort_step: int | None = None  # its client goes away after this step

    def hashes_of(self, size: int) -> list[bytes] | None:
        """Those of blocks of `size` tokens, in order; None: hash the tokens.

        BadInputError: neither tells them.
        """
        known = self.known
        if known is None:
            return None
        if size == known.tokens_each:
            return list(known.hashes)
        if size % known.tokens_each == 0:
            every = size // known.tokens_each
            return list(known.hashes[every - 1 :: every])
        if known.divisible and known.tokens_each % size == 0:
            pieces = [b"%d" % part for part in range(known.tokens_each // size)]
            cut = [one + piece for one in known.hashes for piece in pieces]
            return cut[: self.num_prompt_tokens // size]
        if self.token_ids is not None:
            return None
        raise BadInputError(
            f"request {self.name} is known by hashes of {known.tokens_each} tokens, and those of "
            f"{size} cannot be made of them; give a --block-size or --match-unit that is a "
            + (
                "multiple or a divisor"
                if known.divisible
                else "multiple, or trace --with-token-ids"
            )
        )


def chained(ids: Sequence[int | str]) -> list[bytes]:
    """A digest for each hash id that stands for it and all before it."""
    found = []
    last = b""
    for one in ids:
        last = blake2b(last + str(one).encode(), digest_size=ID_BYTES).digest()
        found.append(last)
    return found
