"""The documentation cannot drift from the commands."""

from pathlib import Path

import pytest

from docs.gallery import FOLDER, MAX_ALL_BYTES, MAX_PICTURE_BYTES, PAGES, dump, load
from omnicache_cli.cli.app import load_command
from omnicache_cli.cli.commands import COMMANDS

DOCS = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_documented_and_shows_an_example(name: str) -> None:
    help_text = load_command(name).help
    assert f"`omnicache {name}" in DOCS
    assert f"\nExample: omnicache {name}" in help_text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_listing_says_what_the_command_says_of_itself(name: str) -> None:
    assert load_command(name).help.splitlines()[0] == COMMANDS[name].summary


def test_the_architectures_of_kv_size_are_all_listed() -> None:
    from omnicache_cli.kv_size.architectures.table import ARCHITECTURES

    page = (Path(__file__).parents[2] / "docs" / "kv-size.md").read_text(encoding="utf-8")
    assert {name for name in ARCHITECTURES if f"`{name}`" not in page} == set()


def test_the_doctors_page_names_every_check_and_every_variable_that_is_read() -> None:
    from omnicache_cli.doctor.diagnosis import checks_of
    from omnicache_cli.engine.doctor.system import KNOWN_VARIABLES
    from omnicache_cli.engine.versions import is_tested
    from tests.unit.test_doctor import SOUND

    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert {name for name in KNOWN_VARIABLES if f"`{name}`" not in page} == set()
    names = {one.name for one in checks_of(SOUND, is_tested)}
    assert {name for name in names if name not in page} == set()


# -- the gallery ------------------------------------------------------------------------------

WITHOUT_A_RECORDED_PAGE = {"demo", "export"}
"""demo shows its reports one by one, and has no --format; export writes files, no report."""


def test_every_command_with_pages_has_a_recorded_one() -> None:
    """The browser tests open them."""
    recorded = {load(path).command for path in FOLDER.glob("*.json")}
    assert recorded == COMMANDS.keys() - WITHOUT_A_RECORDED_PAGE


def test_the_gallery_shows_every_picture_with_the_command_that_made_it() -> None:
    page = (FOLDER.parent / "gallery.md").read_text(encoding="utf-8")
    pictured = [one for one in PAGES if one.is_pictured]
    for one in pictured:
        assert f"![{one.caption}](gallery/{one.name}.png)" in page
        shown = one.command.replace("{root}/", "").replace("{config}/", "")
        assert (
            f"omnicache {shown.removesuffix(' --format html')} {one.into} {one.name}.html" in page
        )
    assert {path.stem for path in FOLDER.glob("*.png")} == {one.name for one in pictured}
    assert {path.stem for path in FOLDER.glob("*.json")} == {one.name for one in PAGES}


def test_pictures_are_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.glob("*.png")]
    assert max(sizes) <= MAX_PICTURE_BYTES
    assert sum(sizes) <= MAX_ALL_BYTES


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_recorded_report_is_loaded_as_it_was_and_names_no_machine(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    assert dump(load(path)) == text
    assert str(FOLDER.parents[1]) not in text
    assert "/tmp" not in text
