"""Rules that every recorded step must keep; the numbers are those that `show --check` prints.

1 slots follow the block table · 2 padding, real entries, null block · 3 a written block has one
owner · 4 batch shape agrees with the scheduler · 5 a common prefix is common · 6 hit blocks were
written before · 7 length of a hit · 8 hashes of cached blocks · 9 groups share no buffer ·
11 ranks agree · 12 the worker's block table is the scheduler's.
"""

from omnicache_cli.trace.invariants.checker import InvariantChecker
from omnicache_cli.trace.invariants.violation import (
    INVARIANTS,
    ONLY_WHERE_ASKED,
    UNITS,
    Coverage,
    Violation,
)

__all__ = ["INVARIANTS", "ONLY_WHERE_ASKED", "UNITS", "Coverage", "InvariantChecker", "Violation"]
