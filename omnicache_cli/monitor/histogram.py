"""Histograms as Prometheus has them: how many observations were at most so large."""

from collections.abc import Iterable
from dataclasses import dataclass, field

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Quantile:
    """A percentile in the unit of its histogram.

    `is_above`: it lies in the last bucket, which has no upper end; `value` is where that begins.
    """

    value: float
    is_above: bool = False


@dataclass(slots=True)
class Buckets:
    """Cumulative counts by upper end; the end +Inf has the number of all observations."""

    counts: dict[float, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.counts.get(INFINITY, 0.0)

    def quantile(self, share: float) -> Quantile | None:
        """As PromQL's histogram_quantile: linear inside a bucket, the first begins at 0.

        None: no observation, or no +Inf bucket.
        """
        total = self.total
        if total <= 0:
            return None
        ends = sorted(self.counts)
        counts = _rising(self.counts[end] for end in ends)
        rank = share * total
        place = next((at for at, count in enumerate(counts) if count >= rank), len(ends) - 1)
        if ends[place] == INFINITY:
            return Quantile(ends[place - 1], is_above=True) if place else None
        start, below = (ends[place - 1], counts[place - 1]) if place else (0.0, 0.0)
        if not place and ends[0] <= 0:
            return Quantile(ends[0])
        inside = counts[place] - below
        share_inside = (rank - below) / inside if inside else 0.0
        return Quantile(start + (ends[place] - start) * share_inside)


def _rising(counts: Iterable[float]) -> list[float]:
    """A page is not written in one instant: a bucket may be a little ahead of the next."""
    rising: list[float] = []
    for count in counts:
        rising.append(max(count, rising[-1]) if rising else count)
    return rising


def summed(histograms: Iterable[Buckets]) -> Buckets:
    """One histogram of all of them, over the ends that they all have: nothing is interpolated."""
    known = [one.counts for one in histograms if one.counts]
    if not known:
        return Buckets()
    common = set(known[0]).intersection(*known[1:])
    return Buckets({end: sum(one[end] for one in known) for end in common})
