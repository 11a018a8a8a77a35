"""Step phases of a real engine, a phase that is made slow, and the cache compared on and off."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.engine.launch import Engine
from omnicache_cli.engine.options import EngineOptions
from omnicache_cli.engine.tracing import tracing
from omnicache_cli.profile.phase_report import show_phases
from omnicache_cli.profile.phases import own_times
from omnicache_cli.report.text import as_text
from omnicache_cli.trace.phases import TENSOR_PHASES, step_ns, worker_times
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Step
from omnicache_cli.trace.workload import Prompt, Workload

ARGS = {
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 60,
}
SLEEP = 0.05


def ids(seed: int, length: int) -> list[int]:
    return [10 + (seed * 7 + index * 3) % 200 for index in range(length)]


WORKLOAD = Workload(
    (Prompt(None, ids(0, 300)), Prompt(None, ids(1, 200)), Prompt(None, ids(0, 250))),
    num_rounds=2,
    concurrency=2,
    max_tokens=6,
    ignore_eos=True,
)


@pytest.fixture(scope="module")
def steps(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    folder = tmp_path_factory.mktemp("phases") / "run"
    folder.mkdir()
    with tracing(folder), Engine(EngineOptions(str(tiny_text_model), ARGS)) as engine:
        engine.run(WORKLOAD)
    return list(Run(folder).steps())


def test_every_phase_of_every_step_is_recorded_and_they_follow_one_another(
    steps: Sequence[Step],
) -> None:
    assert len(steps) > 10
    end_before = 0
    for step in steps:
        record = step.record
        (forward,) = (view.record for view in step.forwards)
        assert record.lookup_ns is not None
        assert record.allocate_ns is not None
        assert record.output_ns is not None
        assert record.output_start_ns is not None
        assert forward.sample_ns is not None
        assert forward.sample_start_ns is not None
        assert 0 < record.allocate_ns < record.schedule_ns
        assert record.lookup_ns + record.allocate_ns <= record.schedule_ns
        assert (record.lookup_ns > 0) == bool(record.admitted)
        assert end_before <= record.start_ns
        assert record.start_ns + record.schedule_ns <= forward.start_ns
        launched = forward.start_ns + forward.prepare_ns
        assert launched + forward.forward_ns <= forward.sample_start_ns
        assert forward.sample_start_ns + forward.sample_ns <= record.output_start_ns
        end_before = record.output_start_ns + record.output_ns
        times = own_times(step)
        assert sum(one for one in times.values() if one is not None) == step_ns(record)


def test_prompts_are_hashed_before_the_scheduler_has_them(steps: Sequence[Step]) -> None:
    arrived = [request.record for step in steps for request in step.arrived]
    assert len(arrived) == WORKLOAD.num_requests
    assert all(one.hash_ns is not None and one.hash_ns > 0 for one in arrived)


def test_without_a_tensor_cache_its_phases_are_not_there(steps: Sequence[Step]) -> None:
    for step in steps:
        times = worker_times(step.forwards[0].record)
        assert [times[phase] for phase in TENSOR_PHASES] == [None, None, None]


@pytest.fixture(scope="module")
def slow_copies(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine of `verify`, with omnicache's own tensor cache, whose copies to the host are made
    to take their time; the rows are held back as on a device."""
    from omnicache_cli.engine.verify.builtin import BuiltinCache
    from omnicache_cli.engine.verify.capture import Capture
    from omnicache_cli.tensor_cache import PlainCopies, TensorCache

    class Slow(PlainCopies):
        def start(self, kept: Sequence[Any]) -> Any:
            time.sleep(SLEEP)
            return super().start(kept)

    folder = tmp_path_factory.mktemp("phases") / "slow"
    folder.mkdir()
    with tracing(folder), Engine(EngineOptions(str(tiny_text_model), ARGS)) as engine:
        capture = Capture(engine.model_runner, (0,))
        cache = BuiltinCache(32)
        cache.tensor_cache = TensorCache(32, device_copies=Slow())
        capture.cache, capture.enabled = cache, True
        engine.run(WORKLOAD)
    return folder


def test_a_phase_that_is_made_slow_is_the_slowest(slow_copies: Path) -> None:
    steps = list(Run(slow_copies).steps())
    copying = []
    for step in steps:
        times = worker_times(step.forwards[0].record)
        save, restore, copy = (times[phase] for phase in TENSOR_PHASES)
        assert save is not None
        assert restore is not None
        assert copy is not None
        assert max(save, restore) < SLEEP * 1e9  # what is inside them counts as theirs no more
        copying.append(copy)
        lasted = step_ns(step.record)
        assert lasted is not None
        assert save + restore + copy < lasted
    assert min(copying) >= SLEEP * 1e9
    report = show_phases(Run(slow_copies)).report
    assert [one["largest"] for one in report.result["engines"]] == ["copy"]
    assert {one["largest"] for one in report.result["slowest_steps"]} == {"copy"}
    assert "most of the time is in copy" in as_text(report)


def test_the_cache_on_and_off_are_compared_in_turns(tiny_text_model: Path, tmp_path: Path) -> None:
    from omnicache_cli.engine.comparison import run_in_turns
    from omnicache_cli.profile.compare import compare

    options = EngineOptions(str(tiny_text_model), ARGS)
    workload = Workload((Prompt(None, ids(3, 200)),), num_rounds=2, max_tokens=3, ignore_eos=True)
    ran = run_in_turns(options, workload, tmp_path, pairs=3)
    order = [one.caching for one in ran.repetitions]
    assert order == [True, False, False, True, True, False, False, True]
    comparison = compare(Run(tmp_path), ran.repetitions, workload.num_requests)
    for on, off in zip(comparison.on.runs, comparison.off.runs, strict=True):
        assert (on.queried_tokens, on.hit_tokens) == (400, 192)  # in every run anew
        assert (off.queried_tokens, off.hit_tokens) == (0, 0)
        assert on.num_tokens == off.num_tokens == 406
        assert len(on.first_token_ns) == len(off.first_token_ns) == 2
        assert on.peak_blocks == off.peak_blocks == 7
        assert on.tensor_share is None
        assert on.phases_ns.keys() == off.phases_ns.keys()
    assert comparison.on.host_bytes is None
    assert comparison.on.block_bytes == comparison.off.block_bytes
    assert comparison.verdict in {"pays-off", "no-difference", "mixed", "costs"}
