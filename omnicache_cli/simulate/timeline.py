"""The pool block by block, step by step: for small runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockState:
    """One block as it stands."""

    block_id: int
    owners: tuple[str, ...]  # requests that hold it
    block_hash: str | None  # None: it is not in the prefix cache
    ref_cnt: int


@dataclass(frozen=True, slots=True)
class PoolState:
    """All usable blocks, and the ids of the free ones, next to be taken first."""

    blocks: tuple[BlockState, ...]
    free_queue: tuple[int, ...]
