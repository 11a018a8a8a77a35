"""The noise floor: how far runs without any cache differ among themselves.

The same prompt gives other bits when it is computed in another batch shape: a matrix product sums
in another order. A hit changes the shape: only the rest of the prompt is computed. So the prompts
also run together, and each cut where the hit ends, without a cache. A hit may then be as far from
the baseline as the cut run is, plus as far as the hit may be from the cut run: twice the floor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omnicache_cli.verify.assembly import Rows, assemble, common
from omnicache_cli.verify.compare import compare_rows
from omnicache_cli.verify.runs import RequestRun, RunRows

HEADROOM = 2.0
"""The floor counts twice: the triangle inequality, see above."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Largest difference between two runs without a cache."""

    absolute: float = 0.0
    relative: float = 0.0  # of a row
    num_rows: int = 0  # that were compared

    def widened(self, absolute: float, relative: float, num_rows: int) -> "Floor":
        return Floor(
            max(self.absolute, absolute), max(self.relative, relative), self.num_rows + num_rows
        )


@dataclass(slots=True)
class Floors:
    """Of every key, and of the log probabilities."""

    by_key: dict[str, Floor]
    logprob: float = 0.0

    def add(self, baseline: RunRows, other: RunRows, keys: Iterable[str]) -> None:
        """Two runs of the same prompts under the same names."""
        for name, request in baseline.requests.items():
            again = other.requests.get(name)
            if again is None:  # the shape left it out
                continue
            split = first_other_token(request, again)
            pairs = zip(request.tokens[:split], again.tokens[:split], strict=False)
            gaps = [abs(one.logprob - two.logprob) for one, two in pairs]
            self.logprob = max([self.logprob, *gaps])
            for key in keys:
                rows = assemble(baseline.computed, name, key), assemble(other.computed, name, key)
                self._add_rows(key, rows[0], rows[1], comparable_rows(request, split))

    def _add_rows(self, key: str, one: Rows | None, two: Rows | None, end: int) -> None:
        if one is None or two is None:
            return
        positions, expected, found = common(one.up_to(end), two.up_to(end))
        if not positions or expected.shape != found.shape or expected.dtype != found.dtype:
            return
        gap = compare_rows(expected, found, positions)
        before = self.by_key.get(key, Floor())
        self.by_key[key] = before.widened(gap.max_abs_error, gap.max_relative_error, gap.num_rows)


def first_other_token(one: RequestRun, other: RequestRun) -> int | None:
    """Index of the first output token that differs; None: they agree as far as both go."""
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    return next((index for index, (a, b) in pairs if a.token_id != b.token_id), None)


def comparable_rows(request: RequestRun, split: int | None) -> int:
    """Positions whose rows depend on the same tokens in both runs."""
    return request.num_rows if split is None else request.num_prompt_tokens + split


def floors_of(runs: Mapping[str, Iterable[RunRows]], keys: Iterable[str]) -> Floors:
    """`runs`: of each scenario the runs without a cache, the baseline first."""
    floors = Floors({})
    for several in runs.values():
        baseline, *others = several
        for other in others:
            floors.add(baseline, other, keys)
    return floors
