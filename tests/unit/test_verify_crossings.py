"""What passes between stages: equal, corrupt, or not comparable at all."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="payloads are torch tensors")

from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from omnicache_cli.errors import EngineFailedError  # noqa: E402
from omnicache_cli.report.formats import render  # noqa: E402
from omnicache_cli.verify.crossings import (  # noqa: E402
    ERROR_SUFFIX,
    META,
    SUFFIX,
    Crossed,
    Crossing,
    Direction,
    compare_crossings,
    read_crossings,
)
from omnicache_cli.verify.pipeline_report import (  # noqa: E402
    StageHits,
    judge_pipeline,
    pipeline_report,
    summary_line,
)
from omnicache_cli.verify.results import Verdict  # noqa: E402

ROWS = torch.arange(12.0).reshape(4, 3)
HITS = [StageHits(0, "thinker", True, 40, 32), StageHits(1, "talker", False, 0, 0)]


def sent(number: int = 0, **tensors: Tensor) -> Crossing:
    return Crossing(0, "thinker", Direction.SENT, number, f"r{number}", tensors)


def received(number: int = 0, **tensors: Tensor) -> Crossing:
    return Crossing(1, "talker", Direction.RECEIVED, number, f"r{number}", tensors)


def only(results: list) -> tuple[Crossed, str]:
    (one,) = results
    return one.verdict, one.diagnosis


def test_what_is_bit_for_bit_the_same_is_equal() -> None:
    results = compare_crossings([sent(a=ROWS)], [sent(a=ROWS)], [sent(a=ROWS.clone())])
    assert only(results) == (Crossed.EQUAL, "")
    assert (results[0].max_abs_error, results[0].run_to_run, results[0].shape) == (0.0, 0.0, (4, 3))


@pytest.mark.parametrize(
    ("warm", "diagnosis"),
    [
        ({"a": ROWS + 0.25}, "off by up to 0.25, and two runs without a cache are equal"),
        ({"a": ROWS[:1]}, "(1, 3) float32, without a cache (4, 3) float32"),
        ({}, "it did not pass with the cache on"),
    ],
)
def test_what_differs_where_runs_without_a_cache_agree_is_corruption(
    warm: dict[str, Tensor], diagnosis: str
) -> None:
    results = compare_crossings([sent(a=ROWS)], [sent(a=ROWS)], [sent(**warm)])
    assert only(results) == (Crossed.CORRUPTION, diagnosis)


def test_a_key_that_passes_with_the_cache_only_is_corruption() -> None:
    results = compare_crossings([sent(a=ROWS)], [sent(a=ROWS)], [sent(a=ROWS, b=ROWS)])
    assert [(one.key, one.verdict) for one in results] == [
        ("a", Crossed.EQUAL),
        ("b", Crossed.CORRUPTION),
    ]


@pytest.mark.parametrize(
    ("again", "run_to_run", "diagnosis"),
    [
        (ROWS + 2, 2.0, "two runs without a cache differ by up to 2"),
        (ROWS[:2], None, "two runs without a cache differ in shape"),
    ],
)
def test_what_differs_without_a_cache_too_is_not_comparable(
    again: Tensor, run_to_run: float | None, diagnosis: str
) -> None:
    """Neither a pass, though the third run happens to agree, nor a failure."""
    results = compare_crossings([sent(a=ROWS)], [sent(a=again)], [sent(a=ROWS)])
    assert only(results) == (Crossed.UNSTABLE, diagnosis)
    assert results[0].run_to_run == run_to_run


def test_what_changes_on_the_way_is_corruption() -> None:
    warm = [sent(a=ROWS), received(a=ROWS + 1)]
    results = compare_crossings(warm, warm, warm)
    wrong = [one for one in results if one.verdict is Crossed.CORRUPTION]
    assert [(one.stage, one.diagnosis) for one in wrong] == [
        ("talker", "it is not what stage thinker sent")
    ]


def rounds(*values: Tensor) -> list[Crossing]:
    """Two rounds of one prompt."""
    return [sent(number, a=value) for number, value in enumerate(values)]


def test_the_second_round_with_the_cache_is_held_against_the_first_without() -> None:
    verified = judge_pipeline(rounds(ROWS, ROWS), rounds(ROWS + 9, ROWS), 1, HITS)
    assert verified.verdict is Verdict.EQUAL
    assert summary_line(verified) == (
        "verify: equal: hit tokens: thinker 32; 1 tensors between stages: 1 equal"
    )


def test_without_a_hit_nothing_is_verified() -> None:
    idle = [StageHits(0, "thinker", True, 40, 0)]
    verified = judge_pipeline(rounds(ROWS, ROWS), rounds(ROWS, ROWS), 1, idle)
    assert verified.verdict is Verdict.NOTHING


def test_what_cannot_be_compared_verifies_nothing() -> None:
    verified = judge_pipeline(rounds(ROWS, ROWS + 1), rounds(ROWS, ROWS), 1, HITS)
    assert verified.verdict is Verdict.NOTHING


def test_a_report_has_a_line_for_each_stage_and_key() -> None:
    verified = judge_pipeline(rounds(ROWS, ROWS), rounds(ROWS, ROWS + 1), 1, HITS)
    report = pipeline_report(verified, {"model": "m"}, vllm_version=None)
    text = render(report, "text", None)
    assert "0 thinker  on                 40          32  corruption" in text
    assert "thinker, sent, request 0, a: off by up to 1" in text
    assert report.result["verdict"] == "corruption"
    assert report.result["stages"][0]["verdict"] == "corruption"


def test_payloads_are_read_back_in_order(tmp_path: Path) -> None:
    meta = {"stage_id": 0, "stage": "thinker", "direction": "sent", "number": 0, "request": "r0"}
    save_file({"a": ROWS}, tmp_path / f"0.sent.000000.1{SUFFIX}", {META: json.dumps(meta)})
    (one,) = read_crossings(tmp_path)
    assert (one.stage, one.direction, one.request) == ("thinker", Direction.SENT, "r0")
    assert torch.equal(one.tensors["a"], ROWS)


def test_a_payload_that_was_not_kept_is_an_error(tmp_path: Path) -> None:
    (tmp_path / f"0.sent.1{ERROR_SUFFIX}").write_text("stage 0, sent: OSError(28)")
    with pytest.raises(EngineFailedError, match=r"^a payload was not kept: stage 0, sent"):
        read_crossings(tmp_path)
