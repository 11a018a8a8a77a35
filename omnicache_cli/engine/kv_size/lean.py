"""What a process that only counts can leave out of vLLM: the compilers, and what serves requests.

vLLM imports them while it loads, and they take more time and memory than all the rest. In such a
process a module of ROOTS is empty but has every name: as a decorator it leaves a function as it is,
as a base class it does nothing. Nothing that decides the size of a cache comes from them;
tests/engine/test_kv_size_apart.py holds the answers with and without them equal.
"""

import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

ROOTS = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "vllm.env_override",  # patches of torch._inductor
    "vllm.entrypoints",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.tool_parsers",
)

CONCRETE = dict.fromkeys(
    (
        *("expect_true", "guard_bool", "guard_or_false", "guard_or_true", "guard_scalar"),
        *("guard_int", "guard_float", "guard_size_oblivious", "guarding_hint_or_throw"),
        "statically_known_true",
    ),
    lambda value, *_, **__: value,
) | {
    "statically_known_false": lambda value: not value,
    "sym_eq": lambda one, other: one == other,
    "sym_or": lambda *values: any(values),
    "sym_and": lambda *values: all(values),
    "has_guarding_hint": lambda _: True,
    "has_free_symbols": lambda _: False,
    "has_free_unbacked_symbols": lambda _: False,
    "free_unbacked_symbols": lambda _: set(),
    "is_nested_int": lambda _: False,
    "is_symbolic": lambda _: False,
}
"""What torch asks symbolic_shapes of sizes that are numbers; the module itself loads sympy."""

ABSENT = ("scipy", "opentelemetry")
"""Packages that vLLM and transformers can do without."""


class _Nothing(type):
    """A class that is its own every attribute, and that gives back a function it decorates."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)

    def __call__(cls, *args: Any, **_: Any) -> Any:
        return _same(*args[:1])

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __contains__(cls, _: Any) -> bool:
        return False

    def __bool__(cls) -> bool:
        return False

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def _same(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, or what makes one."""
    return function if callable(function) else _same


def _named(name: str) -> Any:
    return _Nothing(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return CONCRETE.get(name) or _named(name)


class LeanFinder(MetaPathFinder, Loader):
    """Finds the modules of ROOTS before anything else does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if not any(name == root or name.startswith(f"{root}.") for root in ROOTS):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def leave_out() -> None:
    """For this whole process; call it before torch is imported."""
    sys.meta_path.insert(0, LeanFinder())
    sys.modules.update(dict.fromkeys(ABSENT))  # type: ignore[arg-type]
    try:
        import torch
        from torch._library import triton
    except ImportError:  # whoever asks vLLM says so
        return
    torch.compile = _same
    triton.get_inner_triton_kernels = lambda _: []  # read from sources, by torch._inductor
