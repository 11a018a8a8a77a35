"""Puts the hooks in place, when and where their modules are loaded.

Importing vLLM's runner would cost an API server seconds it does not need, so nothing is
imported here: modules that are there already are wrapped at once, others when they come.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

import msgspec

from omnicache_cli.engine.probe import recorder
from omnicache_cli.engine.probe.hooks import HOOKS
from omnicache_cli.engine.probe.wrapping import wrap
from omnicache_cli.trace.records import MISSING_HOOK


def install(settings: str) -> recorder.Recorder:
    """Record in this process with the settings of the environment variable.

    vLLM calls the plugin again in a process that traces already: the recording then goes on.
    """
    asked = msgspec.json.decode(settings, type=recorder.Settings)
    recording = recorder.current()
    if recording is None or recording.settings != asked:
        recording = recorder.begin(asked)
    hook_vllm()
    return recording


def hook_vllm() -> None:
    """Wrap vLLM's classes now, or as soon as their modules are imported. Harmless when repeated."""
    for name in HOOKS:
        module = sys.modules.get(name)
        if module is not None:
            wrap_module(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wrap_module(module: ModuleType) -> None:
    """Wrap what HOOKS names in one module; a name that is missing is counted, not raised."""
    for class_name, methods in HOOKS[module.__name__].items():
        owner = getattr(module, class_name, None)
        for method, make in methods.items():
            if owner is None or method not in owner.__dict__:
                recording = recorder.current()
                if recording is not None:
                    missing = AttributeError(f"{module.__name__}.{class_name}.{method}")
                    recording.note_error(_missing(module.__name__, class_name, method), missing)
                continue
            wrap(owner, method, make)


def _missing(module: str, class_name: str, method: str) -> str:
    several = sum(class_name in classes for classes in HOOKS.values()) > 1
    return f"{MISSING_HOOK}{class_name}.{method}" + (f" of {module}" if several else "")


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the usual finders find a hooked module, and wraps it once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in HOOKS:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The usual loader, then the hooks."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # inspect and reload see the usual one
        try:
            wrap_module(module)
        except Exception as error:  # an engine without a trace beats no engine
            recording = recorder.current()
            if recording is not None:
                recording.note_error("wrap_module", error)
