"""The page of every command, made from the reports of real runs that docs/gallery.py recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from docs.gallery import FOLDER, load
from omnicache_cli.report.html import as_html
from omnicache_cli.report.model import Report, Table
from tests.browser.conftest import Open
from tests.browser.test_pages import CONTRASTS

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
WIDTHS = (1280, 400)
PAPER = 800
"""Pixels: what a sheet of A4 has between its margins."""

CUT = """
width => [...document.querySelectorAll(".scroll, .long > div, svg")].filter(one =>
  one.scrollHeight > one.clientHeight + 1 || one.getBoundingClientRect().right > width).length
"""
"""How many boxes show only a part on paper, or reach over its edge."""

Write = Callable[[Report], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(report: Report) -> Path:
        path = tmp_path / "page.html"
        path.write_text(as_html(report), encoding="ascii")
        return path

    return to_file


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_quiet_fits_and_can_be_read(name: str, open_page: Open, write: Write) -> None:
    """On a screen, light and dark, wide and narrow, and on paper."""
    opened = open_page(write(load(FOLDER / f"{name}.json")))
    page = opened.page
    assert page.locator("h1").count() == 1
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        result = page.evaluate(CONTRASTS)
        assert {kind: ratio for kind, ratio in result["found"].items() if ratio < 4.5} == {}
        assert (result["paper"] < 0.1) == (scheme == "dark")
    page.set_viewport_size({"width": PAPER, "height": 800})
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(CUT, PAPER) == 0
    assert page.evaluate(CONTRASTS)["paper"] == 1
    assert page.evaluate("document.documentElement.scrollWidth") == PAPER
    assert opened.is_quiet(), (opened.console, opened.requested)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_whole_without_scripts(name: str, open_page: Open, write: Write) -> None:
    path = write(load(FOLDER / f"{name}.json"))
    bare = open_page(path, java_script_enabled=False, offline=True)
    assert bare.page.locator("button").count() == 0
    assert bare.page.inner_text("body") == open_page(path).page.inner_text("body")


# -- sorting ----------------------------------------------------------------------------------

ROWS = [
    ("b10", 2, 1e-05),
    ("b9", None, 12.5),
    ("a", 10, None),
    (None, -3, 2500000.0),
]
TABLE = Table("Numbers", ("name", "count", "share"), ROWS)


def shown(page: Page) -> list[str]:
    cells: list[str] = page.locator("tbody tr > :first-child").all_inner_texts()
    return cells


def sorting(page: Page) -> list[str | None]:
    headers = page.get_by_role("columnheader")
    return [headers.nth(number).get_attribute("aria-sort") for number in range(headers.count())]


def test_a_column_sorts_up_down_and_back(open_page: Open, write: Write) -> None:
    """Numbers by their value, texts by the numbers in them; what has no value is last."""
    opened = open_page(write(Report("show", "T", {}, (TABLE,))))
    page = opened.page
    came = ["b10", "b9", "a", "-"]
    assert (shown(page), sorting(page)) == (came, [None, None, None])
    count = page.get_by_role("button", name="count")
    count.click()
    assert (shown(page), sorting(page)) == (["-", "b10", "a", "b9"], [None, "ascending", None])
    count.click()
    assert (shown(page), sorting(page)) == (["a", "b10", "-", "b9"], [None, "descending", None])
    count.click()
    assert (shown(page), sorting(page)) == (came, [None, None, None])
    page.get_by_role("button", name="share").click()
    assert shown(page) == ["b10", "b9", "-", "a"]
    page.get_by_role("button", name="name").click()
    assert (shown(page), sorting(page)) == (["a", "b9", "b10", "-"], ["ascending", None, None])
    assert opened.is_quiet()


def test_a_keyboard_sorts(open_page: Open, write: Write) -> None:
    page = open_page(write(Report("show", "T", {}, (TABLE,)))).page
    page.get_by_role("button", name="count").focus()
    page.keyboard.press("Enter")
    assert sorting(page) == [None, "ascending", None]
    page.keyboard.press("Space")
    assert sorting(page) == [None, "descending", None]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "share"


def test_a_table_of_one_row_and_facts_are_not_to_be_sorted(open_page: Open, write: Write) -> None:
    one = Table("One", ("a",), [(1,)])
    page = open_page(write(Report("show", "T", {}, (one,)))).page
    assert page.get_by_role("button").count() == 0
    assert page.locator("script").count() == 0


def test_each_table_of_a_page_sorts_by_itself(open_page: Open, write: Write) -> None:
    page = open_page(write(Report("show", "T", {}, (TABLE, TABLE)))).page
    page.get_by_role("button", name="count").nth(1).click()
    tables = page.locator("tbody")
    first, second = (
        tables.nth(number).locator("tr > :first-child").all_inner_texts() for number in range(2)
    )
    assert (first, second) == (["b10", "b9", "a", "-"], ["-", "b10", "a", "b9"])
