"""The wrappers around Model Runner V2 (`vllm.v1.worker.gpu`), see `hooks` for the rules.

V2 has no method around the model's call, and a full CUDA graph replays without any Python of the
model. What stands around all ways to run it is the runner's KV connector, a no-op where there is
none: `pre_forward` comes right before, `finish_forward` right after.
"""

import functools
import threading
import time
from typing import Any

from omnicache_cli.engine.probe import recorder as recording
from omnicache_cli.engine.probe.runner_v2 import RunnerV2Probe
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


class _Running(threading.local):
    """The probe whose runner is inside `execute_model`, on this thread."""

    probe: RunnerV2Probe | None = None


_running = _Running()


def runner_init(original: Method) -> Method:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        recorder = recording.current()
        if recorder is None or probe_of(self) is not None:
            return
        with guarded(recorder, "GPUModelRunner.__init__"):
            cover(type(self), "GPUModelRunner", RUNNER_METHODS)
            setattr(self, PROBE_ATTRIBUTE, RunnerV2Probe(recorder, self))

    return __init__


def execute_model(original: Method) -> Method:
    @functools.wraps(original)
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: RunnerV2Probe | None = probe_of(self)
        if (
            probe is None
            or _running.probe is not None
            or given(args, kwargs, 2, "dummy_run", default=False)
        ):
            return original(self, *args, **kwargs)
        with guarded(probe.recorder, "GPUModelRunner.execute_model"):
            probe.begin(given(args, kwargs, 0, "scheduler_output"), time.perf_counter_ns())
        _running.probe = probe
        try:
            result = original(self, *args, **kwargs)
        finally:
            _running.probe = None
        with guarded(probe.recorder, "GPUModelRunner.execute_model"):
            probe.execute_done(time.perf_counter_ns(), sampled_later=result is None)
        return result

    return execute_model


def prepare_inputs(original: Method) -> Method:
    @functools.wraps(original)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        probe = _running.probe
        if probe is not None:
            with guarded(probe.recorder, "GPUModelRunner.prepare_inputs"):
                probe.descriptor = given(args, kwargs, 2, "batch_desc")
        return result

    return prepare_inputs


def prepare_attn(original: Method) -> Method:
    @functools.wraps(original)
    def prepare_attn(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        probe = _running.probe
        if probe is not None:
            with guarded(probe.recorder, "GPUModelRunner.prepare_attn"):
                tables, slot_mappings = result
                probe.prepared = given(args, kwargs, 0, "input_batch"), tables, slot_mappings
        return result

    return prepare_attn


def pre_forward(original: Method) -> Method:
    @functools.wraps(original)
    def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        probe = _running.probe
        if probe is not None and probe.prepared is not None:
            with guarded(probe.recorder, "KVConnector.pre_forward"):
                now = time.perf_counter_ns()
                probe.forward(_metadata(kwargs), now)
        return result

    return pre_forward


def _metadata(given: dict[str, Any]) -> Any:
    """The attention metadata of the step; before a full CUDA graph it is an argument."""
    if "attn_metadata" in given:
        return given["attn_metadata"]
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata


def finish_forward(original: Method) -> Method:
    @functools.wraps(original)
    def finish_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe = _running.probe
        if probe is not None:
            with guarded(probe.recorder, "KVConnector.finish_forward"):
                probe.forward_done(time.perf_counter_ns())
        return original(self, *args, **kwargs)

    return finish_forward


def sample_tokens(original: Method) -> Method:
    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: RunnerV2Probe | None = probe_of(self)
        if probe is None or probe.sampling:
            return original(self, *args, **kwargs)
        probe.sampling = True
        started = time.perf_counter_ns()
        try:
            result = original(self, *args, **kwargs)
        finally:
            probe.sampling = False
        ended = time.perf_counter_ns()
        with guarded(probe.recorder, "GPUModelRunner.sample_tokens"):
            probe.sample_done(started, ended)
        return result

    return sample_tokens


def pool(original: Method) -> Method:
    """A pooling model samples nothing: its record is whole."""

    @functools.wraps(original)
    def pool(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        probe: RunnerV2Probe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "GPUModelRunner.pool"):
                probe.pool_done()
        return result

    return pool


RUNNER_METHODS: dict[str, Wrap] = {
    "execute_model": execute_model,
    "prepare_inputs": prepare_inputs,
    "prepare_attn": prepare_attn,
    "sample_tokens": sample_tokens,
    "pool": pool,
}
CONNECTOR_METHODS: dict[str, Wrap] = {
    "pre_forward": pre_forward,
    "finish_forward": finish_forward,
}
HOOKS: Hooks = {
    "vllm.v1.worker.gpu.model_runner": {
        "GPUModelRunner": {"__init__": runner_init, **RUNNER_METHODS},
    },
    "vllm.v1.worker.gpu.kv_connector": {
        "KVConnector": CONNECTOR_METHODS,
        "ActiveKVConnector": CONNECTOR_METHODS,
    },
}
"""As `hooks.HOOKS`, for Model Runner V2."""
