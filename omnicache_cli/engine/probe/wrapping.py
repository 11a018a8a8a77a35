"""What all wrappers share: where a probe is kept, our code guarded, a method replaced."""

import time
from collections.abc import Callable
from typing import Any

from omnicache_cli.engine.probe import recorder as recording

PROBE_ATTRIBUTE = "_omnicache_probe"
"""Where a traced vLLM object keeps its probe."""

Method = Callable[..., Any]
Wrap = Callable[[Method], Method]
Hooks = dict[str, dict[str, dict[str, Wrap]]]
"""vLLM module -> class -> method -> wrapper."""

_REQUIRED = object()


def given(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any = _REQUIRED
) -> Any:
    """An argument of a wrapped method, by position or by name. LookupError: it is not there.

    Wrappers take whatever vLLM gives and hand it on: an argument that a newer vLLM adds must not
    break the engine.
    """
    if len(args) > index:
        return args[index]
    return kwargs[name] if default is _REQUIRED else kwargs.get(name, default)


def probe_of(traced: Any) -> Any:
    return traced.__dict__.get(PROBE_ATTRIBUTE)


class guarded:
    """Our own code inside vLLM: its time is counted, its errors are counted and swallowed."""

    __slots__ = ("_hook", "_recorder", "_started")

    def __init__(self, recorder: recording.Recorder, hook: str) -> None:
        self._recorder = recorder
        self._hook = hook

    def __enter__(self) -> None:
        self._started = time.perf_counter_ns()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._recorder.probe_ns += time.perf_counter_ns() - self._started
        if error is not None and isinstance(error, Exception):
            self._recorder.note_error(self._hook, error)
            return True
        return False


def wrap(owner: type, name: str, make: Wrap) -> None:
    """Replace a method that `owner` itself defines; harmless when done again."""
    original = owner.__dict__[name]
    if not hasattr(original, "__omnicache__"):
        wrapper = make(original)
        wrapper.__omnicache__ = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)


def cover(cls: type, base: str, methods: dict[str, Wrap]) -> None:
    """Wrap the overrides of subclasses too: they need not call the method they override.

    `base` is the class that is wrapped already; where an override does call it, the probe counts
    the outer call only.
    """
    for owner in cls.__mro__:
        if owner.__name__ == base:
            return
        for name, make in methods.items():
            if name in owner.__dict__:
                wrap(owner, name, make)
