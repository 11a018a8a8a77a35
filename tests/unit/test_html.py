"""Reports as HTML pages: what stands in them, and what must never come out of them.

What a browser makes of a page is tested in tests/browser. Write the golden page anew with
`python -m tests.unit.test_html`, and read the difference.
"""

import base64
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicache_cli import __version__
from omnicache_cli.report import html
from omnicache_cli.report.html import MAX_NAME, MAX_ROWS, as_html
from omnicache_cli.report.model import Cell, Facts, Lines, Mark, Picture, Report, Section, Table

GOLDEN = Path(__file__).parent / "golden_report.html"
VERSION = "omnicache 0.0.0;"

VOID = {"meta", "link", "br", "hr", "img", "input", "col"}

HOSTILE = [
    "<script>window.ran = 1</script>",
    '"onload="window.ran = 1" x="',
    "'><img src=x onerror=window.ran=1>",
    "</td></table></style><style>*{display:none}</style>",
    "<!-- ",
    "&lt;b&gt; &amp; &#60;",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:window.ran=1",
]


class Reader(HTMLParser):
    """Elements, text per element, ids and links; refuses tags that do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[tuple[str, str]] = []
        self.cells: list[list[str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in <{tag}>"
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in {"td", "th"}:
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        self.texts.append((where, data))
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data

    def values(self, name: str) -> list[str | None]:
        return [value for _, one, value in self.attributes if one == name]

    def text_in(self, tag: str) -> list[str]:
        return [text for one, text in self.texts if one == tag]


def page_of(*sections: Section, title: str = "T") -> Reader:
    return Reader(as_html(Report("show", title, {}, sections)))


def golden_page() -> str:
    report = Report(
        "show",
        "Prefix-cache hits, <tiny>",
        {},
        (
            Facts("", {"model": "tiny", "blocks": 130, "rate": None}),
            Table(
                "Steps",
                ("step", "request", "hit_rate", "", "note"),
                [(0, "r0", None, False, None), (10, "é\x1b", 0.96875, True, "tail " * 9)],
            ),
            Table("Empty", ("a",), []),
            Lines("Findings", ["all is well", "  but look & again"]),
            Lines("", ["one more line"]),
            Picture(
                "Pool",
                (Mark("free", 0.0), Mark("in use", 1.0)),
                [("2", [0, 1, None]), ("1", [1, 1, 0])],
                "step 0",
                "step 2",
            ),
        ),
        "0.30.0",
    )
    return as_html(report).replace(f"omnicache {__version__};", VERSION)


def test_a_page_is_the_golden_one() -> None:
    assert golden_page() == GOLDEN.read_text(encoding="ascii")


def test_a_page_says_what_it_is_and_where_the_rest_is() -> None:
    page = as_html(Report("show", "T", {}))
    assert f"Written by omnicache {__version__}; no vLLM took part." in page
    assert "--format json" in page
    reader = Reader(page)
    assert (reader.text_in("title"), reader.text_in("h1")) == (["T - omnicache"], ["T"])


def test_a_page_loads_and_runs_nothing() -> None:
    reader = page_of(Table("A", ("a",), [(1,)]), Facts("B", {"b": 1}), Lines("C", ["c"]))
    assert not {"script", "link", "img", "iframe", "base", "form"} & set(reader.tags)
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    assert set(reader.values("href")) <= {"#a", "#b", "#c"}
    assert reader.values("src") == []
    assert (
        "meta",
        "content",
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    ) in reader.attributes
    style = "".join(reader.text_in("style"))
    assert "url(" not in style
    assert "@import" not in style


def test_the_one_script_is_allowed_by_its_hash() -> None:
    """Only on a page that has something to sort."""
    page = as_html(Report("show", "T", {}, (Table("A", ("a",), [(2,), (1,)]),)))
    reader = Reader(page)
    (script,) = reader.text_in("script")
    digest = base64.b64encode(hashlib.sha256(script.encode("ascii")).digest()).decode()
    assert [value for value in reader.values("content") if value and "script-src" in value] == [
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    ]
    for way_out in ("fetch", "XMLHttpRequest", "import(", "innerHTML", "eval", "location"):
        assert way_out not in script


def test_a_picture_is_drawn_as_bars_of_one_mark() -> None:
    page = as_html(
        Report(
            "show",
            "T",
            {},
            (
                Picture(
                    "Pool",
                    (Mark("free", 0.0), Mark("in use", 1.0)),
                    [("12", [0, 1, 1, None]), ("1", [1, 1, 0, 0])],
                    "step 0",
                    "step 3",
                    borders=[2],
                ),
            ),
        )
    )
    bars = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="13" class="(s\d)"/>', page)
    assert bars == [
        ("22", "0", "10", "s0"),
        ("32", "0", "20", "s4"),
        ("22", "14", "20", "s4"),
        ("42", "14", "20", "s0"),
    ]
    assert '<text x="14" y="11">12</text>\n<text x="14" y="25">1</text>' in page
    assert '<path d="M42 0V28"/>' in page
    assert '<svg width="62" height="28" viewBox="0 0 62 28" role="img"' in page


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_and_not_obeyed(text: str) -> None:
    plain = page_of(
        Table("A", ("b", "c"), [("d", "e")]), Facts("F", {"g": "h"}), Lines("I", ["j"]), title="k"
    )
    reader = page_of(
        Table(text, (text, "c"), [(text, text)]),
        Facts(text, {text: text}),
        Lines(text, [text]),
        title=text,
    )
    assert reader.tags == plain.tags
    assert reader.cells == [[text, "c"], [text, text], [text, text]]
    assert reader.text_in("li")[-1:] == [text]
    assert reader.text_in("h1") == [text]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("a\x00b", r"a\x00b"),
        ("a\udc80", r"a\udc80"),
        ("\x1b[31m\r\n", r"\x1b[31m\r\n"),
        ("日本 é", "日本 é"),
    ],
)
def test_what_a_reader_cannot_see_is_written_as_an_escape(text: str, shown: str) -> None:
    page = as_html(Report("show", text, {}, (Table("", ("v",), [(text,)]),)))
    assert page.isascii()
    reader = Reader(page)
    assert reader.text_in("h1") == [shown]
    assert reader.cells[1] == [shown]


def test_a_very_long_id_is_whole_in_the_page_and_short_where_it_names_something() -> None:
    text = "x" * 10_000
    reader = page_of(Table(text, ("v",), [(text,)]), title=text)
    assert reader.text_in("h1") == [text]
    assert reader.cells[1] == [text]
    assert reader.text_in("title") == [f"{'x' * MAX_NAME}… - omnicache"]
    assert ("section", "id", "x" * MAX_NAME) in reader.attributes


def test_ids_are_unique_and_links_have_a_target() -> None:
    titles = ["A b!", "a-3", "A B", "", "section", "", "日本", "A b", "a-b--title"]
    reader = page_of(*(Lines(title, ["x"]) for title in titles))
    ids = [value for tag, name, value in reader.attributes if (tag, name) == ("section", "id")]
    assert ids == [
        *("a-b", "a-3", "a-b-3", "section", "section-5", "section-6", "section-7", "a-b-8"),
        "a-b-title",
    ]
    every_id = reader.values("id")
    assert len(every_id) == len(set(every_id))
    assert {f"#{one}" for one in every_id} >= set(reader.values("href"))
    assert set(reader.values("aria-labelledby")) <= set(every_id)


def test_a_table_has_its_rows_headers_and_a_caption() -> None:
    rows: list[tuple[Cell, ...]] = [(number, None, f"r{number}") for number in range(12)]
    page = as_html(Report("show", "T", {}, (Table("Steps", ("step", "hit", "id"), rows),)))
    reader = Reader(page)
    assert reader.cells[0] == ["step", "hit", "id"]
    assert reader.cells[1:] == [[str(number), "-", f"r{number}"] for number in range(12)]
    assert reader.values("scope") == ["col"] * 3 + ["row"] * 12
    assert '<span class="unseen">Steps: </span>12 rows</caption>' in page
    assert '<th scope="col" class="n">step</th><th scope="col">hit</th>' in page
    assert '<tr><th scope="row" class="n">0</th><td class="none">-</td><td>r0</td></tr>' in page


def test_empty_sections_say_so() -> None:
    page = as_html(
        Report("show", "T", {}, (Table("A", ("a", "b"), []), Facts("B", {}), Lines("C", [])))
    )
    assert page.count("(none)") == 3
    assert Reader(page).cells == [["a", "b"]]


@pytest.mark.parametrize(
    ("section", "word", "num_shown"),
    [
        (Table("", ("a",), [(1,)] * (MAX_ROWS + 1)), "rows", MAX_ROWS),
        (Facts("", {str(number): 1 for number in range(MAX_ROWS + 1)}), "values", MAX_ROWS),
        (Lines("", ["a"] * (MAX_ROWS + 1)), "lines", MAX_ROWS),
    ],
)
def test_a_very_long_section_is_cut_and_says_where_the_rest_is(
    section: Section, word: str, num_shown: int
) -> None:
    page = as_html(Report("show", "T", {}, (section,)))
    assert f"The first 5,000 of 5,001 {word}; <code>--format json</code> has all." in page
    assert page.count("<tr>") + page.count("<li>") - page.count("<thead>") == num_shown


def test_a_section_that_just_fits_is_not_called_cut() -> None:
    assert "The first" not in as_html(Report("show", "T", {}, (Lines("", ["a"] * MAX_ROWS),)))


cells = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=50))


@given(st.text(), st.lists(st.tuples(cells, cells), max_size=4))
def test_any_report_is_a_well_formed_page(title: str, rows: list[tuple[Cell, ...]]) -> None:
    reader = page_of(
        Table(title, (title, "b"), rows),
        Facts(title, {str(row[0]): row[1] for row in rows}),
        Lines(title, [str(row[0]) for row in rows]),
        title=title,
    )
    assert reader.tags.count("section") == 3


def test_only_a_page_loads_the_template_engine() -> None:
    code = (
        "import sys; from omnicache_cli.report.formats import render; "
        "from omnicache_cli.report.model import Report; report = Report('show', 'T', {}); "
        "render(report, 'text', None); render(report, 'json', None); "
        "print('jinja2' in sys.modules); "
        "render(report, 'html', None); print('jinja2' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


def test_a_kind_of_section_without_html_stops_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other:
        pass

    monkeypatch.setattr("omnicache_cli.report.model.Section", Section | Other)
    source = Path(html.__file__).read_text(encoding="utf-8")
    with pytest.raises(TypeError, match=r"no HTML for sections of kind \['Other'\]"):
        exec(compile(source, html.__file__, "exec"), {"__name__": "a_copy"})  # noqa: S102


if __name__ == "__main__":
    GOLDEN.write_text(golden_page(), encoding="ascii")
