"""The report of `profile --compare-cache`: what the cache gains and costs, and the verdict."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omnicache_cli.profile.compare import (
    Comparison,
    Ratio,
    RunTimes,
    Side,
    Verdict,
    phases_seen,
)
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.phases import INSIDE

MIB = 1024 * 1024

BY_PAIRS = "pairs' on / off"
ABOUT_PAIRS = (
    f"{BY_PAIRS}: the median of the ratios within the pairs of neighbouring runs, and their "
    "spread; it is not the quotient of the two medians beside it"
)


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a run of the workload. `scale`: what it is divided by for a reader."""

    name: str
    unit: str
    of: Callable[[RunTimes], float | None]
    scale: float = 1.0


def measures(comparison: Comparison) -> Iterator[Measure]:
    """What is compared, in the order of the table."""
    yield Measure("run", "ms", lambda run: run.wall_ns, 1e6)
    yield Measure("first token, median", "ms", lambda run: run.median_first_token_ns, 1e6)
    yield Measure("tokens per second", "", lambda run: run.tokens_per_second)
    yield Measure("steps", "", lambda run: run.num_steps)
    yield Measure("time of the steps", "ms", lambda run: run.steps_ns or None, 1e6)
    for phase in phases_seen(comparison):
        inside = f", in {INSIDE[phase]}" if phase in INSIDE else ""
        yield Measure(f"{phase}{inside}", "ms", _phase(phase), 1e6)


def _phase(name: str) -> Callable[[RunTimes], float | None]:
    return lambda run: run.phases_ns.get(name)


def compare_report(
    comparison: Comparison, facts: Mapping[str, Cell], *, vllm_version: str | None
) -> Report:
    """`facts`: what ran, for the head of the report."""
    rows: list[tuple[Cell, ...]] = [_row(comparison, one) for one in measures(comparison)]
    columns = ("of one run of the workload", "caching on", "caching off", BY_PAIRS, "spread")
    sections: list[Section] = [
        Facts("", {**facts, "pairs": comparison.num_pairs, "hits": _hits_text(comparison)}),
        Lines("Verdict", [sentence(comparison), *_remarks(comparison)]),
        Table(f"Medians of {comparison.num_pairs} runs each, run in turns", columns, rows),
        Lines("", [ABOUT_PAIRS]),
        _memory_table(comparison),
    ]
    return Report(
        "profile",
        "The prefix cache on and off",
        compare_data(comparison),
        tuple(sections),
        vllm_version,
    )


_WORDS: dict[Verdict, str] = {
    "pays-off": "the prefix cache pays off here",
    "costs": "the prefix cache costs more than it gains here",
    "no-difference": "the spread covers the difference; more pairs, or longer runs, may tell",
    "mixed": "the prefix cache gains one thing and costs another",
}


def sentence(comparison: Comparison) -> str:
    """The verdict in words."""
    wall, first = comparison.wall, comparison.first_token
    parts = [f"a run takes {_times(wall)} of its time without"]
    if first is not None:
        parts.append(f"the first token comes after {_times(first)} of its time without")
    return f"{_WORDS[comparison.verdict]}: {', '.join(parts)}"


def _times(ratio: Ratio) -> str:
    undecided = "" if ratio.direction else ": undecided"
    return f"{_ratio_text(ratio.median)} ({_spread(ratio)}{undecided})"


def _spread(ratio: Ratio) -> str:
    return f"{_ratio_text(ratio.lowest)} .. {_ratio_text(ratio.highest)}"


def _ratio_text(value: float) -> str:
    """Three significant digits; more where they would say 1 of what is not 1."""
    text = f"{value:.3g}"
    return f"{value:.6g}" if text == "1" and value != 1 else text


def _remarks(comparison: Comparison) -> Iterator[str]:
    if comparison.hit_rate == 0:
        yield "nothing hit: this workload has no prefix twice that fills a block"
    share = comparison.on.median(lambda run: run.tensor_share)
    if share:
        yield f"the tensor cache takes {100 * share:.1f} % of the steps' time with caching on"


def _hits_text(comparison: Comparison) -> str:
    rate = comparison.hit_rate
    if rate is None:
        return "not known: the prefix cache was never asked"
    return f"{100 * rate:.1f} % of the queried tokens with caching on"


def _row(comparison: Comparison, measure: Measure) -> tuple[Cell, ...]:
    ratio = comparison.ratio(measure.of)
    unit = f", {measure.unit}" if measure.unit else ""
    return (
        f"{measure.name}{unit}",
        *(_shown(side.median(measure.of), measure.scale) for side in _sides(comparison)),
        None if ratio is None else _three(ratio.median),
        None if ratio is None else _spread(ratio),
    )


def _sides(comparison: Comparison) -> tuple[Side, Side]:
    return comparison.on, comparison.off


def _shown(value: float | None, scale: float) -> float | None:
    return None if value is None else _three(value / scale)


def _three(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")


def _memory_table(comparison: Comparison) -> Table:
    on, off = comparison.on, comparison.off
    rows: list[tuple[Cell, ...]] = [
        ("blocks of the pool in use, at most", _peak(on), _peak(off)),
        ("the same, MiB on each rank", *(_peak_mib(side) for side in (on, off))),
        ("tensor cache on the host, MiB", *(_mib(side.host_bytes) for side in (on, off))),
        (
            "its share of the time of the steps",
            *(_percent(side.median(lambda run: run.tensor_share)) for side in (on, off)),
        ),
    ]
    return Table("Memory and copies", ("", "caching on", "caching off"), rows)


def _peak(side: Side) -> int:
    return max(run.peak_blocks for run in side.runs)


def _peak_mib(side: Side) -> float | None:
    return None if side.block_bytes is None else _mib(_peak(side) * side.block_bytes)


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else _three(num_bytes / MIB)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"


# -- for scripts ----------------------------------------------------------------------------------


def compare_data(comparison: Comparison) -> dict[str, Any]:
    """Names as in docs/phases.md."""
    return {
        "verdict": comparison.verdict,
        "sentence": sentence(comparison),
        "num_pairs": comparison.num_pairs,
        "hit_rate": comparison.hit_rate,
        "ratios": {
            "run": _ratio_data(comparison.wall),
            "first_token": _ratio_data(comparison.first_token),
        },
        "on": _side_data(comparison, comparison.on),
        "off": _side_data(comparison, comparison.off),
    }


def _ratio_data(ratio: Ratio | None) -> dict[str, float] | None:
    if ratio is None:
        return None
    return {"median": ratio.median, "lowest": ratio.lowest, "highest": ratio.highest}


def _side_data(comparison: Comparison, side: Side) -> dict[str, Any]:
    return {
        "peak_blocks": _peak(side),
        "block_bytes": side.block_bytes,
        "host_bytes": side.host_bytes,
        "runs": [
            {
                "wall_ns": run.wall_ns,
                "median_first_token_ns": run.median_first_token_ns,
                "num_tokens": run.num_tokens,
                "tokens_per_second": run.tokens_per_second,
                "queried_tokens": run.queried_tokens,
                "hit_tokens": run.hit_tokens,
                "num_steps": run.num_steps,
                "steps_ns": run.steps_ns,
                "phases_ns": {phase: run.phases_ns.get(phase) for phase in phases_seen(comparison)},
                "tensor_share": run.tensor_share,
                "peak_blocks": run.peak_blocks,
            }
            for run in side.runs
        ],
    }
