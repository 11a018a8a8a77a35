"""One option over several values: the marginal cost curve, as a table and as bars."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from omnicache_cli.errors import UsageError
from omnicache_cli.kv_size.estimate import Estimate
from omnicache_cli.kv_size.options import Options

SWEPT = frozenset(
    {
        *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size"),
        *("tensor_parallel_size", "pipeline_parallel_size", "num_speculative_tokens"),
    }
)
BAR = 40
"""Characters of the longest bar."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """An option by vLLM's name, and the values it is to take."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    value: int
    found: Estimate


def parse_sweep(text: str) -> Sweep:
    """max_model_len=4k..128k doubles from one to the other; a list is taken as it is."""
    name, equals, rest = text.partition("=")
    name = name.strip().replace("-", "_")
    known = {field.name for field in fields(Options)} & SWEPT
    if not equals or name not in known:
        raise UsageError(
            f"--sweep {text!r}: write NAME=FROM..TO or NAME=A,B; names: {', '.join(sorted(known))}"
        )
    start, dots, end = rest.partition("..")
    if not dots:
        return Sweep(name, tuple(_number(part, text) for part in rest.split(",")))
    low, high = _number(start, text), _number(end, text)
    if low > high:
        raise UsageError(f"--sweep {text!r}: {low} is more than {high}")
    values = [low]
    while values[-1] * 2 <= high:
        values.append(values[-1] * 2)
    if values[-1] != high:
        values.append(high)
    return Sweep(name, tuple(values))


def run_sweep(sweep: Sweep, options: Options, count: Callable[[Options], Estimate]) -> list[Point]:
    return [Point(value, count(_with(options, sweep.name, value))) for value in sweep.values]


def _with(options: Options, name: str, value: int) -> Options:
    changes: dict[str, Any] = {name: value}
    return replace(options, **changes)


def bars(labels: Sequence[str], values: Sequence[int | None]) -> list[str]:
    """A line per value, its bar as long as its share of the largest."""
    largest = max((value for value in values if value), default=0)
    width = max(map(len, labels), default=0)
    return [
        f"{label:>{width}} |{'#' * (round(BAR * value / largest) if largest and value else 0)} "
        f"{'unknown' if value is None else f'{value:,}'}"
        for label, value in zip(labels, values, strict=True)
    ]


def _number(text: str, whole: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+)\s*([kKmM]?)\s*", text)
    if match is None:
        raise UsageError(f"--sweep {whole!r}: {text!r} is no number; write 4096 or 4k")
    return int(match.group(1)) * {"": 1, "k": 1024, "m": 1024 * 1024}[match.group(2).lower()]
