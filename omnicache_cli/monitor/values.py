"""A measured value, or why there is none; and the arithmetic that keeps the two apart."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Value:
    """`number` is None where nothing is known, and `missing` says why.

    `is_above`: the number is a lower bound. `basis`: the counts behind it, for a reader.
    """

    number: float | None
    missing: str = ""
    is_above: bool = False
    basis: str = ""


def unknown(why: str) -> Value:
    return Value(None, why)


MAX_DIGITS = 18
"""Of a count. More are no number of tokens or blocks, and Python refuses some thousands."""


def count_of(text: str) -> int | None:
    """The count that a label has; None: it is none."""
    is_count = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return int(text) if is_count else None


def total(values: Sequence[Value]) -> Value:
    """The sum; unknown where a part is, for a sum without it would be another one."""
    if not values:
        return unknown("no engine")
    for one in values:
        if one.number is None:
            return one
    return Value(sum(one.number for one in values if one.number is not None))


def ratio(part: Value, whole: Value, noun: str, *, empty: str) -> Value:
    """part / whole; `empty` says why there is none where the whole is 0."""
    if part.number is None:
        return part
    if whole.number is None:
        return whole
    if whole.number <= 0:
        return unknown(empty)
    return Value(
        part.number / whole.number, basis=f"{part.number:.0f} of {whole.number:.0f} {noun}"
    )
