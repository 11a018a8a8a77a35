"""A Report as one HTML page that needs nothing else: no script, no network, no font, no image.

What stands where is `templates/report.html.j2`, how it looks `templates/report.css`; here it is
decided what is shown. The page is ASCII, so that no encoding of a terminal, a pipe or a mail can
break it, and the same report is the same page. jinja2 is loaded with the first page, not with this
module: the other formats do not wait for it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, starmap
from typing import TYPE_CHECKING, Any, get_args

from omnicache_cli import __version__
from omnicache_cli.report.layout import escaped
from omnicache_cli.report.model import Cell, Facts, Lines, Picture, Report, Section, Table
from omnicache_cli.report.text import SHADES, is_number_column, text_of

if TYPE_CHECKING:
    from jinja2 import Template

MAX_ROWS = 5000
"""Rows, facts or lines of one section that a page shows; it says how many there are."""

MAX_NAME = 60
"""Characters of a section's id, and of a title in the browser's list of windows."""

WIDE_CELL = 40
"""Characters; in a table only longer values are broken into lines."""

LONG_CELL = 400
"""Characters; a longer value scrolls in a box of its own, so that it does not fill the screen."""

FEW_ROWS = 10
"""A table below this does not say how many rows it has: one sees it."""


@dataclass(frozen=True, slots=True)
class CellView:
    """One value: its characters, and the classes of report.css that it is set in."""

    text: str
    style: str = ""
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    """What stands under the heading of a section. `num_rows` counts also what is not shown."""

    rows: Sequence[Sequence[CellView]]
    num_rows: int
    row_name: str
    columns: Sequence[CellView] = ()  # of a picture: what its first and its last column are
    legend: Sequence[CellView] = ()
    note: str = ""

    @property
    def size(self) -> str:
        if not self.num_rows:
            return "(none)"
        return f"{self.num_rows:,} {self.row_name}{'' if self.num_rows == 1 else 's'}"

    @property
    def shows_size(self) -> bool:
        return not 0 < self.num_rows < FEW_ROWS

    @property
    def is_cut(self) -> bool:
        return self.num_rows > len(self.rows)


@dataclass(frozen=True, slots=True)
class SectionView:
    """What the template gets for one section; `macro` is the name of the macro that writes it."""

    id: str
    title: str
    macro: str
    body: Body


def as_html(report: Report) -> str:
    """The whole page."""
    page = _template().render(
        title=escaped(report.title),
        window_title=_cut(escaped(report.title)),
        command=report.command,
        tool_version=__version__,
        vllm_version=report.vllm_version,
        sections=[
            SectionView(name, escaped(section.title), *_view(section))
            for name, section in zip(_ids(report.sections), report.sections, strict=True)
        ],
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


# -- kinds of section -------------------------------------------------------------------------


def _table(table: Table) -> Body:
    is_number = [is_number_column(table, column) for column in range(len(table.columns))]
    styles = ["n" if number else "" for number in is_number]
    names = list(map(CellView, map(escaped, table.columns), styles))
    rows = [list(map(_cell, row, styles)) for row in table.rows[:MAX_ROWS]]
    return Body(rows, len(table.rows), "row", names)


def _facts(facts: Facts) -> Body:
    items = islice(facts.items.items(), MAX_ROWS)
    return Body([[_cell(name), _cell(value)] for name, value in items], len(facts.items), "value")


def _lines(lines: Lines) -> Body:
    return Body([[_cell(line)] for line in lines.lines[:MAX_ROWS]], len(lines.lines), "line")


def _picture(picture: Picture) -> Body:
    """Cells are empty characters in one of a few shades; the legend has the words."""
    marks = [f"s{round(mark.level * (len(SHADES) - 1))}" for mark in picture.marks]

    def view(column: int, cell: int | None) -> CellView:
        styles = [] if cell is None else [marks[cell]]
        styles += ["border"] if column in picture.borders else []
        return CellView("", " ".join(styles))

    rows = [[_cell(label), *starmap(view, enumerate(cells))] for label, cells in picture.rows]
    ends = [_cell(picture.first_column), _cell(picture.last_column)]
    legend = [
        CellView(escaped(mark.name), style)
        for mark, style in zip(picture.marks, marks, strict=True)
    ]
    return Body(rows, len(rows), "row", ends, legend, escaped(picture.note))


_KINDS: dict[type[Section], tuple[str, Callable[[Any], Body]]] = {
    Table: ("table", _table),
    Facts: ("facts", _facts),
    Lines: ("lines", _lines),
    Picture: ("picture", _picture),
}
"""Per kind of section the macro that writes it, and what fills its body."""

if _missing := set(get_args(Section)) - _KINDS.keys():
    raise TypeError(f"no HTML for sections of kind {sorted(kind.__name__ for kind in _missing)}")


def _view(section: Section) -> tuple[str, Body]:
    macro, fill = _KINDS[type(section)]
    return macro, fill(section)


# -- characters -------------------------------------------------------------------------------


def _cell(cell: Cell, style: str = "") -> CellView:
    text = text_of(cell)
    is_long = len(text) > LONG_CELL
    more = [style] if style else []
    more += ["none"] if cell is None else []
    more += ["wide"] if len(text) > WIDE_CELL else []
    more += ["long"] if is_long else []
    return CellView(text, " ".join(more), is_long)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}…"


def _ids(sections: Sequence[Section]) -> list[str]:
    """A name for each section that a link can end in, made from its title; no two are equal."""
    names: list[str] = []
    for number, section in enumerate(sections, start=1):
        name = re.sub("[^a-z0-9]+", "-", section.title.lower())[:MAX_NAME].strip("-") or "section"
        while name in names:
            name = f"{name}-{number}"
        names.append(name)
    return names


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("omnicache_cli.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2")
