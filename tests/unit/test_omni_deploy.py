"""What a deploy file makes of prefix caching: states, words, exit codes."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from omnicache_cli.engine.omni.plugin import PLATFORM, cpu_platform
from omnicache_cli.engine.omni.upstream import is_known
from omnicache_cli.report.formats import render
from omnicache_cli.verify.deploy import Caching, StageLint, deploy_report, exit_code, summary


def stage(kind: str = "llm_ar", *, on: bool = False, **more: Any) -> StageLint:
    return StageLint(0, "thinker", kind, on, **more)


@pytest.mark.parametrize(
    ("one", "caching", "code"),
    [
        (stage(on=True), Caching.ON, 0),
        (stage(), Caching.POSSIBLE, 0),
        (stage(on=True, reasons=("no",)), Caching.REFUSED, 1),
        (stage(reasons=("no",)), Caching.IMPOSSIBLE, 0),
        (stage(dangers=("no",)), Caching.UNSAFE, 0),
        (stage(on=True, dangers=("no",)), Caching.UNSAFE, 1),
        (stage("llm_generation"), Caching.NONE, 0),
        (stage("diffusion"), Caching.NONE, 0),
    ],
)
def test_the_state_of_a_stage_and_the_exit_code(
    one: StageLint, caching: Caching, code: int
) -> None:
    assert (one.caching, exit_code([one])) == (caching, code)


def test_a_report_names_each_stage_and_why() -> None:
    stages = [
        StageLint(0, "thinker", "llm_ar", True, reasons=("drafts",)),
        StageLint(1, "talker", "llm_ar", False, dangers=("placeholders",), remarks=("chunks",)),
        StageLint(2, "code2wav", "llm_generation", False),
    ]
    report = deploy_report(stages, {"model": "m"}, vllm_version="0.30.0")
    text = render(report, "text", None)
    assert "0 thinker   llm_ar          refused" in text
    assert "Refused because\n0 thinker: drafts" in text
    assert "Wrong hits, if it were on\n1 talker: placeholders" in text
    assert "To know\n1 talker: chunks" in text
    assert summary(stages) == (
        "lint: talker must stay off; thinker refused: the stage will not start; code2wav without "
        "a tensor cache"
    )
    assert [one["caching"] for one in report.result["stages"]] == [
        *("refused", "must stay off", "no tensor cache")
    ]


@pytest.mark.parametrize(
    ("version", "known"),
    [
        *(("0.30.0", True), ("0.30.1", True), ("0.30.0+cpu", True)),
        *(("0.29.1", False), ("0.31.0", False), ("0.30.0rc1", False), ("0.3.0", False)),
    ],
)
def test_which_vllm_omni_is_known(version: str, known: bool) -> None:
    assert is_known(version) is known


@pytest.mark.parametrize(("on_cpu", "answer"), [(True, PLATFORM), (False, None)])
def test_the_platform_is_offered_on_a_cpu_only(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, answer: str | None
) -> None:
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: on_cpu))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert cpu_platform() == answer
