"""What a browser makes of reports: everything that is in them, and nothing that is not."""

from pathlib import Path

import pytest

from tests.browser.conftest import HOSTILE_IDS, NUM_STEPS, Open, Show, result_of

VIEWS = [
    (),
    ("--step", "0"),
    ("--request", "#0"),
    ("--request", "#6"),
    ("--check",),
    ("--summary",),
    ("--blocks",),
    ("--requests",),
    ("--evictions",),
]
"""Request 6 has the id of ten thousand characters."""

WIDTHS = (360, 1280)

NUM_TEXT_ROWS = 1000

CONTRASTS = """
() => {
  const channel = value => {
    value /= 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  const parsed = text => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const background = element => {
    for (let one = element; one; one = one.parentElement) {
      const [r, g, b, alpha = 1] = parsed(getComputedStyle(one).backgroundColor);
      if (alpha === 1) return [r, g, b];
      if (alpha !== 0) throw new Error("a background that shines through");
    }
    throw new Error("no background");
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    if (!node.textContent.trim()) continue;
    const element = node.parentElement;
    const behind = background(element);
    const [light, dark] = [luminance(parsed(getComputedStyle(element).color)), luminance(behind)]
      .sort((a, b) => b - a);
    const name = element.tagName.toLowerCase() + "." + element.className;
    found[name] = Math.min(found[name] ?? 99, (light + 0.05) / (dark + 0.05));
  }
  return {found, paper: luminance(background(document.body))};
}
"""
"""Per kind of element the lowest contrast of a text with what is behind it, as WCAG 2 counts it."""


@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
def test_a_page_is_quiet_and_loads_nothing(
    view: tuple[str, ...], open_page: Open, show: Show, hostile_run: Path
) -> None:
    opened = open_page(show(hostile_run, *view))
    assert opened.is_quiet(), (opened.console, opened.requested)
    assert opened.page.locator("h1").count() == 1


def test_a_page_needs_no_script_and_no_network(
    open_page: Open, show: Show, hostile_run: Path
) -> None:
    path = show(hostile_run, "--step", "0")
    plain = open_page(path).page.inner_text("body")
    assert len(plain) > 10_000

    bare = open_page(path, java_script_enabled=False, offline=True)
    assert bare.is_quiet()
    assert bare.page.inner_text("body") == plain


def test_title_and_heading_say_what_the_page_is(
    open_page: Open, show: Show, hostile_run: Path
) -> None:
    page = open_page(show(hostile_run)).page
    assert page.title() == "Steps of run - omnicache"
    assert page.get_by_role("heading", level=1).all_inner_texts() == ["Steps of run"]
    assert page.get_by_role("heading", level=2).all_inner_texts() == [
        "Tokens, free blocks, times in ms"
    ]


# -- rows -------------------------------------------------------------------------------------


def rows_in(open_page: Open, path: Path, name: str) -> list[list[str]]:
    table = open_page(path).page.get_by_role("table", name=name)
    rows: list[list[str]] = table.evaluate(
        "table => [...table.tBodies[0].rows].map(row => [...row.cells].map(one => one.innerText))"
    )
    return rows


def test_steps_are_those_of_the_json(open_page: Open, show: Show, hostile_run: Path) -> None:
    steps = result_of(show(hostile_run, suffix=".json"))["steps"]
    rows = rows_in(open_page, show(hostile_run), "Tokens, free blocks")
    assert len(rows) == len(steps) == 2
    assert [row[:4] for row in rows] == [
        [str(one[name]) for name in ("step", "num_requests", "num_scheduled_tokens")]
        + [str(one["num_prefill_tokens"])]
        for one in steps
    ]


def test_requests_of_a_step_are_those_of_the_json(
    open_page: Open, show: Show, hostile_run: Path
) -> None:
    step = result_of(show(hostile_run, "--step", "0", suffix=".json"))
    rows = rows_in(open_page, show(hostile_run, "--step", "0"), "Requests")
    assert len(rows) == len(step["requests"]) == len(HOSTILE_IDS)


def test_invariants_are_those_of_the_json(open_page: Open, show: Show, broken_run: Path) -> None:
    invariants = result_of(show(broken_run, "--check", suffix=".json"))["invariants"]
    rows = rows_in(open_page, show(broken_run, "--check"), "Invariants of 2 steps")
    assert [(row[0], row[4]) for row in rows] == [
        (str(one["invariant"]), str(one["broken"])) for one in invariants
    ]
    assert "1" in {row[4] for row in rows}


def test_a_long_run_shows_as_many_steps_as_text_and_says_how_many_follow(
    open_page: Open, show: Show, long_run: Path
) -> None:
    assert len(result_of(show(long_run, suffix=".json"))["steps"]) == NUM_STEPS
    rows = rows_in(open_page, show(long_run), "Tokens, free blocks")
    assert [row[0] for row in rows] == [str(number) for number in range(NUM_TEXT_ROWS)]
    page = open_page(show(long_run)).page
    assert page.get_by_text("… and 240 more steps; --step N or --format json for all").count() == 1


