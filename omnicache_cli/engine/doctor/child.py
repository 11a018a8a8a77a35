"""Imports modules one by one in a process of its own, and says how each went.

Run by `probes` with names of things to try; prints a JSON line before and after each, so that
whoever reads knows which one it did not survive. Standard library only. What the modules print
goes to stderr.
"""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from omnicache_cli.profile.parent import end_with_parent

MAX_ERROR = 300
"""Characters of an error that are passed on."""


def main() -> None:
    end_with_parent(signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        say(answers, {"begins": name})
        say(answers, {"ended": name, **tried(name)})
    os._exit(0)  # taking torch apart again takes time, and may crash


def say(stream: Any, line: Mapping[str, object]) -> None:
    stream.write(json.dumps(line, default=str) + "\n")
    stream.flush()


def tried(name: str) -> dict[str, object]:
    start = time.perf_counter()
    try:
        details = TRIES.get(name, importing(name))()
    except BaseException as error:  # also what a module does that calls sys.exit
        last = (str(error).strip().splitlines() or [""])[0]
        message = f"{type(error).__name__}: {last}"[:MAX_ERROR]
        return {"outcome": "fails", "error": message, "seconds": time.perf_counter() - start}
    return {"outcome": "imports", "details": details, "seconds": time.perf_counter() - start}


def importing(name: str) -> Callable[[], dict[str, object]]:
    def run() -> dict[str, object]:
        importlib.import_module(name)
        return {}

    return run


def torch() -> dict[str, object]:
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def devices() -> dict[str, object]:
    """What torch sees; the driver is asked for the first time here."""
    import torch

    if not torch.cuda.is_available():
        return {"names": []}
    count = torch.cuda.device_count()
    return {"names": [torch.cuda.get_device_name(number) for number in range(count)]}


def vllm() -> dict[str, object]:
    """The part of vLLM that every command with an engine imports first."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    from vllm.platforms import current_platform

    return {"device": current_platform.device_type}


TRIES: Mapping[str, Callable[[], dict[str, object]]] = {
    "torch": torch,
    "devices": devices,
    "vllm": vllm,
}
"""What is more than an import; `devices` wants to come after `torch`."""


if __name__ == "__main__":
    main()
