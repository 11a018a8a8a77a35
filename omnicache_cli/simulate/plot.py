"""Hit rate over pool size as a picture: a column for each size, in order, not to scale."""

from collections.abc import Sequence
from dataclasses import dataclass

from omnicache_cli.report.model import Mark, Picture

HEIGHT = 10
MAX_COLUMNS = 72
MARKS = (Mark("upper bound", 0.25), Mark("hit rate", 0.75), Mark("hit rate, current size", 1.0))
BOUND, RATE, CURRENT = range(3)


@dataclass(frozen=True, slots=True)
class Bar:
    """One size. Rates from 0 to 1; None: not known."""

    num_blocks: int
    hit_rate: float | None
    bound: float | None = None
    is_current: bool = False


def plot(bars: Sequence[Bar]) -> Picture:
    """Sizes from small to large; the scale ends at the next tenth above all of them."""
    bars = sorted(bars, key=lambda one: one.num_blocks)[:MAX_COLUMNS]
    rates = [rate for one in bars for rate in (one.hit_rate, one.bound) if rate is not None]
    top = max(1, -int(-10 * max(rates, default=0.0) // 1)) / 10
    width = max(1, min(9, MAX_COLUMNS // len(bars)))
    gap = 1 if width > 2 else 0
    rows = []
    for row in range(HEIGHT, 0, -1):
        middle = top * (row - 0.5) / HEIGHT
        cells: list[int | None] = []
        for bar in bars:
            cells += [_cell(bar, middle)] * (width - gap) + [None] * gap
        rows.append((f"{100 * top * row / HEIGHT:.0f} %", cells))
    last = f"{bars[-1].num_blocks:,}"
    first = f"{bars[0].num_blocks:,} blocks" if len(bars) > 1 else last
    used = sorted({cell for _, cells in rows for cell in cells if cell is not None})
    drawn = [
        (label, [None if cell is None else used.index(cell) for cell in cells])
        for label, cells in rows
    ]
    marks = tuple(MARKS[one] for one in used)
    return Picture("Hit rate by pool size", marks, drawn, first, last, is_chart=True)


def _cell(bar: Bar, height: float) -> int | None:
    if bar.hit_rate is not None and height <= bar.hit_rate:
        return CURRENT if bar.is_current else RATE
    if bar.bound is not None and height <= bar.bound:
        return BOUND
    return None