# -- strangers' text --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["obeyed", "ignored"])
@pytest.mark.parametrize("number", range(len(HOSTILE_IDS)))
def test_a_hostile_id_is_text_and_never_runs(
    number: int, policy: str, open_page: Open, show: Show, hostile_run: Path
) -> None:
    """Also where nothing but the escaping holds: the page's own policy ignored."""
    shown = {4: r"\u202eevil\u2066", 5: r"a\x00b\x1b[31m"}.get(number, HOSTILE_IDS[number])
    path = show(hostile_run, "--request", f"#{number}")
    opened = open_page(path, bypass_csp=policy == "ignored")
    assert opened.page.inner_text("h1") == f"Request #{number}: {shown}"
    assert opened.page.evaluate("window.ran") is None
    assert opened.page.locator("img, iframe, object, [onload], [onerror]").count() == 0
    assert opened.page.locator("script").count() <= 1  # ours, which sorts
    assert opened.page.locator("style").count() == 1
    assert opened.is_quiet()

    step = open_page(show(hostile_run, "--step", "0"), bypass_csp=policy == "ignored")
    cell = step.page.get_by_role("table", name="Requests").locator("tbody tr").nth(number)
    assert cell.locator("td").first.inner_text() == shown
    assert step.page.evaluate("window.ran") is None
    assert step.is_quiet()


def test_the_policy_of_a_page_forbids_scripts(
    open_page: Open, show: Show, hostile_run: Path, tmp_path: Path
) -> None:
    """A second line of defence: it holds where a script got into the page nevertheless. The page
    has one of its own, which is allowed by its hash."""
    path = tmp_path / "injected.html"
    page = show(hostile_run).read_text(encoding="ascii")
    path.write_text(
        page.replace("<h1>", "<script>window.ran = 1</script><img src=x onerror=window.ran=1><h1>"),
        encoding="ascii",
    )
    opened = open_page(path)
    assert opened.page.evaluate("window.ran") is None
    assert len(opened.console) >= 2
    assert all("Content Security Policy" in line for line in opened.console)


# -- how it looks -----------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
def test_a_page_never_scrolls_sideways(
    view: tuple[str, ...], width: int, open_page: Open, show: Show, hostile_run: Path
) -> None:
    page = open_page(show(hostile_run, *view), width=width).page
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_a_wide_table_scrolls_inside_itself_under_its_headers(
    open_page: Open, show: Show, long_run: Path
) -> None:
    page = open_page(show(long_run), width=360).page
    box = page.get_by_role("region", name="Tokens, free blocks")
    assert box.evaluate("one => one.scrollWidth > one.clientWidth")
    box.evaluate("one => one.scrollTo(200, 5000)")
    corner = box.locator("thead th").first.bounding_box()
    outer = box.bounding_box()
    assert corner is not None
    assert outer is not None
    assert (corner["x"] - outer["x"], corner["y"] - outer["y"]) == (1, 1)  # its border


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
def test_text_stands_out_in_light_and_in_dark(
    view: tuple[str, ...], scheme: str, open_page: Open, show: Show, hostile_run: Path
) -> None:
    result = open_page(show(hostile_run, *view), color_scheme=scheme).page.evaluate(CONTRASTS)
    assert {name: ratio for name, ratio in result["found"].items() if ratio < 4.5} == {}
    assert len(result["found"]) >= 6
    assert (result["paper"] < 0.1) == (scheme == "dark")


def test_numbers_are_aligned_right_in_digits_of_one_width(
    open_page: Open, show: Show, long_run: Path
) -> None:
    page = open_page(show(long_run)).page
    column = page.get_by_role("table", name="Tokens").locator("tbody tr > :nth-child(6)")
    styles = column.evaluate_all(
        "cells => cells.map(one => getComputedStyle(one)).map(one => "
        "[one.textAlign, one.fontVariantNumeric.includes('tabular-nums')])"
    )
    assert len(styles) == NUM_TEXT_ROWS
    assert all(one == ["right", True] for one in styles)


def test_paper_shows_what_a_screen_scrolls(
    open_page: Open, show: Show, long_run: Path, hostile_run: Path
) -> None:
    cut = (
        "[...document.querySelectorAll('.scroll, .long > div, h1')]"
        ".filter(one => one.scrollHeight > one.clientHeight + 1).length"
    )
    for path in (show(long_run), show(hostile_run, "--step", "0"), show(hostile_run, *VIEWS[3])):
        page = open_page(path, width=800).page
        assert page.evaluate(cut) >= 1
        page.emulate_media(media="print")
        assert page.evaluate(cut) == 0


def test_paper_is_light_for_a_dark_screen(open_page: Open, show: Show, hostile_run: Path) -> None:
    page = open_page(show(hostile_run), color_scheme="dark").page
    page.emulate_media(media="print", color_scheme="dark")
    result = page.evaluate(CONTRASTS)
    assert result["paper"] == 1
    assert min(result["found"].values()) >= 4.5


def test_links_lead_to_sections(open_page: Open, show: Show, hostile_run: Path) -> None:
    page = open_page(show(hostile_run, "--step", "0")).page
    links = page.get_by_role("navigation", name="Sections").get_by_role("link")
    assert links.count() == page.get_by_role("heading", level=2).count() == 6
    links.last.click()
    assert page.url.endswith("#events-after-it")
    assert page.locator(":target h2").inner_text() == "Events after it"
