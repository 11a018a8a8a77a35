"""What a deploy file makes of prefix caching, stage by stage, as a report."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from omnicache_cli.errors import EXIT_DIFFERS, EXIT_DONE
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table


class Caching(StrEnum):
    """Prefix caching of one stage."""

    ON = "on"
    POSSIBLE = "could be on"
    IMPOSSIBLE = "could not be on"
    UNSAFE = "must stay off"  # vLLM-Omni would start the stage, and its hits would be wrong
    REFUSED = "refused"  # the file turns it on, and vLLM-Omni will not start the stage
    NONE = "no tensor cache"  # a kind of stage that vLLM-Omni has none for


@dataclass(frozen=True, slots=True)
class StageLint:
    """One stage of a deploy file."""

    stage_id: int
    stage: str
    kind: str  # llm_ar, llm_generation, diffusion
    enable_prefix_caching: bool  # what the file comes to
    reasons: tuple[str, ...] = ()  # why vLLM-Omni refuses
    dangers: tuple[str, ...] = ()  # why hits would be wrong
    remarks: tuple[str, ...] = ()  # what is to be known with it on

    @property
    def caching(self) -> Caching:
        if self.kind != "llm_ar":
            return Caching.NONE
        if self.reasons:
            return Caching.REFUSED if self.enable_prefix_caching else Caching.IMPOSSIBLE
        if self.dangers:
            return Caching.UNSAFE
        return Caching.ON if self.enable_prefix_caching else Caching.POSSIBLE


def deploy_report(
    stages: Sequence[StageLint], facts: dict[str, Cell], *, vllm_version: str | None
) -> Report:
    rows: list[tuple[Cell, ...]] = [
        (f"{one.stage_id} {one.stage}", one.kind, str(one.caching)) for one in stages
    ]
    sections: list[Section] = [Facts("", facts), Table("Stages", ("stage", "kind", "cache"), rows)]
    for title, parts in (
        ("Refused because", [(one, one.reasons) for one in stages]),
        ("Wrong hits, if it were on", [(one, one.dangers) for one in stages]),
        ("To know", [(one, one.remarks) for one in stages]),
    ):
        lines = [f"{one.stage_id} {one.stage}: {text}" for one, texts in parts for text in texts]
        if lines:
            sections.append(Lines(title, lines))
    sections.append(Lines("", [summary(stages)]))
    data = {
        **{name.replace(" ", "_"): value for name, value in facts.items()},
        "stages": [
            {
                **asdict(one),
                "reasons": list(one.reasons),
                "dangers": list(one.dangers),
                "remarks": list(one.remarks),
                "caching": one.caching,
            }
            for one in stages
        ],
    }
    return Report("verify", "Prefix caching by stage", data, tuple(sections), vllm_version)


def summary(stages: Sequence[StageLint]) -> str:
    """The last line of the report."""
    parts = [
        f"{', '.join(one.stage for one in stages if one.caching is state)} {words}"
        for state, words in (
            (Caching.ON, "on"),
            (Caching.POSSIBLE, "could be on: enable_prefix_caching: true"),
            (Caching.IMPOSSIBLE, "could not be on"),
            (Caching.UNSAFE, "must stay off"),
            (Caching.REFUSED, "refused: the stage will not start"),
            (Caching.NONE, "without a tensor cache"),
        )
        if any(one.caching is state for one in stages)
    ]
    return f"lint: {'; '.join(parts) or 'no stage'}"


def exit_code(stages: Sequence[StageLint]) -> int:
    """1: the file turns it on where the stage will not start, or hits would be wrong."""
    wrong = (Caching.REFUSED, Caching.UNSAFE)
    asked = any(one.enable_prefix_caching and one.caching in wrong for one in stages)
    return EXIT_DIFFERS if asked else EXIT_DONE
