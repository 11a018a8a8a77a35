"""vLLM-Omni's own tensor cache in the phases of a step, and a copy that makes it cost too much.

vllm-omni#4106: with a copy that blocks the step, caching was seven times slower than none.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.engine.options import EngineOptions, prepare_environment
from omnicache_cli.profile.compare import compare
from omnicache_cli.profile.phases import measure
from omnicache_cli.trace.phases import TENSOR_PHASES
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.workload import Prompt, Workload
from tests.pipeline.test_stage import ARGS

SLEEP = 0.05


def test_a_blocking_copy_is_the_slowest_phase_and_caching_then_costs(
    omni_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_environment(engine_process=False)
    from vllm_omni.core.prefix_cache.controller import StagingBufferPool

    from omnicache_cli.engine.comparison import run_in_turns

    original = StagingBufferPool.views

    def slow(self: Any, *args: Any) -> Any:
        """Where the rows of the step are copied to; once for each key."""
        time.sleep(SLEEP)
        return original(self, *args)

    monkeypatch.setattr(StagingBufferPool, "views", slow)
    prompt = Prompt(None, [10 + index * 3 % 200 for index in range(100)])
    workload = Workload((prompt,), num_rounds=2, max_tokens=3, ignore_eos=True)
    options = EngineOptions(str(omni_model), ARGS)
    ran = run_in_turns(options, workload, tmp_path, pairs=3, stage="thinker")

    found = {
        one.source.enable_prefix_caching: one for one in measure(Run(tmp_path)).engines.values()
    }
    assert found[True].largest == "copy"
    for phase in TENSOR_PHASES:
        assert found[True].phases[phase, 0].durations.count == found[True].num_steps
        assert (phase, 0) not in found[False].phases
    copies = found[True].phases["copy", 0].durations
    assert (copies.percentile(1) or 0) >= 0.95 * SLEEP * 1e9
    assert (found[True].phases["save", 0].durations.longest_ns or 0) < SLEEP * 1e9
    assert (found[True].phases["restore", 0].durations.longest_ns or 0) < SLEEP * 1e9
    assert (found[True].phases["sample", 0].durations.percentile(50) or 0) > 0

    comparison = compare(Run(tmp_path), ran.repetitions, workload.num_requests)
    assert [(one.hit_tokens, one.queried_tokens) for one in comparison.on.runs] == [(96, 200)] * 3
    assert [one.hit_tokens for one in comparison.off.runs] == [0] * 3
    assert comparison.verdict == "costs"
    share = comparison.on.median(lambda run: run.tensor_share)
    assert share is not None
    assert share > 0.5
    assert comparison.off.median(lambda run: run.tensor_share) is None
    assert comparison.off.host_bytes is None
    rows = 130 * 32  # of the pool, which the cache mirrors
    assert comparison.on.host_bytes is not None
    assert comparison.on.host_bytes % rows == 0
    assert comparison.on.host_bytes > rows
