"""The wrappers around the tensor caches, omnicache's own and vLLM-Omni's: how long each call takes.

They wrap the caches and nothing else: what runs on a thread of its own (vLLM-Omni's committer and
its prefetches) delays no step and is not counted. Of calls inside each other the inner one counts
for itself only, so that the phases of a step can be added up.
"""

import functools
import time
from typing import Any, Literal

from omnicache_cli.engine.probe.runner import running
from omnicache_cli.engine.probe.wrapping import Hooks, Method, Wrap

Phase = Literal["save", "restore", "copy"]


def timed(phase: Phase) -> Wrap:
    """Adds the time of a call to a phase of the step whose runner is at work on this thread."""

    def wrap(original: Method) -> Method:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            probe = running.probe
            if probe is None:
                return original(self, *args, **kwargs)
            outside, running.inner_ns = running.inner_ns, 0
            started = time.perf_counter_ns()
            try:
                return original(self, *args, **kwargs)
            finally:
                spent = time.perf_counter_ns() - started
                probe.add_tensor_time(phase, spent - running.inner_ns)
                running.inner_ns = outside + spent

        return method

    return wrap


HOOKS: Hooks = {
    "omnicache_cli.tensor_cache.cache": {
        "TensorCache": {
            "begin_step": timed("save"),
            "save": timed("save"),
            "materialize": timed("restore"),
        },
    },
    "omnicache_cli.tensor_cache.deferred": {
        "DeferredWrites": {
            "fetch": timed("copy"),
            "hold": timed("copy"),
            "start_of": timed("copy"),
            "land_ready": timed("copy"),
            "land": timed("copy"),
            "land_all": timed("copy"),
        },
    },
    "vllm_omni.core.prefix_cache.manager": {
        "OmniPrefixCacheManager": {
            "new_step_starts": timed("save"),
            "save_outputs": timed("save"),
            "materialize": timed("restore"),
        },
    },
    "vllm_omni.core.prefix_cache.controller": {
        "OmniPrefixCacheController": {
            "stage_step_host": timed("copy"),
            "join_host_ready": timed("copy"),
            "join": timed("copy"),
            "fetch_host": timed("copy"),
        },
    },
}
"""As `hooks.HOOKS`, for tensor caches."""
