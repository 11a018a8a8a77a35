"""The pool block by block, step by step: for small runs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from omnicache_cli.errors import BadInputError
from omnicache_cli.report.model import Cell, Lines, Section, Table

MAX_BLOCKS = 64
MAX_MOMENTS = 200
"""More than that nobody reads."""


@dataclass(frozen=True, slots=True)
class BlockState:
    """One block as it stands."""

    block_id: int
    owners: tuple[str, ...]  # requests that hold it
    block_hash: str | None  # None: it is not in the prefix cache
    ref_cnt: int


@dataclass(frozen=True, slots=True)
class PoolState:
    """All usable blocks, and the ids of the free ones, next to be taken first."""

    blocks: tuple[BlockState, ...]
    free_queue: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """The pool once something has happened to it."""

    step: int
    what: tuple[str, ...]
    state: PoolState


@dataclass(slots=True)
class Timeline:
    """Keeps the pool as it is after each schedule(), and after requests have given blocks back."""

    state: Callable[[], PoolState]
    moments: list[Moment] = field(default_factory=list)

    def add(self, step: int, what: Sequence[str]) -> None:
        """BadInputError: the run is too long to be looked at block by block."""
        if len(self.moments) == MAX_MOMENTS:
            raise BadInputError(
                f"--timeline is for small runs, and this one has more than {MAX_MOMENTS} moments; "
                "give a shorter workload"
            )
        self.moments.append(Moment(step, tuple(what), self.state()))


def timeline_sections(moments: Sequence[Moment]) -> list[Section]:
    """A table and the free queue for each moment."""
    sections: list[Section] = []
    for one in moments:
        title = f"Step {one.step}: {', '.join(one.what)}"
        place = {block: number for number, block in enumerate(one.state.free_queue, start=1)}
        rows: list[tuple[Cell, ...]] = [
            (
                block.block_id,
                ", ".join(block.owners) or None,
                block.block_hash,
                block.ref_cnt,
                place.get(block.block_id),
            )
            for block in one.state.blocks
        ]
        columns = ("block", "owner", "hash", "ref_cnt", "free queue")
        sections.append(Table(title, columns, rows, one_line_rows=True))
        queue = " ".join(map(str, one.state.free_queue)) or "(empty)"
        sections.append(Lines("", [f"free queue: {queue}"]))
    return sections


def timeline_data(moments: Sequence[Moment]) -> list[dict[str, Any]]:
    """The same for scripts."""
    return [
        {
            "step": one.step,
            "what": list(one.what),
            "blocks": [asdict(block) for block in one.state.blocks],
            "free_queue": list(one.state.free_queue),
        }
        for one in moments
    ]
