"""The documentation cannot drift from the commands."""

from pathlib import Path

import pytest

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
