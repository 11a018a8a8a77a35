"""`verify` on real engines: both caches, text and images, a planted fault, what is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.engine.options import EngineOptions
from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.verify.faults import Fault
from omnicache_cli.verify.results import Verdict, Verification
from omnicache_cli.verify.run import verify
from omnicache_cli.verify.scenarios import choose
from tests.engine.test_trace_command import omnicache

ARGS: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 130,
    "enforce_eager": True,
}
IMAGES = {**ARGS, "limit_mm_per_prompt": {"image": 2, "video": 0}}
TEXT_HITS = {
    ("repeat", "hit-0"): 96,
    ("shared-prefix", "hit-0"): 64,
    ("inside-block", "hit-0"): 64,
    ("inside-block", "hit-1"): 32,
    ("one-token", "hit-0"): 96,
    ("last-token", "hit-0"): 64,
    ("decode", "hit-0"): 64,
    ("batch", "hit-0"): 64,
    ("batch", "hit-1"): 96,
    ("same-step", "hit-0"): 64,
    ("chunked", "hit-0"): 64,
    ("eviction", "hit-0"): 32,  # the other prompt evicted the rest
    ("eviction", "hit-1"): 128,
    ("preemption", "hit-0"): 32,
    ("salt", "hit-0"): 64,
}
IMAGE_HITS = {
    ("image", "hit-0"): 160,
    ("other-image", "hit-0"): 32,
    ("two-images", "hit-0"): 256,
    ("two-images", "other-0"): 32,  # up to the first picture
}


def verified(model: Path, args: dict[str, Any], *names: str, **options: Any) -> Verification:
    from omnicache_cli.engine.verify.session import EngineSession, SessionOptions

    with EngineSession(EngineOptions(str(model), args), SessionOptions(**options)) as session:
        return verify(session, choose(session.facts(), names, (), 4))


def hits(result: Verification) -> dict[tuple[str, str], int]:
    return {(one.scenario, one.request): one.hit_tokens for one in result.pairs if one.hit_tokens}


@pytest.mark.parametrize("cache", ["builtin", "vllm-omni"])
def test_text_is_equal_with_both_caches(tiny_text_model: Path, cache: str) -> None:
    result = verified(tiny_text_model, ARGS, cache=cache)
    assert hits(result) == TEXT_HITS
    assert {one.verdict for one in result.pairs} == {Verdict.EQUAL}
    keys = {one.key for one in result.pairs}
    assert keys == {"hidden_states", "layers.0", "layers.1", "tokens", "logprobs"}
    restored = [one for one in result.pairs if one.key == "layers.1" and one.hit_tokens]
    assert [one.num_restored_rows for one in restored] == list(TEXT_HITS.values())
    assert all(one.num_rows == 115 for one in restored if one.scenario == "repeat")


@pytest.mark.parametrize("cache", ["builtin", "vllm-omni"])
def test_images_are_equal_with_both_caches(tiny_image_model: Path, cache: str) -> None:
    names = ("image", "other-image", "two-images")
    result = verified(tiny_image_model, IMAGES, *names, cache=cache)
    assert hits(result) == IMAGE_HITS
    assert result.verdict is Verdict.EQUAL


def test_rounding_that_runs_without_a_cache_show_too_is_no_corruption(tmp_path: Path) -> None:
    """Wide enough, in fp32: a single token is multiplied by another routine than a whole prompt."""
    from omnicache_cli.engine.tiny_models import build_tiny_model

    build_tiny_model("wide", tmp_path / "wide")
    args = {**ARGS, "dtype": "float32"}
    result = verified(tmp_path / "wide", args, "repeat", "one-token")
    assert hits(result) == {("repeat", "hit-0"): 96, ("one-token", "hit-0"): 96}
    assert result.verdict is Verdict.ROUNDING
    off = [one for one in result.pairs if one.verdict is Verdict.ROUNDING]
    assert {(one.scenario, one.request) for one in off} == {("one-token", "hit-0")}
    rows = next(one for one in off if one.key == "layers.1")
    assert rows.relative_error is not None
    assert rows.relative_floor is not None
    assert 0 < rows.relative_error <= 2 * rows.relative_floor < 1e-5
    assert rows.num_restored_rows == 96
    assert 0 < rows.num_differing_rows < rows.num_rows - 96 + 1


def test_a_baseline_inside_the_engine_and_chosen_layers(tiny_text_model: Path) -> None:
    result = verified(tiny_text_model, ARGS, "repeat", baseline="in-engine", layers=(1,))
    assert hits(result) == {("repeat", "hit-0"): 96}
    assert {one.key for one in result.pairs} == {"hidden_states", "layers.1", "tokens", "logprobs"}
    assert result.verdict is Verdict.EQUAL


def test_a_layer_that_is_not_there_is_named(tiny_text_model: Path) -> None:
    with pytest.raises(BadInputError, match=r"^the model has no layer 7; there are 0 to 1$"):
        verified(tiny_text_model, ARGS, layers=(0, 7))


def test_rows_of_another_slot_are_corruption(
    tiny_text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store gives back every row one slot too early: loud, and found where it begins."""
    from omnicache_cli.tensor_cache.cache import TensorCache

    original: Callable[..., Any] = TensorCache.materialize

    def shifted(self: TensorCache, request_id: str) -> Any:
        given = original(self, request_id)
        if given.num_restored:
            rows = given.rows["layers.1"]
            rows[: given.num_restored] = rows[: given.num_restored].roll(1, 0)
        return given

    monkeypatch.setattr(TensorCache, "materialize", shifted)
    result = verified(tiny_text_model, ARGS, "repeat")
    wrong = [one for one in result.pairs if one.verdict is Verdict.CORRUPTION]
    assert [(one.request, one.key) for one in wrong] == [("hit-0", "layers.1")]
    (pair,) = wrong
    assert (pair.fault, pair.diagnosis) == (
        Fault.SHIFTED,
        "rows 0 .. 95 are shifted: those 1 before",
    )
    assert pair.place is not None
    assert (pair.place.token, pair.place.block) == (0, 0)
    assert pair.relative_error is not None
    assert pair.relative_error > 0.5


