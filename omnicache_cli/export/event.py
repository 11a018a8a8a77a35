"""One event of the Trace Event Format, and how its instants are written."""

import math
from typing import Any, Literal

import msgspec

Phase = Literal["B", "E", "b", "e", "C", "i", "M"]
Args = dict[str, Any]

NS_PER_US = 1000


class TraceEvent(msgspec.Struct, omit_defaults=True):
    """A line of `traceEvents`. `ts` in microseconds, from the origin of the file."""

    ph: Phase
    pid: int
    tid: int | None = None
    ts: int | float | None = None  # metadata has none
    cat: str | None = None
    id: str | None = None  # of b and e, and of counters where a process has several engines
    s: Literal["g", "p", "t"] | None = None  # scope of i
    name: str | None = None
    args: Args | None = None


def microseconds(nanoseconds: int) -> int | float:
    """The number of microseconds that any reader turns into exactly these nanoseconds.

    Some readers multiply by 1000 and cut off, others round: the nearest double below would lose a
    nanosecond with the former.
    """
    whole, rest = divmod(nanoseconds, NS_PER_US)
    if not rest:
        return whole
    value = nanoseconds / NS_PER_US
    if int(value * NS_PER_US) == nanoseconds:
        return value
    return math.nextafter(value, math.copysign(math.inf, nanoseconds))
