"""Invariant 11: every further tensor-parallel rank saw the batch of the first rank of its stage."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from omnicache_cli.trace.digest import digest_of
from omnicache_cli.trace.steps import ForwardView, GroupView

Finding = tuple[int | None, int | None, str, str, str]
"""Group, row, what, the first rank's, this rank's."""

_SCALARS = ("num_actual_tokens", "max_query_len", "max_seq_len")
_VECTORS = ("query_start_loc", "seq_lens", "slot_mapping")


def wrong_digest(first: ForwardView, digest: str) -> Iterator[Finding]:
    """A rank that left nothing but its digest."""
    expected = digest_of(first)
    if digest != expected:
        what = "digest of the batch; record with --all-ranks to see what differs"
        yield None, None, what, expected, digest


def differences(first: ForwardView, further: ForwardView) -> Iterator[Finding]:
    """A rank that recorded its batch: each part in which it differs, at its first entry."""
    if digest_of(first) == digest_of(further):
        return
    index = _first_difference(first.request_ids, further.request_ids)
    if index is not None:
        one, other = _entry(first.request_ids, index), _entry(further.request_ids, index)
        yield None, index, "request of the row", one, other
    for mine, theirs in zip_longest(first.groups, further.groups):
        if mine is None or theirs is None:
            counts = str(len(first.groups)), str(len(further.groups))
            yield None, None, "KV cache groups", counts[0], counts[1]
            return
        yield from _in_group(mine, theirs)


def _in_group(mine: GroupView, theirs: GroupView) -> Iterator[Finding]:
    group = mine.group
    for name in _SCALARS:
        one, other = getattr(mine, name), getattr(theirs, name)
        if one != other:
            yield group, None, name, str(one), str(other)
    for name in _VECTORS:
        one, other = getattr(mine, name), getattr(theirs, name)
        if one is None or other is None:  # not read on one of them: the digest leaves it out
            continue
        index = _first_difference(one, other)
        if index is not None:
            yield group, None, f"{name}[{index}]", _entry(one, index), _entry(other, index)
    table, their_table = mine.block_table, theirs.block_table
    no_row: list[int] = []
    if table is None or their_table is None:
        return
    for row, (mine_row, their_row) in enumerate(zip_longest(table, their_table, fillvalue=no_row)):
        index = _first_difference(mine_row, their_row)
        if index is not None:
            what = f"block_table[{row}][{index}]"
            yield group, row, what, _entry(mine_row, index), _entry(their_row, index)
            return


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    if one == other:
        return None
    pairs = enumerate(zip_longest(one, other, fillvalue=_NOTHING))
    return next((index for index, (left, right) in pairs if left != right), None)


_NOTHING = object()


def _entry(values: Sequence[object], index: int) -> str:
    return str(values[index]) if index < len(values) else f"only {len(values)} entries"
