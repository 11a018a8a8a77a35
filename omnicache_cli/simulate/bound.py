"""How many blocks could hit at most, whatever is evicted: Belady's bound for one pool.

A block that is looked up again must have stayed in the pool since the last request that held it
gave it back. Such stays are intervals over the admissions; a pool of C blocks allows those that
nowhere overlap more than C times, less what the request that runs there needs itself. Taking them
in the order of their ends, each where there is room, allows the most (interval scheduling).

It is a bound, not a policy: the future is known, blocks hit without the blocks before them, and of
requests that run at a time only the largest takes room. Memory grows with the different blocks of
the workload.
"""

from collections import Counter
from collections.abc import Sequence

_HELD = -1


class Bound:
    """For one pool of `num_blocks` usable blocks of `block_size` tokens, full attention only."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.hit_blocks = 0
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._slot = 0  # the time between two admissions
        self._load = RangeMaximum()  # per slot: blocks kept, and those of the running request
        self._largest = 0  # request that ended in this slot, in blocks
        self._released: dict[bytes, int] = {}  # hash -> slot, or held by a running request
        self._holders: Counter[bytes] = Counter()

    def admit(self, hashes: Sequence[bytes], queried_tokens: int) -> None:
        """A request is looked up; its last token is always computed."""
        self._load.append(self._largest)
        self._largest = 0
        lookups = max(0, queried_tokens - 1) // self._block_size
        stays: Counter[int] = Counter()
        released = self._released
        for one in hashes[:lookups]:
            slot = released.get(one)
            if slot == _HELD:
                self.hit_blocks += 1
            elif slot is not None:
                stays[slot] += 1
        for slot in sorted(stays, reverse=True):  # of those that end now the shortest first
            self.hit_blocks += self._keep(slot + 1, stays[slot])
        self._slot += 1
        for one in hashes:
            released[one] = _HELD
        self._holders.update(hashes)

    def _keep(self, first: int, wanted: int) -> int:
        """Blocks that can stay from slot `first` until now."""
        last = self._slot + 1
        if first >= last:
            return wanted
        kept = min(wanted, self._num_blocks - self._load.maximum(first, last))
        if kept > 0:
            self._load.add(first, last, kept)
        return max(0, kept)

    def release(self, hashes: Sequence[bytes], num_prompt_tokens: int, num_tokens: int) -> None:
        """A request ends; `num_tokens` are in its blocks, those of the prompt first."""
        size, holders, released = self._block_size, self._holders, self._released
        self._largest = max(self._largest, -(-num_tokens // size))
        of_prompt = num_prompt_tokens // size
        for one in hashes[:of_prompt]:
            held = holders[one] - 1
            if held > 0:
                holders[one] = held
            else:
                del holders[one]
                released[one] = self._slot
        for one in hashes[of_prompt : num_tokens // size]:
            if one not in holders:
                released[one] = self._slot


class RangeMaximum:
    """Numbers in a row: add to a range of them, ask for the largest of a range, in log(n) steps."""

    def __init__(self) -> None:
        self._size = 1
        self._count = 0
        self._largest = [0, 0]  # of the part under a node, its own additions included
        self._added = [0, 0]  # to all under a node

    def append(self, value: int) -> None:
        if self._count == self._size:
            self._grow()
        self._count += 1
        self.add(self._count - 1, self._count, value)

    def _grow(self) -> None:
        """Twice as wide: what there is becomes the left half."""
        self._largest = _wider(self._largest, self._size, self._largest[1])
        self._added = _wider(self._added, self._size, 0)
        self._size *= 2

    def add(self, first: int, end: int, value: int) -> None:
        """To [first, end)."""
        low, high = first + self._size, end + self._size
        left, right = low, high - 1
        while low < high:
            if low & 1:
                self._apply(low, value)
                low += 1
            if high & 1:
                high -= 1
                self._apply(high, value)
            low >>= 1
            high >>= 1
        self._rebuild(left)
        self._rebuild(right)

    def _apply(self, node: int, value: int) -> None:
        self._largest[node] += value
        self._added[node] += value

    def _rebuild(self, leaf: int) -> None:
        node = leaf >> 1
        while node:
            children = max(self._largest[2 * node], self._largest[2 * node + 1])
            self._largest[node] = children + self._added[node]
            node >>= 1

    def maximum(self, first: int, end: int) -> int:
        """Of [first, end), which is not empty."""
        return self._maximum(1, 0, self._size, first, end)

    def _maximum(self, node: int, low: int, high: int, first: int, end: int) -> int:
        if first <= low and high <= end:
            return self._largest[node]
        middle = (low + high) // 2
        found = 0
        if first < middle:
            found = self._maximum(2 * node, low, middle, first, end)
        if end > middle:
            found = max(found, self._maximum(2 * node + 1, middle, high, first, end))
        return found + self._added[node]


def _wider(tree: list[int], size: int, root: int) -> list[int]:
    """The tree over `size` leaves as the left half of one twice as wide."""
    wider = [0, root]
    width = 1
    while width <= size:
        wider += tree[width : 2 * width] + [0] * width
        width *= 2
    return wider
