"""The neutral Report that every command ends in.

Numbers stay numbers and None stays None here; turning them into characters is the renderers' job.
`result` is what scripts read (JSON), `sections` is what people read; they carry the same facts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names; a column name carries its unit. An empty title prints no heading.

    `one_line_rows`: text never breaks a row, so that `grep` finds whole ones.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    one_line_rows: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: a row of {len(row)} cells under "
                    f"{len(self.columns)} columns: {row!r}"
                )


@dataclass(frozen=True, slots=True)
class Facts:
    """Named single values, in the order in which they are to be read."""

    title: str
    items: Mapping[str, Cell]


@dataclass(frozen=True, slots=True)
class Lines:
    """Prose or findings, one per line; leading spaces are kept."""

    title: str
    lines: Sequence[str]


MAX_PICTURE_COLUMNS = 80
MAX_PICTURE_LABEL = 18
"""Characters: label and cells fit into a line of 100 columns."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a cell of a picture can say, and how dark it is drawn, from 0 to 1."""

    name: str
    level: float


@dataclass(frozen=True, slots=True)
class Picture:
    """A grid drawn with a few marks, with a legend under it.

    Rows from top to bottom: a label, and one cell per column: the index of a mark, or None where
    nothing is known. `first_column` and `last_column` are what the outermost columns stand for.
    A line is drawn before each column in `borders`. `note` stands under the grid. `is_detail`: left
    out of text, where it would bury what matters. `is_chart`: rows are heights, and bars go through
    them unbroken.
    """

    title: str
    marks: tuple[Mark, ...]
    rows: Sequence[tuple[str, Sequence[int | None]]]
    first_column: str
    last_column: str
    borders: Sequence[int] = ()
    note: str = ""
    is_detail: bool = False
    is_chart: bool = False

    def __post_init__(self) -> None:
        widths = {len(cells) for _, cells in self.rows}
        if len(widths) > 1 or max(widths, default=0) > MAX_PICTURE_COLUMNS:
            raise ValueError(f"picture {self.title!r}: rows of {sorted(widths)} cells")
        if any(len(label) > MAX_PICTURE_LABEL for label, _ in self.rows):
            raise ValueError(f"picture {self.title!r}: a label over {MAX_PICTURE_LABEL} characters")


Section = Table | Facts | Lines | Picture


@dataclass(frozen=True, slots=True)
class Report:
    """One command's answer."""

    command: str  # the command's name, such as "show"
    title: str
    result: Mapping[str, Any]  # JSON-able; joins the envelope of report/json.py
    sections: tuple[Section, ...] = ()
    vllm_version: str | None = None  # None: no vLLM took part
