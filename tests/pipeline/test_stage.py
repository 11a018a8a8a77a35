"""`verify` on a real stage: vLLM-Omni's GPUARModelRunner with its own OmniPrefixCacheManager.

One session, two engines, for all tests; faults are planted into vLLM-Omni from outside.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.engine.options import EngineOptions, prepare_environment
from omnicache_cli.errors import BadInputError, EngineMissingError, UsageError
from omnicache_cli.verify.faults import Fault
from omnicache_cli.verify.results import Pair, Verdict, Verification
from omnicache_cli.verify.run import verify
from omnicache_cli.verify.scenarios import choose

ARGS: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 130,
    "kv_cache_memory_bytes": 1 << 28,
}
ROWS = {"hidden", "hidden_states.layer_0", "hidden_states.layer_2"}
PAYLOAD = {"embed.tts_bos", "embed.tts_eos", "embed.tts_pad"}


@pytest.fixture(scope="module")
def session(omni_model: Path) -> Iterator[Any]:
    prepare_environment(engine_process=False)
    from omnicache_cli.engine.omni.session import StageSession

    with StageSession(EngineOptions(str(omni_model), ARGS), "thinker") as one:
        yield one


def verified(session: Any, *names: str) -> Verification:
    return verify(session, choose(session.facts(), names, (), 4))


def hits(result: Verification) -> dict[tuple[str, str], int]:
    return {(one.scenario, one.request): one.hit_tokens for one in result.pairs if one.hit_tokens}


def corrupt(result: Verification) -> dict[str, Pair]:
    """By key; of each key the first."""
    found: dict[str, Pair] = {}
    for one in result.pairs:
        if one.verdict is Verdict.CORRUPTION:
            found.setdefault(one.key, one)
    return found


def test_the_stage_runs_vllm_omnis_own_runner_on_a_cpu(session: Any) -> None:
    from vllm_omni.platforms import current_omni_platform
    from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

    assert type(current_omni_platform).__name__ == "CpuOmniPlatform"
    assert isinstance(session.warm_engine.model_runner, GPUARModelRunner)
    described = session.described()
    assert (described["stage"], described["runner"]) == ("0 thinker", "GPUARModelRunner")
    assert (described["device"], described["dtype"]) == ("cpu", "bfloat16")


def test_rows_and_payload_are_equal_in_every_situation(session: Any) -> None:
    names = ("repeat", "batch", "same-step", "chunked", "preemption", "image", "audio")
    result = verified(session, *names, "image-audio")
    assert hits(result) == {
        ("repeat", "hit-0"): 96,
        ("batch", "hit-0"): 64,
        ("batch", "hit-1"): 96,
        ("same-step", "hit-0"): 64,
        ("chunked", "hit-0"): 64,
        ("preemption", "hit-0"): 32,
        ("image", "hit-0"): 128,
        ("audio", "hit-0"): 96,
        ("audio", "other-0"): 32,
        ("image-audio", "hit-0"): 192,
        ("image-audio", "other-0"): 128,
    }
    assert {one.verdict for one in result.pairs} == {Verdict.EQUAL}
    for request in hits(result):
        keys = {one.key for one in result.pairs if (one.scenario, one.request) == request}
        assert keys == ROWS | PAYLOAD | {"tokens", "logprobs"}
    assert session.described()["keys"] == ", ".join(sorted(ROWS))


@pytest.fixture
def policy(session: Any) -> Iterator[Callable[..., None]]:
    """Change the model's cache policy, as a model of another kind would declare it."""
    from vllm_omni.core.prefix_cache.interface import ModelCachePolicy

    runners = session.warm_engine.model_runner, session._cold.model_runner
    before = runners[0]._omni_cache_policy

    def change(one: Any) -> None:
        for runner in runners:
            runner._omni_cache_policy = one
        runners[0].omni_prefix_cache.register_policy(one)

    yield lambda **fields: change(ModelCachePolicy(**fields))
    change(before)


