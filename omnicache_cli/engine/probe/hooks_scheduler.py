"""The wrappers around vLLM's Scheduler, see `hooks` for the rules."""

import functools
import time
from typing import Any

from omnicache_cli.engine.adapter import HASH_ATTRIBUTE
from omnicache_cli.engine.probe import recorder as recording
from omnicache_cli.engine.probe.scheduler import SchedulerProbe
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


def scheduler_init(original: Method) -> Method:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        recorder = recording.current()
        if recorder is None or probe_of(self) is not None:
            return
        with guarded(recorder, "Scheduler.__init__"):
            cover(type(self), "Scheduler", SCHEDULER_METHODS)
            probe = SchedulerProbe(recorder, self)
            manager = self.kv_cache_manager
            for traced in (manager.block_pool, manager, self):
                setattr(traced, PROBE_ATTRIBUTE, probe)

    return __init__


def schedule(original: Method) -> Method:
    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None or probe.busy:
            return original(self, *args, **kwargs)
        probe.busy = True
        probe.lookup_ns = probe.allocate_ns = 0
        started = time.perf_counter_ns()
        try:
            output = original(self, *args, **kwargs)
        finally:
            probe.busy = False
        ended = time.perf_counter_ns()
        with guarded(probe.recorder, "Scheduler.schedule"):
            probe.step(output, started, ended)
        return output

    return schedule


def update_from_output(original: Method) -> Method:
    @functools.wraps(original)
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None or probe.busy or probe.updating:
            return original(self, *args, **kwargs)
        probe.updating = True
        started = time.perf_counter_ns()
        try:
            result = original(self, *args, **kwargs)
        finally:
            probe.updating = False
        ended = time.perf_counter_ns()
        with guarded(probe.recorder, "Scheduler.update_from_output"):
            probe.output(given(args, kwargs, 0, "scheduler_output"), started, ended)
        return result

    return update_from_output


def flush_after(original: Method) -> Method:
    """Around methods that finish, abort or reset between steps."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None and not probe.busy:
            with guarded(probe.recorder, f"Scheduler.{original.__name__}"):
                probe.flush()
        return result

    return method


def add_request(original: Method) -> Method:
    @functools.wraps(original)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, *args, **kwargs)
        new = None
        with guarded(probe.recorder, "Scheduler.add_request"):
            request = given(args, kwargs, 0, "request")
            # A session's last word ends it in here: afterwards it would look like a new request.
            new = None if probe.is_live(request.request_id) else request
        result = original(self, *args, **kwargs)
        if new is not None:
            with guarded(probe.recorder, "Scheduler.add_request"):
                if not probe.is_live(new.request_id):  # else an override called what it overrides
                    probe.add_request(new)
        return result

    return add_request


def preempt_request(original: Method) -> Method:
    @functools.wraps(original)
    def _preempt_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is not None:
            with guarded(probe.recorder, "Scheduler._preempt_request"):
                probe.preempt(given(args, kwargs, 0, "request"))
        return original(self, *args, **kwargs)

    return _preempt_request


def free_request(original: Method) -> Method:
    @functools.wraps(original)
    def _free_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        probe: SchedulerProbe | None = probe_of(self)
        if probe is None:
            return original(self, *args, **kwargs)
        with guarded(probe.recorder, "Scheduler._free_request"):
            probe.finish(given(args, kwargs, 0, "request"))
        result = original(self, *args, **kwargs)
        with guarded(probe.recorder, "Scheduler._free_request"):
            probe.forget(given(args, kwargs, 0, "request"))
        return result

    return _free_request


def request_init(original: Method) -> Method:
    """Times the hashing of a prompt. vLLM hashes it in here, before the scheduler sees it."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        hasher = kwargs.get("block_hasher")
        if hasher is None or recording.current() is None:
            original(self, *args, **kwargs)
            return
        spent = 0

        def timed(request: Any) -> Any:
            nonlocal spent
            started = time.perf_counter_ns()
            hashes = hasher(request)
            spent += time.perf_counter_ns() - started
            return hashes

        original(self, *args, **{**kwargs, "block_hasher": timed})
        if self.__dict__.get("_block_hasher") is timed:  # of output tokens it is called every step
            self._block_hasher = hasher
        setattr(self, HASH_ATTRIBUTE, spent)

    return __init__


SCHEDULER_METHODS: dict[str, Wrap] = {
    "schedule": schedule,
    "add_request": add_request,
    "update_from_output": update_from_output,
    "finish_requests": flush_after,
    "reset_prefix_cache": flush_after,
    "_preempt_request": preempt_request,
    "_free_request": free_request,
}
HOOKS: Hooks = {
    "vllm.v1.core.sched.scheduler": {
        "Scheduler": {"__init__": scheduler_init, **SCHEDULER_METHODS},
    },
    "vllm.v1.request": {"Request": {"__init__": request_init}},
}
