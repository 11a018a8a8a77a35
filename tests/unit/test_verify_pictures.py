"""The error of a key over token position, drawn."""

import re
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="rows are torch tensors")

from omnicache_cli.report.html import as_html  # noqa: E402
from omnicache_cli.report.model import MAX_PICTURE_COLUMNS, Report  # noqa: E402
from omnicache_cli.report.text import as_text  # noqa: E402
from omnicache_cli.verify.faults import Fault  # noqa: E402
from omnicache_cli.verify.pictures import error_pictures, positions_per_column  # noqa: E402
from omnicache_cli.verify.results import Pair, Verdict  # noqa: E402

EQUAL = Pair(
    *("repeat", "hit-0", "hidden_states", Verdict.EQUAL, "", 4, 1),
    allowed=2e-3,
    relative_floor=1e-3,
    row_errors=(0.0,) * 10,
)
WRONG = replace(
    EQUAL,
    key="layers.0",
    verdict=Verdict.CORRUPTION,
    fault=Fault.OTHER_BLOCK,
    diagnosis="rows 4 .. 7 are <of> block 0",
    row_errors=(0.0, 1e-3, 2e-3, 0.0, 0.5, 0.5, None, 0.5, 0.0),
)


@pytest.mark.parametrize(
    ("num_rows", "block_size", "width"),
    [(10, 4, 1), (115, 32, 2), (115, 16, 2), (997, 32, 32), (2000, 32, 32), (50_000, 32, 640)],
)
def test_columns_and_borders_fit_into_a_line(num_rows: int, block_size: int, width: int) -> None:
    assert positions_per_column(num_rows, block_size) == width
    columns = -(-num_rows // width)
    borders = -(-num_rows // block_size) if width < block_size else 0
    assert columns + borders <= MAX_PICTURE_COLUMNS


def test_a_picture_shows_each_row_between_the_borders_of_blocks() -> None:
    (picture,) = error_pictures([EQUAL, WRONG], 4)
    text = as_text(Report("verify", "T", {}, (picture,)))
    assert text.splitlines()[2:] == [
        "repeat, hit-0",
        "hidden_states \u00b7\u00b7\u00b7\u00b7|\u00b7\u00b7\u00b7\u00b7|\u00b7\u00b7",
        "     layers.0 \u00b7\u2591\u2592\u00b7|\u2588\u2588\u2593\u2588|\u00b7",
        "              token 0token 9".replace("0t", "0 t"),
        "\u00b7 equal   \u2591 within the noise floor   \u2592 within twice the floor   "
        "\u2593 no row   \u2588 beyond",
        "restored: tokens 0 .. 3; layers.0: rows 4 .. 7 are <of> block 0",
    ]
    page = as_html(Report("verify", "T", {}, (picture,)))
    assert re.findall(
        r'<rect x="(\d+)" y="14" width="(\d+)" height="13" class="(s\d)"/>', page
    ) == [
        ("99", "10", "s0"),
        ("109", "10", "s1"),
        ("119", "10", "s2"),
        ("129", "10", "s0"),
        ("139", "20", "s4"),
        ("159", "10", "s3"),
        ("169", "10", "s4"),
        ("179", "10", "s0"),
    ]
    assert re.findall(r'<path d="M(\d+) 0V28"/>', page) == ["139", "179"]
    note = "restored: tokens 0 .. 3; layers.0: rows 4 .. 7 are &lt;of&gt; block 0"
    assert f'<span class="under">{note}' in page


def test_what_is_equal_is_drawn_in_html_only() -> None:
    (picture,) = error_pictures([EQUAL], 4)
    report = Report("verify", "T", {}, (picture,))
    assert as_text(report) == "T\n"
    assert "repeat, hit-0" in as_html(report)
    assert list(error_pictures([replace(EQUAL, hit_tokens=0)], 4)) == []


def test_with_a_tolerance_there_is_no_floor_to_be_within() -> None:
    pair = replace(WRONG, allowed=None, verdict=Verdict.ROUNDING)
    (picture,) = error_pictures([pair], 4)
    assert [mark.name for mark in picture.marks][2] == "differs"
    assert set(picture.rows[0][1]) == {0, 2, 3}
