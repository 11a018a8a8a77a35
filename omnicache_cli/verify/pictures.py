"""The error of each key over the token position of a request, drawn with the borders of blocks."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from omnicache_cli.report.model import (
    MAX_PICTURE_COLUMNS,
    MAX_PICTURE_LABEL,
    Mark,
    Picture,
)
from omnicache_cli.verify.results import Pair, Verdict

EQUAL, WITHIN_FLOOR, ALLOWED, NO_ROW, BEYOND = range(5)
MARKS = (
    Mark("equal", 0.0),
    Mark("within the noise floor", 0.25),
    Mark("within twice the floor", 0.5),
    Mark("no row", 0.75),
    Mark("beyond", 1.0),
)
MARKS_OF_A_TOLERANCE = (*MARKS[:2], Mark("differs", 0.5), *MARKS[3:])


def error_pictures(pairs: Sequence[Pair], block_size: int) -> Iterator[Picture]:
    """One for each request with a hit or a difference; those without a difference are details."""
    for (scenario, request), group in groupby(pairs, lambda one: (one.scenario, one.request)):
        several = list(group)
        drawn = [one for one in several if one.row_errors]
        differs = any(one.verdict not in (Verdict.EQUAL, Verdict.NOTHING) for one in several)
        if drawn and (differs or several[0].hit_tokens):
            yield _picture(f"{scenario}, {request}", drawn, block_size, is_detail=not differs)


def _picture(title: str, pairs: Sequence[Pair], block_size: int, *, is_detail: bool) -> Picture:
    num_rows = max(len(one.row_errors) for one in pairs)
    width = positions_per_column(num_rows, block_size)
    starts = range(0, num_rows, width)
    told = [one for one in pairs if one.fault is not None] or [
        one for one in pairs if one.diagnosis
    ]
    sentences = [f"{one.key}: {one.diagnosis}" for one in told[:1]]
    hit = pairs[0].hit_tokens
    return Picture(
        title,
        MARKS_OF_A_TOLERANCE if any(one.allowed is None for one in pairs) else MARKS,
        [
            (_label(one.key), [_mark(one, start, start + width) for start in starts])
            for one in pairs
        ],
        "token 0",
        f"token {num_rows - 1}",
        borders=[column for column, start in enumerate(starts) if start and start % block_size == 0]
        if width < block_size
        else [],
        note="; ".join((f"restored: tokens 0 .. {hit - 1}" if hit else "no hit", *sentences)),
        is_detail=is_detail,
    )


def positions_per_column(num_rows: int, block_size: int) -> int:
    """The fewest that let the columns and the borders of the blocks fit; blocks share no column."""
    divisors = [width for width in range(1, block_size) if block_size % width == 0]
    num_blocks = -(-num_rows // block_size)
    for width in divisors:
        if -(-num_rows // width) + num_blocks <= MAX_PICTURE_COLUMNS:
            return width
    return block_size * max(1, -(-num_blocks // MAX_PICTURE_COLUMNS))


def _mark(one: Pair, start: int, end: int) -> int | None:
    """The worst of a column's positions; None: behind the last row that can be compared."""
    errors = one.row_errors[start:end]
    if not errors:
        return None
    known = [error for error in errors if error is not None]
    worst = max(known, default=0.0)
    if one.allowed is not None and worst > one.allowed:
        return BEYOND
    if len(known) < len(errors):
        return NO_ROW
    if not worst:
        return EQUAL
    within = one.allowed is not None and worst <= (one.relative_floor or 0)
    return WITHIN_FLOOR if within else ALLOWED


def _label(key: str) -> str:
    return key if len(key) <= MAX_PICTURE_LABEL else f"…{key[1 - MAX_PICTURE_LABEL :]}"
