"""Runs workloads on Model Runner V2 on a CPU, traced, and says what it really held.

Usage: python -m tests.engine.v2_child MODEL FOLDER

vLLM 0.30 has a V2 runner for the CPU, but wants Triton for it, and Triton has no CPU here. Triton's
own interpreter runs the same kernels in numpy, slowly: vLLM is told that Triton is there, and the
modules of V2 get the real `triton` instead of vLLM's placeholder. Nothing else of vLLM is changed.
A process of its own, since all of this must happen before V2 is imported.

FOLDER gets a run folder for each scenario and `told.json`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from omnicache_cli.engine.launch import Engine, Outcome
from omnicache_cli.engine.options import EngineOptions
from omnicache_cli.engine.probe import batch, device, live, live_v2, runner_v2
from omnicache_cli.engine.tracing import tracing
from omnicache_cli.trace.workload import Workload
from tests.engine.live import LiveStep
from tests.engine.test_trace import ARGS, SHORT, WORKLOAD

LATE_SLOTS, LATE_TABLES = 5, 7
"""In the device scenario each n-th copy arrives a step too late."""


WARM_UP = "_warm_up"


class Told(msgspec.Struct):
    """What one scenario really did."""

    tokens: dict[str, tuple[int, ...]]
    steps: list[LiveStep] = []
    dummy_runs: int = 0  # passes of the runner that no request asked for
    errors: dict[str, int] = {}  # of the probe


def interpret_triton() -> None:
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")

    import triton
    import triton.language
    import vllm.config.vllm
    import vllm.triton_utils

    vllm.triton_utils.triton = triton
    vllm.triton_utils.tl = triton.language
    vllm.config.vllm.HAS_TRITON = True


def runner_of(engine: Engine) -> Any:
    executor = engine._engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


class Watch:
    """Reads each forward pass inside the model's call, beside the probe and by other means."""

    def __init__(self, runner: Any) -> None:
        self.steps: list[LiveStep] = []
        self.dummy_runs = 0
        self._runner = runner
        self._batch: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        model, runner = type(self._runner.model), type(self._runner)
        with (
            patch.object(model, "forward", self._around_forward(model.forward)),
            patch.object(runner, "prepare_inputs", self._around_inputs(runner.prepare_inputs)),
        ):
            yield

    def _around_inputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_inputs(runner: Any, *args: Any, **kwargs: Any) -> Any:
            self._batch = original(runner, *args, **kwargs)
            return self._batch

        return prepare_inputs

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            now, self._batch = self._batch, None
            if now is None or now.req_ids[0].startswith(WARM_UP):
                self.dummy_runs += 1
            else:
                self.steps.append(LiveStep(list(now.req_ids), self._groups()))
            return original(model, *args, **kwargs)

        return forward

    def _groups(self) -> list[dict[str, Any]]:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        groups = []
        for number, group in enumerate(self._runner.kv_cache_config.kv_cache_groups):
            one = metadata[group.layer_names[-1]]
            groups.append(
                {
                    "num_actual_tokens": one.num_actual_tokens,
                    "max_query_len": one.max_query_len,
                    "max_seq_len": one.max_seq_len,
                    "query_start_loc": one.query_start_loc.tolist(),
                    "seq_lens": one.seq_lens.tolist(),
                    "slot_mapping": one.slot_mapping.tolist(),
                    "block_table": self._used(one, number),
                    "table_shape": list(one.block_table.shape),
                    "causal": one.causal,
                }
            )
        return groups

    def _used(self, metadata: Any, group: int) -> list[list[int]]:
        """The columns that the sequences fill so far."""
        rows = metadata.block_table.tolist()
        size = self._runner.kernel_block_sizes[group]
        lens = metadata.seq_lens.tolist()
        return [row[: -(-length // size)] for row, length in zip(rows, lens, strict=True)]


def tokens(outcomes: list[Outcome]) -> dict[str, tuple[int, ...]]:
    return {one.request_id: one.token_ids for one in outcomes}


def plain(options: EngineOptions, folder: Path) -> Told:
    """Not traced: what the tokens must be."""
    with Engine(options) as engine:
        return Told(tokens(engine.run(WORKLOAD)))


def traced(options: EngineOptions, folder: Path, workload: Workload = WORKLOAD) -> Told:
    with tracing(folder) as recording, Engine(options) as engine:
        watch = Watch(runner_of(engine))
        with watch.watching():
            outcomes = engine.run(workload)
        return Told(tokens(outcomes), watch.steps, watch.dummy_runs, dict(recording.errors))


def dummies(options: EngineOptions, folder: Path) -> Told:
    """Dummy, profiling and warm-up runs before, between and after what requests ask for."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    with tracing(folder) as recording, Engine(options) as engine:
        runner = runner_of(engine)
        watch = Watch(runner)
        with watch.watching():
            calls = runner.execute_model, runner.sample_tokens
            assert run_mixed_prefill_decode_warmup(runner, *calls, 16, req_id_prefix=WARM_UP)
            first = engine.run(SHORT)
            runner._dummy_run(16)
            runner.profile_run()
            again = engine.run(SHORT)
        assert tokens(first) == tokens(again)
        return Told(tokens(first), watch.steps, watch.dummy_runs, dict(recording.errors))


class FakeDevice:
    """Stands for torch: pinned memory that is none, and events that pass when they are told to."""

    def __init__(self, late: int) -> None:
        self.cuda = self
        self._late = late
        self._num_copies = 0
        self._unseen = False

    def empty(self, capacity: int, dtype: Any, pin_memory: bool) -> Any:
        import torch

        assert pin_memory
        return torch.empty(capacity, dtype=dtype)

    def Event(self) -> "FakeDevice":
        return self

    def record(self) -> None:
        self._num_copies += 1
        self._unseen = self._num_copies % self._late == 0

    def query(self) -> bool:
        """A late copy has not arrived when it is asked for the first time."""
        unseen, self._unseen = self._unseen, False
        return not unseen


def fake_copy(torch: Any, capacity: int, dtype: Any) -> device.PinnedCopy:
    late = LATE_SLOTS if dtype == torch.int64 else LATE_TABLES
    return device.PinnedCopy(FakeDevice(late), capacity, dtype)


def on_device(options: EngineOptions, folder: Path) -> Told:
    """The probe takes every tensor for one on a device."""
    with (
        patch.object(live_v2, "_on_cpu", lambda tensor: False),
        patch.object(batch, "PinnedCopy", fake_copy),
        patch.object(
            runner_v2,
            "layout_of",
            lambda runner, metadata: live.Layout(
                list(runner.kernel_block_sizes), live_v2._READ_FROM
            ),
        ),
    ):
        return traced(options, folder)


def failing(options: EngineOptions, folder: Path) -> Told:
    """Every third batch cannot be read."""
    calls = iter(range(1, 1_000_000))

    def read_starts(runner: Any, one: Any) -> Any:
        if next(calls) % 3 == 0:
            raise AttributeError("renamed")
        return read(runner, one)

    read = live_v2._starts
    with patch.object(live_v2, "_starts", read_starts):
        return traced(options, folder, SHORT)


SCENARIOS: dict[str, Callable[[EngineOptions, Path], Told]] = {
    "plain": plain,
    "traced": traced,
    "dummies": dummies,
    "on_device": on_device,
    "failing": failing,
}


def main(model: str, folder: Path) -> None:
    interpret_triton()
    told = {}
    for name, scenario in SCENARIOS.items():
        run = folder / name
        run.mkdir()
        told[name] = scenario(EngineOptions(model, ARGS), run)
    (folder / "told.json").write_bytes(msgspec.json.encode(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
