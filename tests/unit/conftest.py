"""Fixtures that more than one file of unit tests has."""

import sys

import pytest
from hypothesis import settings

from omnicache_cli.cli.main import exit_code_of_run
from tests.unit.exporting import Export
from tests.unit.showing import Ran, Show

settings.register_profile("unit", deadline=None)  # a deadline says how busy the machine is
settings.load_profile("unit")


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Export:
    """`omnicache export` with these arguments, in this process."""

    def export(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["omnicache", "export", *map(str, arguments)])
        code = exit_code_of_run()
        return Ran(code, *capsys.readouterr())

    return export


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """`omnicache show` with these arguments, in this process."""

    def show(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["omnicache", "show", *map(str, arguments)])
        code = exit_code_of_run()
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return show
