"""Rules that every recorded step must keep; the numbers are those that `show --check` prints.

1 slots follow the block table · 2 padding, real entries, null block · 3 a written block has one
owner · 4 batch shape agrees with the scheduler · 6 hit blocks were written before · 11 ranks agree.
"""

from omnicache_cli.trace.invariants.checker import InvariantChecker
from omnicache_cli.trace.invariants.violation import (
    INVARIANTS,
    OF_SEVERAL_RANKS,
    UNITS,
    Coverage,
    Violation,
)

__all__ = ["INVARIANTS", "OF_SEVERAL_RANKS", "UNITS", "Coverage", "InvariantChecker", "Violation"]
