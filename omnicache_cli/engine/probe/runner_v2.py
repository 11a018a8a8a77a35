"""Follows one model runner of vLLM's Model Runner V2: one record a forward pass.

Gathers over the hooks of a step what `RunnerProbe` then records. Not recorded: dummy runs, batches
without the mark of a scheduler (warm-up), the passes of a draft model.
"""

import time
from typing import Any

from omnicache_cli.engine.probe.live_v2 import layout_of, read_batch
from omnicache_cli.engine.probe.recorder import Recorder
from omnicache_cli.engine.probe.runner import RunnerProbe


class RunnerV2Probe:
    """State of one traced model runner. Its methods are called by the wrappers in `hooks_v2`."""

    def __init__(self, recorder: Recorder, runner: Any) -> None:
        self.recorder = recorder
        self.sampling = False  # inside sample_tokens
        self.descriptor: Any = None  # vLLM's BatchExecutionDescriptor of the current step
        self.prepared: tuple[Any, Any, Any] | None = None  # its InputBatch, tables and slots
        self._runner = runner
        self._steps = RunnerProbe(recorder, runner, layout_of)
        self._launched = 0  # when the model was called; 0: it does not run

    def begin(self, scheduler_output: Any, now: int) -> None:
        """execute_model starts, and it is no dummy run."""
        self.descriptor = self.prepared = None
        self._launched = 0
        self._steps.begin(scheduler_output, now)

    def forward(self, metadata: Any, now: int) -> None:
        """The model is about to be called."""
        prepared, self.prepared = self.prepared, None
        if prepared is None or self._steps.mark is None:
            return
        self._steps.forward(read_batch(self._runner, self.descriptor, *prepared, metadata), now)
        self._launched = time.perf_counter_ns()

    def forward_done(self, now: int) -> None:
        if self._launched:
            self._steps.forward_done(now - self._launched)
            self._launched = 0

    def execute_done(self, now: int, *, sampled_later: bool) -> None:
        """execute_model returned: the model ran at the latest until now.

        LookupError: the model ran, and nobody saw it start.
        """
        self.forward_done(now)
        if self.prepared is not None and self._steps.mark is not None:
            self.prepared = None
            raise LookupError("KVConnector.pre_forward was not called")
        self._steps.execute_done(sampled_later=sampled_later)

    def pool_done(self) -> None:
        self._steps.execute_done(sampled_later=False)

    def sample_done(self, started: int, ended: int) -> None:
        """Ranks before the last pipeline stage only receive here what the last one sampled."""
        if self._runner.is_last_pp_rank:
            self._steps.sample_done(started, ended)