def test_a_deferred_key_is_equal_too(session: Any, policy: Callable[..., None]) -> None:
    policy(deferred_keys=frozenset({"hidden_states.layer_2"}))
    result = verified(session, "repeat", "same-step")
    assert session.described()["policy"] == "deferred: hidden_states.layer_2"
    assert hits(result) == {("repeat", "hit-0"): 96, ("same-step", "hit-0"): 64}
    assert {one.verdict for one in result.pairs} == {Verdict.EQUAL}
    restored = [one for one in result.pairs if one.key == "hidden_states.layer_2"]
    assert sum(one.num_restored_rows for one in restored) == 96 + 64


def test_hidden_states_that_a_model_needs_no_prefix_of_are_this_steps_only(
    session: Any, policy: Callable[..., None]
) -> None:
    policy(needs_full_hidden_states=False)
    result = verified(session, "repeat")
    assert session.described()["policy"] == "deferred: none; hidden is not cached"
    assert hits(result) == {("repeat", "hit-0"): 96}
    assert result.verdict is Verdict.EQUAL
    (hidden,) = [one for one in result.pairs if (one.request, one.key) == ("hit-0", "hidden")]
    assert (hidden.num_restored_rows, hidden.verdict) == (0, Verdict.EQUAL)


def plant_pool(patch: pytest.MonkeyPatch) -> None:
    from vllm_omni.core.prefix_cache.block_pool import PrefixBlockPool

    original = PrefixBlockPool.rows
    patch.setattr(
        PrefixBlockPool, "rows", lambda pool, key, slots: original(pool, key, slots.roll(1))
    )


def plant_slots(patch: pytest.MonkeyPatch) -> None:
    from vllm_omni.core.prefix_cache.group_view import FullAttentionGroupView

    original = FullAttentionGroupView.step_slots_cpu

    def swapped(view: Any, *args: Any) -> Any:
        slots = original(view, *args)
        if len(slots) < 96:
            return slots
        other = slots.clone()
        other[32:64], other[64:96] = slots[64:96], slots[32:64]
        return other

    patch.setattr(FullAttentionGroupView, "step_slots_cpu", swapped)


def plant_partial_block(patch: pytest.MonkeyPatch) -> None:
    from vllm_omni.core.prefix_cache.manager import OmniPrefixCacheManager

    original = OmniPrefixCacheManager._get_hit_slots
    patch.setattr(
        OmniPrefixCacheManager, "_get_hit_slots", lambda *args: original(*args)[: args[1] - 16]
    )


def plant_same_step_order(patch: pytest.MonkeyPatch) -> None:
    """A hit is read before the same step has written it; of keys that are open by then."""
    from vllm_omni.core.prefix_cache.manager import OmniPrefixCacheManager

    original = OmniPrefixCacheManager.new_step_starts

    def read_at_once(manager: Any, scheduler_output: Any) -> None:
        original(manager, scheduler_output)
        for future, _ in list(manager._prefetch_queue):
            future.exception()

    patch.setattr(OmniPrefixCacheManager, "new_step_starts", read_at_once)
    patch.setattr(
        OmniPrefixCacheManager, "_invalidate_overwritten_prefetches", lambda manager: None
    )


def plant_unopened_key(patch: pytest.MonkeyPatch) -> None:
    from vllm_omni.core.prefix_cache.interface import ModelCachePolicy

    original = ModelCachePolicy.skip_immediate_mm
    patch.setattr(
        ModelCachePolicy,
        "skip_immediate_mm",
        lambda policy, key: original(policy, key) or key == "hidden_states.layer_2",
    )


