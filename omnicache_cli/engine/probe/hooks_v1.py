"""The wrappers around vLLM's GPUModelRunner (V1), see `hooks` for the rules."""

import functools
import time
from typing import Any

from omnicache_cli.engine.probe import recorder as recording
from omnicache_cli.engine.probe.live import read_batch
from omnicache_cli.engine.probe.runner import RunnerProbe, running
from omnicache_cli.engine.probe.wrapping import (
    PROBE_ATTRIBUTE,
    Hooks,
    Method,
    Wrap,
    cover,
    given,
    guarded,
    probe_of,
)


def runner_init(original: Method) -> Method:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        recorder = recording.current()
        if recorder is None or probe_of(self) is not None:
            return
        with guarded(recorder, "GPUModelRunner.__init__"):
            cover(type(self), "GPUModelRunner", RUNNER_METHODS)
            setattr(self, PROBE_ATTRIBUTE, RunnerProbe(recorder, self))

    return __init__


def execute_model(original: Method) -> Method:
    @functools.wraps(original)
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: RunnerProbe | None = probe_of(self)
        if probe is None or probe.busy:
            return original(self, *args, **kwargs)
        with guarded(probe.recorder, "GPUModelRunner.execute_model"):
            probe.begin(given(args, kwargs, 0, "scheduler_output"), time.perf_counter_ns())
        probe.busy = True
        running.probe = probe
        try:
            result = original(self, *args, **kwargs)
        finally:
            probe.busy = False
            running.probe = None
        with guarded(probe.recorder, "GPUModelRunner.execute_model"):
            probe.execute_done(sampled_later=result is None)
        return result

    return execute_model


def model_forward(original: Method) -> Method:
    @functools.wraps(original)
    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: RunnerProbe | None = probe_of(self)
        if (
            probe is None or not probe.busy or probe.forwarding
        ):  # not busy: a dummy or profiling run
            return original(self, *args, **kwargs)
        probe.forwarding = True
        with guarded(probe.recorder, "GPUModelRunner._model_forward"):
            from vllm.forward_context import get_forward_context

            now = time.perf_counter_ns()
            probe.forward(read_batch(self, get_forward_context()), now)
        started = time.perf_counter_ns()
        try:
            output = original(self, *args, **kwargs)
        finally:
            probe.forwarding = False
        ended = time.perf_counter_ns()
        with guarded(probe.recorder, "GPUModelRunner._model_forward"):
            probe.forward_done(ended - started)
        return output

    return _model_forward


def sample_tokens(original: Method) -> Method:
    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: RunnerProbe | None = probe_of(self)
        if probe is None or probe.busy:
            return original(self, *args, **kwargs)
        with guarded(probe.recorder, "GPUModelRunner.sample_tokens"):
            probe.sample_begins()
        probe.busy = True
        running.probe = probe
        started = time.perf_counter_ns()
        try:
            result = original(self, *args, **kwargs)
        finally:
            probe.busy = False
            running.probe = None
        ended = time.perf_counter_ns()
        with guarded(probe.recorder, "GPUModelRunner.sample_tokens"):
            probe.sample_done(started, ended)
        return result

    return sample_tokens


RUNNER_METHODS: dict[str, Wrap] = {
    "execute_model": execute_model,
    "_model_forward": model_forward,
    "sample_tokens": sample_tokens,
}
HOOKS: Hooks = {
    "vllm.v1.worker.gpu_model_runner": {
        "GPUModelRunner": {"__init__": runner_init, **RUNNER_METHODS},
    },
}
