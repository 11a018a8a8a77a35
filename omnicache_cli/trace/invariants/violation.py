"""What a checker says: one broken invariant, and how much of each invariant was looked at.

The numbers are those of the documentation of `omnicache show --check`.
"""

from collections import Counter
from dataclasses import dataclass, field

INVARIANTS = {
    1: "slots follow the block table",
    2: "padding is -1, real slots are not, block 0 is not written",
    3: "a written block has one owner",
    4: "batch shape agrees with the scheduler",
    5: "a common prefix is common to all rows",
    6: "hit blocks were written before",
    7: "a hit is as long as every group allows",
    8: "a cached block's hash is that of its tokens",
    9: "groups share no table or slot buffer",
    11: "tensor-parallel ranks see the same batch",
    12: "the worker's block table is the scheduler's",
}

ONLY_WHERE_ASKED = frozenset({8, 9, 11})
"""Invariants that say nothing about most runs: 8 needs an option of the recording, 9 several
KV cache groups, 11 several ranks."""

OF_THE_SCHEDULER = frozenset({7, 8})
"""Invariants that look at no worker."""

UNITS = {
    1: "rows",
    2: "slot mappings",
    3: "rows",
    4: "forward passes",
    5: "forward passes",
    6: "hit blocks",
    7: "admissions",
    8: "cached blocks",
    9: "forward passes",
    11: "rank steps",
    12: "rows",
}
"""What is counted as checked."""

NOT_READ = "slot mapping not read"
TABLE_NOT_READ = "block table not read"
NO_SLOTS = "group maps no slots"
NO_WORKER = "no worker record"
LOST = "records were lost before"
MICROBATCHES = "microbatches (DBO) are not recorded"
NO_VECTORS = "query_start_loc or seq_lens not read"
CROSS_ATTENTION = "cross-attention group: its rows follow the encoder"
CONTEXT_PARALLEL = "context parallel: a rank writes only its share of the slots"
LOADED = "loaded by a KV connector"
SPECULATIVE = "speculative decoding: groups drop a block of their own hit"
NO_GROUP_HITS = "the groups' own hits were not recorded"
COPIED = "copied on write"
NOT_SCHEDULED = "row of a request that the step does not schedule"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant. None: the finding belongs to no single rank, group, request or row."""

    invariant: int
    engine: str
    step: int
    rank: int | None
    group: int | None
    request: str | None  # external id
    row: int | None  # row of the batch
    what: str
    expected: str
    found: str

    @property
    def name(self) -> str:
        return INVARIANTS[self.invariant]


@dataclass(slots=True)
class Coverage:
    """How much of one invariant was checked, in `UNITS`."""

    checked: int = 0
    broken: int = 0  # violations
    unchecked: Counter[str] = field(default_factory=Counter)  # reason -> units