def plant_cut_list(patch: pytest.MonkeyPatch) -> None:
    """A payload that is no rows per token is cut all the same."""
    from vllm_omni.worker import gpu_ar_model_runner

    original = gpu_ar_model_runner.build_omni_mm_payload

    def cut(**given: Any) -> Any:
        payload = original(**given)
        return {**payload, "embed.tts_bos": payload["embed.tts_bos"][..., :8]}

    patch.setattr(gpu_ar_model_runner, "build_omni_mm_payload", cut)


FAULTS = [
    (plant_pool, "repeat", ROWS, Fault.SHIFTED),
    (plant_slots, "repeat", ROWS, Fault.OTHER_BLOCK),
    (plant_partial_block, "repeat", ROWS, Fault.SHORT_PREFIX),
    (plant_same_step_order, "repeat same-step", ROWS - {"hidden"}, Fault.TOO_EARLY),
    (plant_cut_list, "repeat", {"embed.tts_bos"}, Fault.PAYLOAD),
]


@pytest.mark.parametrize(
    ("plant", "scenarios", "keys", "fault"), FAULTS, ids=[one[3].name for one in FAULTS]
)
def test_a_fault_in_vllm_omni_is_caught_and_named(
    session: Any,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    scenarios: str,
    keys: set[str],
    fault: Fault,
) -> None:
    plant(monkeypatch)
    found = corrupt(verified(session, *scenarios.split()))
    assert {key: one.fault for key, one in found.items()} == dict.fromkeys(keys, fault)


def test_a_key_that_is_never_opened_is_caught_and_named(
    omni_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In engines of its own: a key that is open stays open."""
    from omnicache_cli.engine.omni.session import StageSession

    plant_unopened_key(monkeypatch)
    with StageSession(EngineOptions(str(omni_model), ARGS), "thinker") as session:
        found = corrupt(verified(session, "repeat"))
    assert {key: one.fault for key, one in found.items()} == {
        "hidden_states.layer_2": Fault.NEVER_CACHED
    }
    assert found["hidden_states.layer_2"].diagnosis == (
        "key hidden_states.layer_2 has no cached rows: 16 rows instead of 112"
    )


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("painter", r"^the model has no stage 'painter'; choose: thinker, talker, code2wav$"),
        ("talker", r"^stage talker takes its input from stage 0 and cannot run alone; "),
        ("code2wav", r"^stage code2wav is of kind llm_generation: vLLM-Omni caches no tensors"),
    ],
)
def test_a_stage_that_cannot_be_verified_alone_is_refused(
    omni_model: Path, stage: str, message: str
) -> None:
    from omnicache_cli.engine.omni.session import StageSession

    with pytest.raises(BadInputError, match=message):
        StageSession(EngineOptions(str(omni_model), ARGS), stage)


def test_engine_arguments_are_those_of_vllm_omni(omni_model: Path) -> None:
    from omnicache_cli.engine.omni.session import StageSession

    options = EngineOptions(str(omni_model), {"model_stag": "thinker"})
    with pytest.raises(UsageError, match=r"model_stag'; did you mean model_stage\?$"):
        StageSession(options, "thinker")


def test_a_model_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    from omnicache_cli.engine.omni.session import StageSession
    from omnicache_cli.engine.tiny_models import build_tiny_model

    build_tiny_model("text", tmp_path / "text")
    with pytest.raises(BadInputError, match=r"^vLLM-Omni has no pipeline for qwen3; "):
        StageSession(EngineOptions(str(tmp_path / "text"), ARGS), "thinker")


def test_another_vllm_omni_is_told_in_a_sentence(
    omni_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omnicache_cli.engine.omni import upstream
    from omnicache_cli.engine.omni.session import StageSession

    monkeypatch.setattr(upstream.metadata, "version", lambda name: "0.29.1")
    with pytest.raises(EngineMissingError) as told:
        StageSession(EngineOptions(str(omni_model), ARGS), "thinker")
    assert str(told.value) == (
        "vLLM-Omni 0.29.1 is installed, and omnicache knows the stages of 0.30 only; "
        "pip install 'vllm-omni==0.30.*'"
    )
