"""Reports as text and as JSON."""

import json
import math
import os
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicache_cli import __version__
from omnicache_cli.errors import UsageError
from omnicache_cli.report.formats import FORMATS, Format, format_for, render
from omnicache_cli.report.json import as_json
from omnicache_cli.report.layout import display_width, escaped, wrapped
from omnicache_cli.report.model import (
    Cell,
    Facts,
    Lines,
    Mark,
    Picture,
    Report,
    Section,
    Table,
)
from omnicache_cli.report.text import WIDTH, as_text, width_here

STEPS = Table(
    "Steps",
    ("step", "request", "hit_rate", "cached", "note"),
    [(0, "r0", None, False, None), (10, "r1", 0.96875, True, "tail only")],
)


def text_of_table(columns: tuple[str, ...], *rows: tuple[Cell, ...]) -> list[str]:
    return as_text(Report("show", "T", {}, (Table("", columns, rows),))).splitlines()[1:]


def test_text_aligns_numbers_right_and_shows_nothing_known_as_a_dash() -> None:
    report = Report(
        "show",
        "Prefix-cache hits, tiny",
        {},
        (
            Facts("", {"model": "tiny", "blocks": 130}),
            STEPS,
            Lines("Findings", ["all is well", "  but look again"]),
        ),
    )
    assert as_text(report).splitlines() == [
        "Prefix-cache hits, tiny",
        "model   tiny",
        "blocks  130",
        "",
        "Steps",
        "step  request  hit_rate  cached  note",
        "   0  r0              -  no      -",
        "  10  r1        0.96875  yes     tail only",
        "",
        "Findings",
        "all is well",
        "  but look again",
    ]


def test_rows_that_must_stay_on_one_line_come_closer_and_then_get_wider() -> None:
    def lines(num_columns: int, value: int) -> list[str]:
        columns = tuple(f"c{number}" for number in range(num_columns))
        table = Table("", columns, [(value,) * num_columns], one_line_rows=True)
        return as_text(Report("show", "T", {}, (table,))).splitlines()[1:]

    assert lines(3, 12345) == ["   c0     c1     c2", "12345  12345  12345"]
    assert lines(15, 12345)[1] == " ".join(["12345"] * 15)
    assert lines(20, 12345)[1] == " ".join(["12345"] * 20)


def test_empty_sections_say_so() -> None:
    report = Report("show", "T", {}, (Table("A", ("a", "b"), []), Facts("B", {}), Lines("C", [])))
    assert as_text(report).splitlines() == [
        *("T", "", "A", "a  b", "(none)", "", "B", "(none)", "", "C", "(none)")
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1 + 0.2, "0.3"),
        (1234567.8, "1234568"),
        (1.5e-9, "1.5e-09"),
        (math.nan, "nan"),
        (True, "yes"),
        (10**20, "1" + "0" * 20),
    ],
)
def test_values_are_shown_short_and_exact_enough(value: Cell, shown: str) -> None:
    assert text_of_table(("v",), (value,))[1].strip() == shown


def test_a_long_cell_wraps_inside_its_column() -> None:
    assert text_of_table(("n", "blocks", "owner"), (1, "1, " * 40 + "end", "r0")) == [
        "n  blocks" + " " * 86 + "owner",
        "1  " + ("1, " * 29 + "1,").ljust(90) + "  r0",
        "   1, 1, 1, 1, 1, 1, 1, 1, 1, 1, end",
    ]


def test_a_long_header_of_short_numbers_wraps_before_the_text_column_vanishes() -> None:
    columns = (*(f"a_number_of_tokens_{letter}" for letter in "abcde"), "text")
    lines = text_of_table(columns, (*range(5), "word " * 10))
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1].split()[-1] == "word"


def test_what_does_not_fit_side_by_side_is_written_one_value_per_line() -> None:
    columns = tuple(f"column{number}" for number in range(20))
    lines = text_of_table(columns, tuple(range(20)), tuple(range(20)))
    assert lines[:2] == ["column0   0", "column1   1"]
    assert lines[19:22] == ["column19  19", "", "column0   0"]


def test_a_table_refuses_a_row_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match=r"table 'T': a row of 1 cells under 2 columns"):
        Table("T", ("a", "b"), [(1,)])


def test_what_a_terminal_would_act_on_is_escaped() -> None:
    hostile = "\x1b[31mred\x07\r\n\u202eback\udc80\x9b"
    assert escaped(hostile) == r"\x1b[31mred\x07\r\n\u202eback\udc80\x9b"
    assert text_of_table(("v",), (hostile,))[1] == escaped(hostile)


def test_wide_characters_keep_the_columns_aligned() -> None:
    assert text_of_table(("v", "w"), ("日本", "x"), ("abcd", "y")) == [
        "v     w",
        "日本  x",
        "abcd  y",
    ]


cells = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(), st.text(max_size=250)
)


@given(st.integers(1, 30).flatmap(lambda n: st.lists(st.tuples(*[cells] * n), max_size=5)))
def test_text_is_never_wider_than_a_hundred_columns(rows: list[tuple[Cell, ...]]) -> None:
    columns = tuple(f"column_{number}" for number in range(len(rows[0]) if rows else 3))
    sections = (
        Table("", columns, rows),
        Facts("", {str(row[0]): row[-1] for row in rows}),
        Lines("", [str(cell) for row in rows for cell in row]),
    )
    text = as_text(Report("show", "T", {}, sections))
    assert max(map(display_width, text.split("\n"))) <= WIDTH


@given(st.text(), st.integers(2, 40))
def test_wrapping_loses_nothing_but_spaces(text: str, width: int) -> None:
    assert "".join(wrapped(text, width)).replace(" ", "") == text.replace(" ", "")


