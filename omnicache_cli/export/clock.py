"""One clock for all files of a run.

The processes of a machine share a monotonic clock, which puts their records into the right order
to the nanosecond; machines share nothing but the wall clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from omnicache_cli.trace.records import Header

MAX_DRIFT_NS = 1_000_000_000
"""How far the wall clocks of two processes of one host may disagree with their monotonic clocks.
Beyond it the host was restarted in between, or the name stands for two machines."""

Joined = Literal["reference", "monotonic clock", "wall clock"]


@dataclass(frozen=True, slots=True)
class FileClock:
    """Where the clock of one file lies on the wall clock."""

    zero_unix_ns: int  # instant 0 of the file
    joined_by: Joined

    def unix_ns(self, instant_ns: int) -> int:
        return self.zero_unix_ns + instant_ns


def join_clocks(headers: Mapping[str, Header]) -> dict[str, FileClock]:
    """The clock of each file, by its name. The first file of a host is that host's reference."""
    clocks: dict[str, FileClock] = {}
    references: dict[str, Header] = {}
    for name in sorted(headers):
        header = headers[name]
        reference = references.get(header.host)
        if reference is None:
            references[header.host] = header
            clocks[name] = FileClock(header.started_unix_ns, "reference")
            continue
        by_monotonic = reference.started_unix_ns + header.monotonic_ns - reference.monotonic_ns
        if abs(by_monotonic - header.started_unix_ns) <= MAX_DRIFT_NS:
            clocks[name] = FileClock(by_monotonic, "monotonic clock")
        else:
            clocks[name] = FileClock(header.started_unix_ns, "wall clock")
    return clocks
