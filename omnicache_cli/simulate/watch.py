"""What happens to the blocks of one pool: evictions, lifetimes, reuse distances, occupancy.

`PoolWatch` has the methods that vLLM's BlockPool calls on its metrics collector.
"""

from collections import Counter
from typing import Any

from omnicache_cli.trace.summary import PoolUsage

STEPS_UNSETTLED = 1024
"""Steps whose values are kept one by one: counting many at once is cheap."""

SUB_BUCKETS = 32
"""Values below are counted exactly, larger ones within 1 / 32 of themselves."""


class Distribution:
    """Whole numbers from 0, in buckets; memory grows with the logarithm of the largest."""

    def __init__(self) -> None:
        self._new: list[int] = []
        self._buckets: Counter[int] = Counter()
        self.add = self._new.append

    def settle(self) -> None:
        """Counts what was added; call it now and then."""
        if self._new:
            for value, count in Counter(self._new).items():
                self._buckets[_floor(value)] += count
            self._new.clear()

    @property
    def count(self) -> int:
        self.settle()
        return self._buckets.total()

    def percentile(self, percent: float) -> int | None:
        """The lower end of the bucket that holds it; None without a value."""
        wanted = max(1, -(-self.count * percent // 100))
        seen = 0
        for value in sorted(self._buckets):
            seen += self._buckets[value]
            if seen >= wanted:
                return value
        return None


def _floor(value: int) -> int:
    shift = max(0, value.bit_length() - SUB_BUCKETS.bit_length())
    return value >> shift << shift


class PoolWatch:
    """Counts for one pool of `num_blocks` usable blocks; block 0 is vLLM's null block.

    A life runs from taking a block until its content is evicted, in steps. The reuse distance of a
    hit block is the number of blocks taken from the pool since the use of the block before.
    """

    def __init__(self, num_blocks: int) -> None:
        self.evictions = 0
        self.step = 0
        self.usage = PoolUsage(num_blocks)
        self.lifetimes = Distribution()  # steps
        self.reuse_distances = Distribution()  # blocks
        self._taken = 0
        self._used_at = [0] * (num_blocks + 1)
        self._born = [0] * (num_blocks + 1)

    def on_block_accessed(self, block: Any) -> None:
        number = block.block_id
        self.reuse_distances.add(self._taken - self._used_at[number])
        self._used_at[number] = self._taken

    def on_block_evicted(self, block: Any) -> None:
        """vLLM calls it for every block that it takes from the free queue, cached or not."""
        number = block.block_id
        if block.block_hash is not None:
            self.evictions += 1
            self.lifetimes.add(self.step - self._born[number])
        self._taken = taken = self._taken + 1
        self._used_at[number] = taken
        self._born[number] = self.step

    on_block_allocated = id
    """Called after it for the same block. Nothing is left to do, and this is the cheapest call."""

    def reset(self) -> None:
        """The prefix cache was reset: nothing is counted as evicted."""

    def end_step(self, num_free_blocks: int) -> None:
        """After a schedule() that scheduled tokens."""
        self.usage.add(self.step, num_free_blocks)
        self.step += 1
        if self.step % STEPS_UNSETTLED == 0:
            self.lifetimes.settle()
            self.reuse_distances.settle()