def test_json_is_the_envelope_and_then_the_result() -> None:
    report = Report("show", "T", {"steps": 2, "rows": ({"hit": None},)}, (STEPS,), "0.30.0")
    assert json.loads(as_json(report)) == {
        "schema_version": 1,
        "tool_version": __version__,
        "vllm_version": "0.30.0",
        "command": "show",
        "steps": 2,
        "rows": [{"hit": None}],
    }


def test_json_has_null_where_a_number_is_not_finite() -> None:
    result = {"values": [math.nan, math.inf, 1.5], "nested": {"rate": -math.inf}}
    parsed = json.loads(as_json(Report("show", "T", result)))
    assert (parsed["values"], parsed["nested"]) == ([None, None, 1.5], {"rate": None})


def test_json_is_ascii_so_that_any_terminal_can_take_it() -> None:
    assert as_json(Report("show", "T", {"x": "\u202eé\udc80"})).isascii()


def test_a_result_cannot_replace_a_name_of_the_envelope() -> None:
    with pytest.raises(ValueError, match=r"names of the envelope: \['command'\]"):
        as_json(Report("show", "T", {"command": "x"}))


@pytest.mark.parametrize("result", [{"x": {1: 2}}, {"x": Path("y")}, {"x": {1, 2}}])
def test_json_refuses_what_it_cannot_say(result: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        as_json(Report("show", "T", result))


@pytest.mark.parametrize(
    ("requested", "output", "picked"),
    [
        (None, None, "text"),
        (None, Path("a.json"), "json"),
        (None, Path("a.JSON"), "json"),
        (None, Path("a.html"), "html"),
        (None, Path("a.HTML"), "html"),
        (None, Path("a.jpeg"), "text"),
        (None, Path("a.txt"), "text"),
        (None, Path("json"), "text"),
        ("text", Path("a.json"), "text"),
        ("json", None, "json"),
    ],
)
def test_the_file_name_picks_the_format_unless_asked(
    requested: Format | None, output: Path | None, picked: Format
) -> None:
    assert format_for(requested, output) == picked


@pytest.mark.parametrize("name", ["a.csv", "a.HTM", "a.parquet", "a.md", "a.xml", "a.yaml"])
def test_a_file_name_of_a_format_that_is_not_there_is_refused_unless_asked(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        format_for(None, Path(name))
    assert str(caught.value) == (
        f"{name} names a format that is not there; formats: text, json, html; choose one with "
        "--format, or name a .txt, .json or .html file"
    )
    assert format_for("json", Path(name)) == "json"


def test_every_format_on_offer_can_be_rendered() -> None:
    report = Report("show", "T", {})
    assert set(get_args(Format)) == set(FORMATS)
    assert {name: render(report, name, None)[0] for name in FORMATS} == {
        "text": "T",
        "json": "{",
        "html": "<",
    }


MARKS = (Mark("free", 0.0), Mark("cached", 0.25), Mark("in use", 1.0))


def test_a_picture_has_labels_ends_and_a_legend() -> None:
    rows = [("16", [0, 1, 2, None, 2]), ("8", [0, 0, 1, 2, None])]
    picture = Picture("Pool", MARKS, rows, "0", "4")

    assert as_text(Report("show", "T", {}, (picture,))).splitlines() == [
        "T",
        "",
        "Pool",
        "16 ·░█ █",
        " 8 ··░█",
        "   0   4",
        "· free   ░ cached   █ in use",
    ]


def test_the_ends_of_a_narrow_picture_do_not_run_together() -> None:
    one = Picture("", MARKS, [("1", [2])], "step 7", "step 7")
    two = Picture("", MARKS, [("1", [2, 1])], "step 7", "step 8")

    assert as_text(Report("show", "T", {}, (one,))).splitlines()[1:3] == ["1 █", "  step 7"]
    assert as_text(Report("show", "T", {}, (two,))).splitlines()[1:3] == ["1 █░", "  step 7 step 8"]


def test_a_picture_that_fits_into_no_line_is_a_bug() -> None:
    with pytest.raises(ValueError, match="rows of"):
        Picture("Pool", MARKS, [("1", [0]), ("2", [0, 0])], "0", "1")
    with pytest.raises(ValueError, match="rows of"):
        Picture("Pool", MARKS, [("1", [0] * 81)], "0", "80")
    with pytest.raises(ValueError, match="a label over"):
        Picture("Pool", MARKS, [("x" * 19, [0])], "0", "0")


def test_every_kind_of_section_can_be_written_in_every_format() -> None:
    sections = {Table: STEPS, Facts: Facts("F", {"a": 1}), Lines: Lines("L", ["b"])}
    sections[Picture] = Picture("P", MARKS, [("1", [0, None, 2])], "0", "2")
    assert set(get_args(Section)) == set(sections)
    for section in sections.values():
        report = Report("show", "T", {}, (section,))
        for name in FORMATS:
            assert render(report, name, None)


@pytest.mark.parametrize(
    ("columns", "is_terminal", "width"),
    [
        (None, False, 100),
        (None, True, 80),
        ("80", False, 100),
        ("70", True, 70),
        ("30", True, 60),
        ("300", True, 100),
        ("no number", True, 80),
    ],
)
def test_a_narrow_terminal_makes_lines_narrower(
    columns: str | None, is_terminal: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, 24)))
    assert width_here() == width
    report = Report("show", "word " * 60, {}, (Lines("", ["word " * 60]),))
    lines = as_text(report, width_here()).splitlines()
    assert max(map(len, lines)) in range(width - 5, width + 1)
    assert render(report, None, None) == as_text(report, width)
    assert render(report, "text", Path("f.txt")) == as_text(report, WIDTH)
