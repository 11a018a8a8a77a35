"""A run of stages of vLLM-Omni: each is named, found by its name, and has hits of its own."""

from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.errors import BadInputError
from omnicache_cli.report.formats import render
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.views import show_view
from tests.unit.run_builder import Admit, Recording, two_rounds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A thinker that hits in its second round, and a talker without a cache."""
    thinker = Recording(stage_id=0, stage="thinker")
    first = thinker.arrive("p0-r1", 40)
    thinker.step({first: 40}, admit={first: Admit([[1, 2, 3]])})
    thinker.finish(first, 1)
    second = thinker.arrive("p0-r2", 40)
    thinker.step({second: 8}, admit={second: Admit([[1, 2, 4]], hit=32)})
    thinker.finish(second, 1)
    talker = Recording(engine="host.2.0", stage_id=1, stage="talker", enable_prefix_caching=False)
    only = talker.arrive("p0-r1", 20)
    talker.step({only: 20}, admit={only: Admit([[1, 2]])})
    talker.finish(only, 1)
    thinker.write(tmp_path)
    talker.write(tmp_path, name="host.2")
    return tmp_path


def test_the_summary_lists_stages_and_their_hits(folder: Path) -> None:
    report = show_view(Run(folder), mode="--summary").report
    stages = [
        (one["stage_id"], one["stage"], one["requests"], one["hit_tokens"])
        for one in report.result["stages"]
    ]
    assert sorted(stages) == [(0, "thinker", 2, 32), (1, "talker", 1, 0)]
    assert "0 thinker" in render(report, "text", None)


def test_an_engine_is_found_by_its_stage_and_titled_with_it(folder: Path) -> None:
    report = show_view(Run(folder), mode="--requests", engine="thinker").report
    assert [one["hit_tokens"] for one in report.result["requests"]] == [0, 32]
    assert ", stage 0 thinker" in render(report, "text", None)
    with pytest.raises(BadInputError, match=r"has no engine code2wav; choose: 0 \(.*thinker\), 1 "):
        show_view(Run(folder), mode="--requests", engine="code2wav")


@pytest.mark.parametrize(
    ("options", "following"),
    [
        ({}, "--step 0 --engine 0"),
        ({"engine": "talker"}, "--step 0 --engine 1"),
        ({"mode": "--step", "step": 0, "engine": "1"}, '--request "#0" --engine 1'),
        ({"mode": "--request", "request": "#0", "engine": "1"}, "--step 0 --engine 1"),
        ({"mode": "--block", "block": 2, "engine": "talker"}, "--step 0 --engine 1"),
        ({"mode": "--summary"}, "--check"),
    ],
)
def test_what_comes_next_names_the_engine(
    options: dict[str, Any], following: str, folder: Path
) -> None:
    assert show_view(Run(folder), **options).next_options == following


def test_a_run_that_is_read_twice_is_read_in_the_same_order(folder: Path) -> None:
    """The number of an engine, which a user types, is its place in that order."""
    run = Run(folder)
    names = [[type(record).__name__ for _, record in run.records()] for _ in range(2)]
    assert names[0] == names[1]
    request = show_view(run, mode="--request", request="p0-r2", engine="thinker").report
    assert (
        request.result["engine"]
        == show_view(run, mode="--requests", engine="0").report.result["requests"][0]["engine"]
    )


def test_a_run_without_stages_has_none(tmp_path: Path) -> None:
    two_rounds().write(tmp_path)
    report = show_view(Run(tmp_path), mode="--summary").report
    assert report.result["stages"] == []
    assert "Stages" not in render(report, "text", None)
