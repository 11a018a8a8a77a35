"""Findings of a verification: what was compared, and the verdict."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from omnicache_cli.verify.faults import Fault

if TYPE_CHECKING:
    from torch import Tensor


class Verdict(StrEnum):
    """In the order of severity."""

    EQUAL = "equal"  # bit for bit
    ROUNDING = "rounding"  # no more than runs without a cache differ among themselves
    NOTHING = "nothing-verified"  # no hit
    CORRUPTION = "corruption"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a corruption starts."""

    token: int  # position in the request
    block: int | None  # index in the request's table
    block_id: int | None
    slot: int | None
    step: int | None
    column: int | None = None
    expected: tuple[float, ...] = ()
    found: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """One request and one key of one scenario."""

    scenario: str
    request: str
    key: str
    verdict: Verdict
    diagnosis: str
    hit_tokens: int
    hit_blocks: int
    num_rows: int = 0
    num_restored_rows: int = 0
    num_bytes: int = 0
    num_differing_rows: int = 0  # against the run without a cache
    max_abs_error: float | None = None  # None: there is nothing to compare
    relative_error: float | None = None
    noise_floor: float | None = None  # absolute, of the same key, runs without a cache
    relative_floor: float | None = None
    allowed: float | None = None  # relative of rows, absolute of log probabilities
    must_hit: bool = False  # without a hit there is nothing to verify
    place: Place | None = None
    fault: Fault | None = None  # what a corruption is
    row_errors: tuple[float | None, ...] = ()  # relative, by position; None: no row came


@dataclass(slots=True)
class Verification:
    """All pairs, what could not be verified, and the rows of corrupt pairs.

    `failing_rows`: by scenario, request and key; `expected` and `found` are (num_rows, width), row
    i belongs to token position positions[i].
    """

    block_size: int
    pairs: list[Pair] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)  # scenario, why
    failing_rows: dict[tuple[str, str, str], dict[str, "Tensor"]] = field(default_factory=dict)

    @property
    def hit_tokens(self) -> int:
        """Of all requests, each counted once."""
        hits = {(one.scenario, one.request): one.hit_tokens for one in self.pairs}
        return sum(hits.values())

    @property
    def verdict(self) -> Verdict:
        """The worst; nothing-verified where a scenario shows no hit, or none was run."""
        order = list(Verdict)
        if not self.hit_tokens and all(one.verdict is not Verdict.CORRUPTION for one in self.pairs):
            return Verdict.NOTHING
        return max((one.verdict for one in self.pairs), key=order.index, default=Verdict.NOTHING)
