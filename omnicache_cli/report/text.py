"""A Report as plain text: aligned columns, at most WIDTH terminal columns, no colour.

A narrower terminal gets narrower lines, down to NARROWEST. A table whose rows must not be broken
gets narrower gaps first, and is wider in need; so is a picture.
"""

import shutil
import sys
from collections.abc import Sequence

from omnicache_cli.report.layout import display_width, escaped, longest_piece, wrapped
from omnicache_cli.report.model import Cell, Facts, Lines, Picture, Report, Section, Table

WIDTH = 100
NARROWEST = 60
GAP = "  "
NARROW_GAP = " "
# A column is not made narrower than this to let the others breathe; below it, rows are written
# one value per line instead.
NARROWEST_TEXT = 10
SHADES = "·░▒▓█"
"""Marks of a picture from light to dark; `report/output.py` knows how to say them in ASCII."""


def width_here() -> int:
    """Columns for stdout: those of a terminal, which COLUMNS may overrule; else WIDTH.

    Not COLUMNS alone: readline leaves one to every child of a Python that has imported it.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDTH
    return max(NARROWEST, min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns))


def as_text(report: Report, width: int = WIDTH) -> str:
    """`width`: columns that lines are broken to fit into."""
    parts = [_wrapped_line(report.title, width)]
    shown = [one for one in report.sections if not (isinstance(one, Picture) and one.is_detail)]
    for number, section in enumerate(shown):
        if number or section.title:
            parts.append([""])
        if section.title:
            parts.append(_wrapped_line(section.title, width))
        parts.append(_body(section, width))
    return "".join(f"{line}\n" for part in parts for line in part)


def text_of(cell: Cell) -> str:
    """One value as a reader sees it."""
    match cell:
        case None:
            return "-"
        case bool():
            return "yes" if cell else "no"
        case float():
            return f"{cell:.0f}" if 1e6 <= abs(cell) < 1e15 else f"{cell:.6g}"
        case _:
            return escaped(str(cell))


def _body(section: Section, width: int) -> list[str]:
    match section:
        case Table():
            return _table(section, width)
        case Facts():
            items = [(name, text_of(value)) for name, value in section.items.items()]
            return _facts(items, width)
        case Lines():
            lines = [line for raw in section.lines for line in _wrapped_line(raw, width)]
            return lines or ["(none)"]
        case Picture():
            return _picture(section, width)


def _wrapped_line(raw: str, width: int) -> list[str]:
    """One line of prose; what does not fit goes on under its own indentation."""
    text = escaped(raw).rstrip()
    indent = text[: min(len(text) - len(text.lstrip()), width // 2)]
    return [
        f"{indent}{line}".rstrip() for line in wrapped(text[len(indent) :], width - len(indent))
    ]


def _facts(items: Sequence[tuple[str, str]], width: int) -> list[str]:
    if not items:
        return ["(none)"]
    names = [escaped(name) for name, _ in items]
    name_width = min(max(map(display_width, names)), width // 3)
    widths = [name_width, width - name_width - len(GAP)]
    lines = []
    for name, (_, value) in zip(names, items, strict=True):
        lines += _row([name, value], widths, [False, False])
    return lines


def _table(table: Table, width: int) -> list[str]:
    header = [escaped(name) for name in table.columns]
    if not table.rows:
        return [*_wrapped_line(GAP.join(header), width), "(none)"]
    rows = [[text_of(cell) for cell in row] for row in table.rows]
    is_number = [is_number_column(table, column) for column in range(len(header))]
    if table.one_line_rows:
        return _one_line_rows([header, *rows], is_number, width)
    widths = _column_widths(header, rows, is_number, width)
    if widths is None:
        return _one_value_per_line(header, rows, width)
    return [line for row in [header, *rows] for line in _row(row, widths, is_number)]


def _one_line_rows(
    rows: Sequence[Sequence[str]], is_number: Sequence[bool], width: int
) -> list[str]:
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    fits = sum(widths) + len(GAP) * (len(widths) - 1) <= width
    gap = GAP if fits else NARROW_GAP
    return [line for row in rows for line in _row(row, widths, is_number, gap)]


def is_number_column(table: Table, column: int) -> bool:
    cells = [row[column] for row in table.rows if row[column] is not None]
    return bool(cells) and all(
        isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells
    )


def _column_widths(
    header: Sequence[str], rows: Sequence[Sequence[str]], is_number: Sequence[bool], width: int
) -> list[int] | None:
    """Widths that fit into `width`, taken from the widest columns first; None if there are none."""
    room = width - len(GAP) * (len(header) - 1)
    values = [max(display_width(row[column]) for row in rows) for column in range(len(header))]
    widths = [
        min(max(value, display_width(name)), room)
        for value, name in zip(values, header, strict=True)
    ]
    # A number is never broken, nor a word of a header; texts and long headers are.
    least = [
        max(value if number else min(value, NARROWEST_TEXT), longest_piece(name))
        for value, number, name in zip(values, is_number, header, strict=True)
    ]
    if sum(least) > room:
        return None
    while sum(widths) > room:
        # Texts give way before headers of numbers do; among equals the widest.
        column = max(
            (column for column in range(len(widths)) if widths[column] > least[column]),
            key=lambda column: (not is_number[column], widths[column]),
        )
        widths[column] -= 1
    return widths


def _row(
    cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], gap: str = GAP
) -> list[str]:
    """One table row, as many lines high as its tallest cell."""
    columns = [wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, columns))):
        pieces = []
        for column, width, to_the_right in zip(columns, widths, right, strict=True):
            piece = column[number] if number < len(column) else ""
            padding = " " * (width - display_width(piece))
            pieces.append(padding + piece if to_the_right else piece + padding)
        lines.append(gap.join(pieces).rstrip())
    return lines


def _one_value_per_line(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[str]:
    """What is left when even the narrowest columns do not fit side by side."""
    lines: list[str] = []
    for number, row in enumerate(rows):
        lines += [""] if number else []
        lines += _facts(list(zip(header, row, strict=True)), width)
    return lines


def _picture(picture: Picture, width: int) -> list[str]:
    """Rows of shades, what the outermost columns stand for, and the legend."""
    shades = [SHADES[round(mark.level * (len(SHADES) - 1))] for mark in picture.marks]
    labels = [escaped(label) for label, _ in picture.rows]
    indent = max(map(display_width, labels), default=0)
    lines = []
    for label, (_, cells) in zip(labels, picture.rows, strict=True):
        drawn = "".join(
            f"{'|' if column in picture.borders else ''}{' ' if cell is None else shades[cell]}"
            for column, cell in enumerate(cells)
        )
        lines.append(f"{' ' * (indent - display_width(label))}{label} {drawn}".rstrip())
    num_columns = max((len(cells) for _, cells in picture.rows), default=0)
    num_columns += len(picture.borders)
    first, last = escaped(picture.first_column), escaped(picture.last_column)
    gap = " " * max(1, num_columns - display_width(first) - display_width(last))
    lines.append(
        f"{' ' * indent} {first}{gap}{last}" if first != last else f"{' ' * indent} {first}"
    )
    legend = "   ".join(
        f"{shade} {mark.name}" for shade, mark in zip(shades, picture.marks, strict=True)
    )
    note = _wrapped_line(picture.note, width) if picture.note else []
    return [*lines, *_wrapped_line(legend, width), *note]
