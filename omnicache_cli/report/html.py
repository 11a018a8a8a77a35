"""A Report as one HTML page that needs nothing else: no network, no font, no image.

What stands where is `templates/report.html.j2`, how it looks `templates/report.css`; here it is
decided what is shown. A page is whole without scripts; the one that it has, `templates/report.js`,
sorts tables. The page's own policy allows that one by its hash, and no other. The page is ASCII,
so that no encoding of a terminal, a pipe or a mail can break it, and the same report is the same
page. jinja2 is loaded with the first page, not with this module: the other formats do not wait.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby, islice
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


CELL_WIDTH, ROW_HEIGHT = 10, 14
"""Pixels of a cell of a picture."""

CHARACTER, GAP, BASELINE = 7, 8, 11
"""Pixels of a label's character, between a label and its row, and down to where it stands."""


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
    columns: Sequence[CellView] = ()

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
class Bar:
    """Neighbouring cells of a picture with one mark, in units of the drawing."""

    x: int
    y: int
    width: int
    style: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture as an SVG, one unit a pixel; `labels` are (y of the baseline, text)."""

    width: int
    height: int
    bar_height: int
    margin: int  # room of the labels, to their right edge
    labels: Sequence[tuple[int, str]]
    bars: Sequence[Bar]
    borders: Sequence[int]  # x
    first_column: str
    last_column: str
    legend: Sequence[CellView]
    note: str


@dataclass(frozen=True, slots=True)
class SectionView:
    """What the template gets for one section; `macro` is the name of the macro that writes it."""

    id: str
    title: str
    macro: str
    body: Body | Drawing


def as_html(report: Report) -> str:
    """The whole page."""
    sections = [
        SectionView(name, escaped(section.title), *_view(section))
        for name, section in zip(_ids(report.sections), report.sections, strict=True)
    ]
    is_sortable = any(isinstance(one, Table) and len(one.rows) > 1 for one in report.sections)
    script = _script() if is_sortable else ""
    page = _template().render(
        title=escaped(report.title),
        window_title=_cut(escaped(report.title)),
        command=report.command,
        tool_version=__version__,
        vllm_version=report.vllm_version,
        sections=sections,
        script=script,
        script_hash=_hash(script),
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


def _picture(picture: Picture) -> Drawing:
    """Neighbouring cells of one mark are one bar in one of a few shades; a legend has words."""
    marks = [f"s{round(mark.level * (len(SHADES) - 1))}" for mark in picture.marks]
    margin = CHARACTER * max((len(escaped(label)) for label, _ in picture.rows), default=0)
    num_columns = max((len(cells) for _, cells in picture.rows), default=0)
    bars = []
    for row, (_, cells) in enumerate(picture.rows):
        numbered = enumerate(cells)
        for cell, group in groupby(numbered, key=lambda one: one[1]):
            columns = [column for column, _ in group]
            if cell is not None:
                x = margin + GAP + columns[0] * CELL_WIDTH
                bars.append(Bar(x, row * ROW_HEIGHT, len(columns) * CELL_WIDTH, marks[cell]))
    return Drawing(
        width=margin + GAP + num_columns * CELL_WIDTH,
        height=ROW_HEIGHT * len(picture.rows),
        bar_height=ROW_HEIGHT if picture.is_chart else ROW_HEIGHT - 1,
        margin=margin,
        labels=[
            (row * ROW_HEIGHT + BASELINE, escaped(label))
            for row, (label, _) in enumerate(picture.rows)
        ],
        bars=bars,
        borders=[margin + GAP + column * CELL_WIDTH for column in picture.borders],
        first_column=escaped(picture.first_column),
        last_column=escaped(picture.last_column),
        legend=[
            CellView(escaped(mark.name), style)
            for mark, style in zip(picture.marks, marks, strict=True)
        ],
        note=escaped(picture.note),
    )


_KINDS: dict[type[Section], tuple[str, Callable[[Any], Body | Drawing]]] = {
    Table: ("table", _table),
    Facts: ("facts", _facts),
    Lines: ("lines", _lines),
    Picture: ("picture", _picture),
}
"""Per kind of section the macro that writes it, and what fills its body."""

if _missing := set(get_args(Section)) - _KINDS.keys():
    raise TypeError(f"no HTML for sections of kind {sorted(kind.__name__ for kind in _missing)}")


def _view(section: Section) -> tuple[str, Body | Drawing]:
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
def _script() -> str:
    return files("omnicache_cli.report").joinpath("templates", "report.js").read_text("ascii")


def _hash(script: str) -> str:
    """As a Content-Security-Policy names a script; it counts every byte between the tags."""
    return base64.b64encode(hashlib.sha256(script.encode("ascii")).digest()).decode("ascii")


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
