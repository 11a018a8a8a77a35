"""A pipeline with the cache off and on, as a report: per stage what passed, and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.verify.crossings import (
    Crossed,
    Crossing,
    Direction,
    KeyResult,
    compare_crossings,
)
from omnicache_cli.verify.results import Verdict

_SEVERITY = list(Crossed)


@dataclass(frozen=True, slots=True)
class StageHits:
    """What one stage hit in the run with the cache on, from its scheduler's output."""

    stage_id: int
    stage: str
    is_cached: bool  # the run has the cache on for it
    queried_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class PipelineVerification:
    """All that was compared."""

    hits: Sequence[StageHits]
    results: Sequence[KeyResult]

    @property
    def verdict(self) -> Verdict:
        """nothing-verified where a stage with a cache did not hit, or nothing passed."""
        if any(one.verdict is Crossed.CORRUPTION for one in self.results):
            return Verdict.CORRUPTION
        idle = [one for one in self.hits if one.is_cached and not one.hit_tokens]
        proved = any(one.verdict is Crossed.EQUAL for one in self.results)
        cached = any(one.is_cached for one in self.hits)
        return Verdict.NOTHING if idle or not proved or not cached else Verdict.EQUAL

    def of_stage(self, stage_id: int) -> Crossed | None:
        """The worst of what the stage gave away; None: it gave nothing."""
        own = [
            one.verdict
            for one in self.results
            if one.stage_id == stage_id and one.direction is not Direction.RECEIVED
        ]
        return max(own, key=_SEVERITY.index, default=None)


def judge_pipeline(
    off: Sequence[Crossing],
    on: Sequence[Crossing],
    num_prompts: int,
    hits: Sequence[StageHits],
) -> PipelineVerification:
    """`off` and `on`: two rounds of the same prompts each, one request at a time.

    The hits of the second round are held against the first one without a cache; the two without a
    cache say what may be compared at all.
    """
    cold, again = _round(off, 0, num_prompts), _round(off, 1, num_prompts)
    results = compare_crossings(cold, again, _round(on, 1, num_prompts))
    return PipelineVerification(hits, results)


def _round(crossings: Sequence[Crossing], number: int, num_prompts: int) -> list[Crossing]:
    """Those of one round, numbered from 0."""
    first = number * num_prompts
    return [
        replace(one, number=one.number - first)
        for one in crossings
        if first <= one.number < first + num_prompts
    ]


def pipeline_report(
    verified: PipelineVerification, facts: Mapping[str, Cell], *, vllm_version: str | None
) -> Report:
    sections: list[Section] = [Facts("", facts), _stage_table(verified), _key_table(verified)]
    wrong = [one for one in verified.results if one.verdict is Crossed.CORRUPTION]
    if wrong:
        lines = [
            f"{one.stage}, {one.direction}, request {one.number}, {one.key}: {one.diagnosis}"
            for one in wrong
        ]
        sections.append(Lines("Corruption", lines))
    if any(one.verdict is Crossed.UNSTABLE for one in verified.results):
        text = "not comparable: two runs without a cache differ too, by what is under run to run"
        sections.append(Lines("", [text]))
    sections.append(Lines("", [summary_line(verified)]))
    data = {
        **{name.replace(" ", "_"): value for name, value in facts.items()},
        "verdict": verified.verdict,
        "stages": [
            {**asdict(one), "verdict": verified.of_stage(one.stage_id)} for one in verified.hits
        ],
        "crossings": [
            {**asdict(one), "shape": None if one.shape is None else list(one.shape)}
            for one in verified.results
        ],
    }
    title = f"Verification of a pipeline: {verified.verdict}"
    return Report("verify", title, data, tuple(sections), vllm_version)


def summary_line(verified: PipelineVerification) -> str:
    """The last line of the report."""
    counts = dict.fromkeys(Crossed, 0)
    for one in verified.results:
        counts[one.verdict] += 1
    several = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    hits = ", ".join(f"{one.stage} {one.hit_tokens}" for one in verified.hits if one.is_cached)
    return (
        f"verify: {verified.verdict}: hit tokens: {hits or 'none'}; "
        f"{len(verified.results)} tensors between stages: {several or 'none'}"
    )


def _stage_table(verified: PipelineVerification) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for one in verified.hits:
        verdict = verified.of_stage(one.stage_id)
        rows.append(
            (
                f"{one.stage_id} {one.stage}",
                "on" if one.is_cached else "off",
                one.queried_tokens,
                one.hit_tokens,
                None if verdict is None else str(verdict),
            )
        )
    columns = ("stage", "cache", "queried tokens", "hit tokens", "what it gave away")
    return Table("Stages", columns, rows)


def _key_table(verified: PipelineVerification) -> Table:
    """One line for each key of each stage, over all requests."""
    groups: dict[tuple[int, str, Direction, str], list[KeyResult]] = {}
    for one in verified.results:
        groups.setdefault((one.stage_id, one.stage, one.direction, one.key), []).append(one)
    rows: list[tuple[Cell, ...]] = []
    for (_, stage, direction, key), results in groups.items():
        worst = max((one.verdict for one in results), key=_SEVERITY.index)
        shapes = list(dict.fromkeys(_shape(one) for one in results))
        rows.append(
            (
                stage,
                str(direction),
                key,
                len(results),
                ", ".join(shapes),
                str(worst),
                _worst([one.max_abs_error for one in results]),
                _worst([one.run_to_run for one in results]),
            )
        )
    columns = ("stage", "way", "key", "requests", "shape", "verdict", "max error", "run to run")
    return Table("What passes between stages", columns, rows, one_line_rows=True)


def _shape(one: KeyResult) -> str:
    return "-" if one.shape is None else "x".join(map(str, one.shape)) or "1 value"


def _worst(errors: Sequence[float | None]) -> Cell:
    """The largest; shapes that differ have none."""
    if any(error is None for error in errors):
        return "other shape"
    return float(f"{max(error for error in errors if error is not None):.2g}")