def test_wrong_kv_under_a_hit_is_corruption_after_the_hit(
    tiny_text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV cache itself is damaged between the two requests: restored rows are right, what is
    computed from the damaged keys and values is not."""
    from omnicache_cli.engine.verify.session import EngineSession

    original = EngineSession.with_cache

    def damaging(self: EngineSession, prompts: Any, max_tokens: int, how: Any) -> Any:
        if "hit-0" in prompts:
            runner = self.warm_engine.model_runner
            for cache in runner.kv_caches:
                cache[:] = cache.roll(1, 0)
        return original(self, prompts, max_tokens, how)

    monkeypatch.setattr(EngineSession, "with_cache", damaging)
    result = verified(tiny_text_model, ARGS, "repeat")
    pair = next(one for one in result.pairs if (one.request, one.key) == ("hit-0", "hidden_states"))
    assert pair.verdict is Verdict.CORRUPTION
    assert pair.fault is Fault.WRONG_KV
    assert pair.diagnosis.startswith("row 96, computed after the hit, is off by")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding moves the scheduled positions; leave out speculative_config",
        ),
        ({"tensor_parallel_size": 2}, "verify runs on one rank, not on 2"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_an_engine_starts(
    tiny_text_model: Path, args: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadInputError, match=f"^nothing verified: .*{reason}"):
        verified(tiny_text_model, {**ARGS, **args})


def test_the_command_end_to_end(
    tiny_text_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = ["verify", tiny_text_model, "--block-size", "32", "--max-model-len", "1024"]
    base += ["--num-gpu-blocks-override", "130", "--quiet", "--scenario", "repeat", "--prompts"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": list(range(10, 80))}) + "\n")

    code = omnicache(*base, prompts, "-o", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (code, found["verdict"], found["hit_tokens"]) == (0, "equal", 96 + 64)
    assert {one["scenario"] for one in found["pairs"]} == {"repeat", "prompts"}
    assert (found["command"], found["cache"], found["vllm_version"]) == (
        *("verify", "builtin"),
        "0.30.0",
    )

    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"prompt_token_ids": [10, 11, 12]}) + "\n")
    capfd.readouterr()
    base[base.index("repeat")] = "prompts"
    monkeypatch.setattr(sys, "argv", ["omnicache", *map(str, base), str(short)])
    assert exit_code_of_run() == 3
    printed = capfd.readouterr().out
    assert printed.splitlines()[-1].startswith("verify: nothing-verified: 0 hit tokens in 0 blocks")
    assert "prompts, hit-0: its prompt fills no block and leaves a token to compute" in printed


def test_the_command_refuses_what_makes_no_sense(tiny_text_model: Path) -> None:
    from omnicache_cli.cli.verify import parse_layers

    assert (parse_layers(None), parse_layers("none"), parse_layers("7,0,7")) == (None, (), (0, 7))
    for text in ("", "a", "1,,2", "-1", "1.5"):
        with pytest.raises(UsageError, match="is no list of layer numbers; write 0,7 or none"):
            parse_layers(text)
