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


Section = Table | Facts | Lines


@dataclass(frozen=True, slots=True)
class Report:
    """One command's answer."""

    command: str  # the command's name, such as "show"
    title: str
    result: Mapping[str, Any]  # JSON-able; joins the envelope of report/json.py
    sections: tuple[Section, ...] = ()
    vllm_version: str | None = None  # None: no vLLM took part
