"""Invariants 5, 9 and 12: what is said of whole block tables.

5: cascade attention reads the first columns once for all rows. 12: the worker's table of a
request is the scheduler's. Rows that have not changed since they were compared cost nothing.
"""

from collections.abc import Iterator, Sequence

from omnicache_cli.trace.records import CacheGroup
from omnicache_cli.trace.steps import ForwardView, GroupView, ScheduledRequest

Finding = tuple[int, str, str, str]
"""Row, what, expected, found."""


def wrong_cascade(group: GroupView, num_blocks: int, source: str) -> Iterator[Finding]:
    """The first `num_blocks` kernel blocks must be the same in every row."""
    table = group.block_table
    if not table:
        return
    first = table[0][:num_blocks]
    if len(first) < num_blocks:
        expected = f"{num_blocks} blocks, all of them shared ({source})"
        yield 0, "block_table[0]", expected, f"{len(first)} blocks"
        return
    for row, blocks in enumerate(table):
        if blocks[:num_blocks] != first:
            pairs = enumerate(zip(first, blocks, strict=False))
            column = next((i for i, (left, right) in pairs if left != right), len(blocks))
            found = str(blocks[column]) if column < len(blocks) else "no block"
            expected = f"{first[column]}, as in row 0: the first {num_blocks} are shared ({source})"
            yield row, f"block_table[{row}][{column}]", expected, found
            return


def shared(view: ForwardView) -> Iterator[tuple[int, str, str, str]]:
    """Group, what, expected, found: vectors that two groups keep in the same memory."""
    for name, one, other in view.record.shared_buffers:
        yield other, f"{name} buffer", "memory of its own", f"shared with group {one}"


class ComparedTables:
    """How far the tables of one rank and group were found equal to the scheduler's."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[int], int]] = {}  # request -> row, scheduler's blocks

    def wrong(
        self,
        number: int,
        table: Sequence[list[int]],
        spec: CacheGroup,
        kernel_block_size: int,
        rows: Sequence[tuple[int, ScheduledRequest]],
    ) -> Iterator[Finding]:
        """`number`: of the group; `rows`: row and request, where the scheduler's table is known."""
        ratio = spec.block_size // kernel_block_size
        known: dict[int, tuple[list[int], int]] = {}
        for row, one in rows:
            if row >= len(table) or number >= len(one.request.block_ids):
                continue
            blocks = one.request.block_ids[number]
            found = table[row]
            before = self._known.get(one.request.number)
            known[one.request.number] = (found, len(blocks))
            if before is not None and before[0] is found and before[1] == len(blocks):
                continue
            expected = blocks
            if ratio > 1:
                expected = [block * ratio + part for block in blocks for part in range(ratio)]
            if expected != found:
                yield from _differences(row, expected, found, ratio)
        self._known = known


def _differences(
    row: int, expected: Sequence[int], found: Sequence[int], ratio: int
) -> Iterator[Finding]:
    """The first one. Behind a window the scheduler has the null block, the worker's table still
    what was there."""
    for column, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right and left >= ratio:
            what = f"block_table[{row}][{column}]"
            yield row, what, f"{left}, as the scheduler says", str(right)
            return
    if len(expected) != len(found):
        lengths = f"{len(expected)} blocks", f"{len(found)} blocks"
        yield row, f"length of block_table[{row}]", *lengths
