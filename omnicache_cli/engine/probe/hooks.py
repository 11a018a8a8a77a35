"""The wrappers around vLLM's methods: which method, and what the probe does around it.

Each wrapper calls vLLM's method exactly once with its own arguments and returns what it
returned. Everything of ours runs guarded: an error is counted and vLLM goes on.
"""

import functools
import multiprocessing
from typing import Any

from omnicache_cli.engine.probe import (
    hooks_pool,
    hooks_scheduler,
    hooks_tensors,
    hooks_v1,
    hooks_v2,
)
from omnicache_cli.engine.probe import recorder as recording
from omnicache_cli.engine.probe.wrapping import Hooks, Method, guarded


def last_of_process(original: Method) -> Method:
    """vLLM gives a child process seconds to tear down and then kills it: end its file first."""

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = recording.current()
        if recorder is not None and multiprocessing.parent_process() is not None:
            with guarded(recorder, "shutdown"):
                recorder.close()
        return original(self, *args, **kwargs)

    return shutdown


HOOKS: Hooks = {
    **hooks_scheduler.HOOKS,
    **hooks_pool.HOOKS,
    "vllm.v1.engine.core": {"EngineCore": {"shutdown": last_of_process}},
    "vllm.v1.worker.worker_base": {"WorkerWrapperBase": {"shutdown": last_of_process}},
    **hooks_v1.HOOKS,
    **hooks_v2.HOOKS,
    **hooks_tensors.HOOKS,
}
"""vLLM module -> class -> method -> wrapper: every place where the probe touches vLLM."""
