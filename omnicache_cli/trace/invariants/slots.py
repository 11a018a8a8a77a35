"""Invariants 1 and 2: slots follow the block table; padding, real entries and the null block."""

from collections.abc import Iterator, Sequence

from omnicache_cli.trace.invariants.rows import Row, SlotRuns, expand, slots_by_table
from omnicache_cli.trace.records import Runs, from_runs

Finding = tuple[Row | None, str, str, str]
"""Row, what, expected, found."""


def wrong_slots(
    rows: Sequence[Row], parts: Sequence[SlotRuns], table: Sequence[list[int]], block_size: int
) -> Iterator[Finding]:
    """Invariant 1, one finding per row: its first wrong position and how many there are."""
    for row, found in zip(rows, parts, strict=True):
        blocks = table[row.number] if row.number < len(table) else []
        expected = slots_by_table(blocks, block_size, row.first_position, row.end_position)
        if found == expected and _length(found) == row.end_token - row.first_token:
            continue
        yield _first_wrong(row, expand(expected), expand(found), blocks, block_size)


def _length(runs: SlotRuns) -> int:
    return sum(length for _, length in runs)


def _first_wrong(
    row: Row, expected: list[int], found: list[int], blocks: list[int], block_size: int
) -> Finding:
    count = row.end_token - row.first_token
    wrong = [
        index
        for index in range(count)
        if index >= len(expected) or index >= len(found) or expected[index] != found[index]
    ]
    first = wrong[0]
    position = row.first_position + first
    column = position // block_size
    many = "" if len(wrong) == 1 else f" and {len(wrong) - 1} more of {count}"
    what = f"slot_mapping[{row.first_token + first}], position {position}{many}"
    if first < len(expected):
        value = (
            f"{expected[first]} = block_table[{column}] {blocks[column]} x {block_size}"
            f" + {position % block_size}"
        )
    else:
        value = f"a block in column {column}; the row has {len(blocks)}"
    return row, what, value, str(found[first]) if first < len(found) else "no entry"


def wrong_padding(
    rows: Sequence[Row], runs: Runs, num_padding: int, num_real: int, block_size: int
) -> Iterator[Finding]:
    """Invariant 2. `num_real` entries are real; `block_size` is that of the pool."""
    num_entries = sum(runs[1::2])
    if num_entries + num_padding < num_real:
        yield (
            None,
            "length of slot_mapping",
            f"at least num_actual_tokens {num_real}",
            str(num_entries + num_padding),
        )
    token = 0
    has_fault = False
    for start, length in zip(runs[::2], runs[1::2], strict=True):
        real = min(max(num_real - token, 0), length)
        has_fault |= real < length or (real > 0 and start < block_size)
        token += length
    has_fault |= num_entries < num_real
    if not has_fault:
        return
    slots = from_runs(runs) + [-1] * num_padding
    late = [index for index in range(num_real, len(slots)) if slots[index] != -1]
    if late:
        yield None, _entries(late), "-1", str(slots[late[0]])
    real_slots = slots[:num_real]
    for row, tokens in _by_row(rows, [i for i, slot in enumerate(real_slots) if slot < 0]):
        yield row, _entries(tokens), "a slot", str(slots[tokens[0]])
    null = [i for i, slot in enumerate(real_slots) if 0 <= slot < block_size]
    for row, tokens in _by_row(rows, null):
        found = f"{slots[tokens[0]]}, in the null block 0"
        yield row, _entries(tokens), f"a slot from {block_size} on", found


def _entries(tokens: Sequence[int]) -> str:
    many = "" if len(tokens) == 1 else f" and {len(tokens) - 1} more"
    return f"slot_mapping[{tokens[0]}]{many}"


def _by_row(rows: Sequence[Row], tokens: Sequence[int]) -> Iterator[tuple[Row | None, list[int]]]:
    groups: dict[int | None, list[int]] = {}
    by_number = {row.number: row for row in rows}
    for token in tokens:
        owner = next((r.number for r in rows if r.first_token <= token < r.end_token), None)
        groups.setdefault(owner, []).append(token)
    for number, mine in groups.items():
        yield None if number is None else by_number[number], mine
