"""Judging restored rows: what is equal, what is rounding, what is corrupt and where it starts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch", reason="rows are torch tensors")

from torch import Tensor  # noqa: E402

from omnicache_cli.errors import UsageError  # noqa: E402
from omnicache_cli.trace.workload import Lora, Prompt  # noqa: E402
from omnicache_cli.verify.assembly import assemble  # noqa: E402
from omnicache_cli.verify.compare import Bound, compare_rows  # noqa: E402
from omnicache_cli.verify.faults import Fault  # noqa: E402
from omnicache_cli.verify.judge import Tolerance  # noqa: E402
from omnicache_cli.verify.keep import write_rows  # noqa: E402
from omnicache_cli.verify.report import EXIT_CODES, summary_line, verify_report  # noqa: E402
from omnicache_cli.verify.results import Pair, Verdict, Verification  # noqa: E402
from omnicache_cli.verify.run import Shape, verify  # noqa: E402
from omnicache_cli.verify.runs import Computed, Delivered, How, RunRows  # noqa: E402
from omnicache_cli.verify.scenarios import (  # noqa: E402
    SCENARIOS,
    ModelFacts,
    NotRun,
    Scenario,
    choose,
)
from tests.unit.fake_session import FakeSession, change_rows  # noqa: E402

FACTS = ModelFacts(4, 100, 200, count_tokens=len, image_placeholder=None)


def repeat(facts: ModelFacts = FACTS) -> Scenario:
    (one,) = choose(facts, ["repeat"], (), 4)
    assert isinstance(one, Scenario)
    return one


def pair_of(result: Verification, request: str, key: str) -> Pair:
    (pair,) = (one for one in result.pairs if (one.request, one.key) == (request, key))
    return pair


def on_hits(change: Callable[[Delivered], Delivered]) -> Callable[[Delivered], Delivered]:
    return lambda piece: change(piece) if piece.hit_tokens else piece


# -- rows ---------------------------------------------------------------------------------------


def test_equal_rows_have_no_error() -> None:
    rows = torch.tensor([[1.0, 2.0], [float("nan"), -0.0]])
    gap = compare_rows(rows, rows.clone(), [7, 8])
    assert (gap.num_rows, gap.num_bytes, gap.num_differing_rows, gap.first_position) == (
        *(2, 16, 0),
        None,
    )


def test_a_row_that_differs_is_told_with_its_first_values() -> None:
    one = torch.tensor([[3.0, 4.0, 0.0], [3.0, 4.0, 0.0]], dtype=torch.bfloat16)
    other = one.clone()
    other[1, 1] = 4.5
    gap = compare_rows(one, other, [10, 11])
    assert (gap.num_differing_rows, gap.first_position, gap.first_column) == (1, 11, 1)
    assert (gap.max_abs_error, gap.max_relative_error) == (0.5, 0.1)
    assert (gap.expected_values, gap.found_values) == ((4.0, 0.0), (4.5, 0.0))


def test_a_single_bit_and_the_sign_of_zero_count() -> None:
    gap = compare_rows(torch.zeros(1, 2), torch.tensor([[0.0, -0.0]]), [0])
    assert (gap.num_differing_rows, gap.max_abs_error, gap.first_column) == (1, 0.0, 1)


def test_nan_where_a_number_should_be_is_infinitely_far() -> None:
    gap = compare_rows(torch.ones(1, 2), torch.tensor([[1.0, float("nan")]]), [0])
    assert gap.max_abs_error == gap.max_relative_error == float("inf")


def test_something_for_nothing_is_infinitely_far() -> None:
    gap = compare_rows(torch.zeros(1, 2), torch.ones(1, 2), [0])
    assert gap.max_relative_error == float("inf")


@pytest.mark.parametrize(
    ("bound", "first"),
    [
        (Bound(), 0),
        (Bound(0.05), 1),
        (Bound(0.11), None),
        (Bound(atol=0.0, rtol=0.04), 1),
        (Bound(atol=1.0, rtol=0.0), None),
    ],
)
def test_a_bound_names_the_first_row_beyond_it(bound: Bound, first: int | None) -> None:
    one = torch.tensor([[10.0], [10.0]])
    assert compare_rows(one, torch.tensor([[10.3], [11.0]]), [0, 1], bound).first_position == first


@pytest.mark.parametrize("other", [torch.zeros(2, 2), torch.zeros(1, 3), torch.zeros(1, 2).half()])
def test_other_shapes_and_dtypes_are_no_rows_to_compare(other: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^rows of .* against"):
        compare_rows(torch.zeros(1, 2), other, [0])


def test_nothing_to_compare_differs_nowhere() -> None:
    assert compare_rows(torch.zeros(0, 4), torch.zeros(0, 4), []).num_rows == 0


def test_rows_are_put_together_by_position_and_the_later_ones_count() -> None:
    pieces = [
        Computed(0, "a", 0, (4, 5), {"k": torch.tensor([[0.0], [1.0]])}),
        Computed(0, "b", 0, (6,), {"k": torch.tensor([[9.0]])}),
        Computed(1, "a", 1, (5, 6), {"k": torch.tensor([[1.5], [2.0]])}),
        Computed(2, "a", 4, (8,), {"k": torch.tensor([[4.0]])}),
    ]
    rows = assemble(pieces, "a", "k")
    assert rows is not None
    assert (rows.positions, rows.rows.flatten().tolist()) == ((0, 1, 2, 4), [0.0, 1.5, 2.0, 4.0])
    assert rows.missing(6) == [3, 5]
    assert assemble(pieces, "a", "other") is None


# -- verdicts -----------------------------------------------------------------------------------


def test_a_sound_cache_is_equal_everywhere() -> None:
    result = verify(FakeSession(), choose(FACTS, (), (), 4))
    assert result.verdict is Verdict.EQUAL
    assert {one.verdict for one in result.pairs} == {Verdict.EQUAL}
    hits = {(one.scenario, one.request): one.hit_tokens for one in result.pairs if one.hit_tokens}
    assert hits == {
        ("repeat", "hit-0"): 12,
        ("shared-prefix", "hit-0"): 8,
        ("inside-block", "hit-0"): 8,
        ("inside-block", "hit-1"): 4,  # eight tokens are two blocks: the last is always computed
        ("one-token", "hit-0"): 12,
        ("last-token", "hit-0"): 12,
        ("decode", "hit-0"): 8,
        ("batch", "hit-0"): 12,
        ("batch", "hit-1"): 12,
        ("same-step", "hit-0"): 12,
        ("chunked", "hit-0"): 8,
        ("eviction", "hit-0"): 16,
        ("eviction", "hit-1"): 16,
        ("preemption", "hit-0"): 4,
        ("salt", "hit-0"): 16,
    }
    assert (result.hit_tokens, EXIT_CODES[result.verdict]) == (160, 0)
    assert [name for name, _ in result.not_run] == [
        "image",
        "other-image",
        "two-images",
        "lora",
        *("audio", "image-audio"),
    ]
    assert summary_line(result) == (
        "verify: equal: 160 hit tokens in 40 blocks of 15 requests; 136 pairs: 136 equal"
    )


def test_rounding_is_no_corruption() -> None:
    result = verify(FakeSession(noise=1e-6), [repeat()])
    pair = pair_of(result, "hit-0", "hidden_states")
    assert pair.verdict is Verdict.ROUNDING
    assert pair.relative_error is not None
    assert pair.relative_floor is not None
    assert 0 < pair.relative_error <= 2 * pair.relative_floor < 1e-5
    assert EXIT_CODES[result.verdict] == 0


def test_what_is_beyond_the_noise_is_corruption() -> None:
    def off(piece: Delivered) -> Delivered:
        def change(rows: Tensor) -> Tensor:
            rows[13] *= 1.01
            return rows

        return change_rows(piece, "layers.0", change)

    result = verify(FakeSession(noise=1e-6, damage=on_hits(off)), [repeat()])
    pair = pair_of(result, "hit-0", "layers.0")
    assert pair.verdict is Verdict.CORRUPTION
    assert (pair.fault, pair.diagnosis) == (
        Fault.UNKNOWN,
        "row 13 is none that the model computed",
    )
    assert pair.place is not None
    assert (pair.place.token, pair.place.block) == (13, 3)
    assert pair_of(result, "hit-0", "hidden_states").verdict is Verdict.ROUNDING
    assert EXIT_CODES[result.verdict] == 1


def test_a_restored_row_that_is_off_by_one_bit_is_corruption_even_under_the_floor() -> None:
    def off(piece: Delivered) -> Delivered:
        def change(rows: Tensor) -> Tensor:
            rows[5, 2] = torch.nextafter(rows[5, 2], torch.tensor(100.0))
            return rows

        return change_rows(piece, "hidden_states", change)

    result = verify(FakeSession(noise=1e-3, damage=on_hits(off)), [repeat()])
    pair = pair_of(result, "hit-0", "hidden_states")
    assert pair.verdict is Verdict.CORRUPTION
    assert pair.diagnosis == "row 5 is none that the model computed"
    place = pair.place
    assert place is not None
    assert (place.token, place.block, place.block_id, place.slot, place.column) == (5, 1, 2, 9, 2)
    assert place.step == 1
    assert len(place.expected) == len(place.found) == 4
    assert place.expected[0] != place.found[0]
    assert place.expected[1:] == place.found[1:]


def test_without_a_hit_nothing_is_verified() -> None:
    result = verify(FakeSession(caching=False), [repeat()])
    assert (result.verdict, result.hit_tokens) == (Verdict.NOTHING, 0)
    assert EXIT_CODES[result.verdict] == 3
    pair = pair_of(result, "hit-0", "tokens")
    assert "no cached token for this request: nothing was restored" in pair.diagnosis
    assert verify(FakeSession(), [NotRun("image", "no images")]).verdict is Verdict.NOTHING


def test_a_prompt_that_fills_no_block_is_no_missing_hit() -> None:
    short, long = Prompt(None, [1, 2, 3]), Prompt(None, [4, 5, 6, 7, 8])
    both = verify(FakeSession(), choose(FACTS, ["prompts"], (short, long), 4))
    assert (both.verdict, both.hit_tokens) == (Verdict.EQUAL, 4)
    report = verify_report(both, {"block size": 4}, vllm_version=None)
    (lines,) = (one for one in report.sections if one.title == "Nothing verified")
    assert lines.lines == [  # type: ignore[union-attr]
        "prompts, hit-0: its prompt fills no block and leaves a token to compute, so it cannot "
        "hit: a block has 4 tokens"
    ]
    alone = verify(FakeSession(), choose(FACTS, ["prompts"], (short,), 4))
    assert (alone.verdict, EXIT_CODES[alone.verdict]) == (Verdict.NOTHING, 3)


def test_a_tolerance_takes_the_place_of_the_floor() -> None:
    session = FakeSession(noise=1e-3)
    strict = verify(session, [repeat()], Tolerance(atol=0.0, rtol=1e-9))
    assert "beyond atol 0, rtol 1e-09" in pair_of(strict, "hit-0", "layers.0").diagnosis
    loose = verify(session, [repeat()], Tolerance(atol=1.0, rtol=1.0))
    assert loose.verdict is Verdict.ROUNDING


# -- scenarios ----------------------------------------------------------------------------------


def test_scenarios_are_chosen_by_name() -> None:
    assert [one.name for one in choose(FACTS, (), (), 4)] == list(SCENARIOS)
    with pytest.raises(UsageError, match=r"^no scenario 'reapeat'; choose: repeat, .*, prompts$"):
        choose(FACTS, ["reapeat"], (), 4)


def test_own_prompts_are_sent_twice() -> None:
    own = (Prompt(None, [1, 2, 3, 4, 5, 6]),)
    *_, last = choose(FACTS, ["repeat"], own, 7)
    assert isinstance(last, Scenario)
    assert (last.name, last.donors, last.hitters, last.max_tokens) == ("prompts", own, own, 7)


def test_a_scenario_that_does_not_fit_says_what_to_change() -> None:
    (one,) = choose(replace(FACTS, max_model_len=17), ["repeat"], (), 4)
    assert one == NotRun(
        "repeat",
        "it needs 18 tokens, the engine takes 17: raise --max-model-len or lower --block-size",
    )


def test_pictures_come_behind_more_than_a_block_of_text(tmp_path: Path) -> None:
    pictures = (tmp_path / "one.png", tmp_path / "other.png")
    facts = replace(FACTS, block_size=200, image_placeholder="<img>", pictures=pictures)
    (one,) = choose(facts, ["other-image"], (), 4)
    assert isinstance(one, Scenario)
    (donor,), (hitter,) = one.donors, one.hitters
    assert donor.text == hitter.text
    assert (donor.text or "").index("<img>") >= 208
    assert (donor.images, hitter.images) == (pictures[:1], pictures[1:])


# -- report -------------------------------------------------------------------------------------


def damaged() -> Verification:
    def change(rows: Tensor) -> Tensor:
        rows[4:8] = 0
        return rows

    damage = on_hits(lambda piece: change_rows(piece, "layers.0", change))
    return verify(FakeSession(damage=damage), [repeat()])


def test_the_report_tells_where_a_corruption_starts() -> None:
    report = verify_report(damaged(), {"model": "tiny", "block size": 4}, vllm_version="0.30.0")
    lines = [line for section in report.sections for line in getattr(section, "lines", ())]
    assert lines[0] == ("repeat, hit-0, layers.0: zero rows: zero rows 4 .. 7 of key layers.0")
    assert lines[1] == ("   starts at token 4, block 1 of the request, block id 2, slot 8, step 1")
    assert lines[3].startswith("   found    0 0 0 0")
    assert lines[-1] == (
        "verify: corruption: 12 hit tokens in 3 blocks of 1 request; 8 pairs: 7 equal, 1 corruption"
    )
    (pair,) = (one for one in report.result["pairs"] if one["verdict"] == "corruption")
    names = ("scenario", "request", "key", "token", "block", "slot", "step", "hit_tokens")
    assert [pair[name] for name in names] == ["repeat", "hit-0", "layers.0", 4, 1, 8, 1, 12]
    assert pair["share_of_differing_rows"] == 4 / 17
    assert (report.result["verdict"], report.result["hit_tokens"]) == ("corruption", 12)
    assert report.result["block_size"] == 4


def test_failing_rows_are_kept(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert write_rows(damaged(), tmp_path / "kept") == 1
    (path,) = (tmp_path / "kept").iterdir()
    assert path.name == "repeat.hit-0.layers.0.safetensors"
    assert path.stat().st_mode & 0o777 == 0o600
    rows = load_file(path)
    assert rows["positions"].tolist() == list(range(17))
    assert rows["found"][4:8].abs().sum() == 0
    assert torch.equal(rows["found"][:4], rows["expected"][:4])


# -- adapters -----------------------------------------------------------------------------------

LORAS = (Lora("/adapters/a"), Lora("/adapters/b", "b"))


def test_scenarios_with_adapters_need_one() -> None:
    (missing,) = choose(FACTS, ["lora"], (), 4)
    assert missing == NotRun("lora", "no adapter: name its folder with --lora")
    (alone,) = choose(replace(FACTS, loras=LORAS), ["lora"], (), 4)
    (mixed,) = choose(replace(FACTS, loras=LORAS), ["lora-mixed"], (), 4)
    assert isinstance(alone, Scenario)
    assert isinstance(mixed, Scenario)
    for one in (alone, mixed):
        assert [prompt.lora for prompt in (*one.donors, *one.hitters)] == [LORAS[0]] * 2
        assert [prompt.lora for prompt in one.others] == [LORAS[1], None]
        assert len({tuple(prompt.token_ids or ()) for prompt in one.prompts}) == 1
    assert (alone.how.together, mixed.how.together) == (False, True)
    assert "lora" in SCENARIOS
    assert "lora-mixed" not in SCENARIOS


class MixingSession(FakeSession):
    """A request without an adapter is computed with that of the batch."""

    shapes: ClassVar[list[tuple[Shape, set[str | None]]]] = []

    def with_cache(self, prompts: Mapping[str, Prompt], max_tokens: int, how: How) -> RunRows:
        loras = {prompt.lora for prompt in prompts.values()} - {None}
        (lora,) = loras or {None}
        mixed = {name: replace(prompt, lora=lora) for name, prompt in prompts.items()}
        return super().with_cache(mixed, max_tokens, how)

    def without_cache(
        self, prompts: Mapping[str, Prompt], max_tokens: int, shape: Shape, cut: Mapping[str, int]
    ) -> RunRows:
        names = {prompt.lora and prompt.lora.label for prompt in prompts.values()}
        self.shapes.append((shape, names))
        return super().without_cache(prompts, max_tokens, shape, cut)


def test_a_batch_in_which_an_adapter_spreads_is_corrupt_and_says_so() -> None:
    session = MixingSession()
    scenarios = choose(replace(FACTS, loras=LORAS[:1]), ["lora-mixed"], (), 4)
    result = verify(session, scenarios)
    pair = pair_of(result, "other-0", "layers.0")
    assert (pair.verdict, pair.fault) == (Verdict.CORRUPTION, Fault.OTHER_ADAPTER)
    assert pair.diagnosis.startswith("row 0 is off by")
    assert pair.diagnosis.endswith("it is that of the same prompt with a")
    assert {one.verdict for one in result.pairs if one.request == "hit-0"} == {Verdict.EQUAL}
    together = [names for shape, names in session.shapes if shape is Shape.TOGETHER]
    assert together == [{"a"}, {None}]  # the floor is not measured on what may be wrong
