"""Which room may import which, and what may not be loaded before it is needed."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import omnicache_cli

PACKAGE = Path(omnicache_cli.__file__).parent
HEAVY = {"vllm", "vllm_omni", "torch", "torchvision", "transformers", "tokenizers", "safetensors"}
HEAVY_ROOMS = {"engine", "tensor_cache", "verify"}

EVERYWHERE = {"errors", "advice"}

# What a room may import besides itself and EVERYWHERE, anywhere in its files. Control goes down.
ANALYSIS = {"tensor_cache", "report"}
MAY_IMPORT = {
    "cli": {
        *("engine", "trace", "tensor_cache", "verify", "prefix", "kv_size", "simulate"),
        *("profile", "monitor", "export", "live", "doctor", "report"),
    },
    # trace: records, writer and cheap invariants, for the probe. verify: the rows that it captures.
    # simulate: the requests that a pool is sent, and what it answers. profile: the runs that are
    # compared. doctor: the facts that are gathered; kv_size: what the CPU can do.
    "engine": {
        *("trace", "verify", "tensor_cache", "simulate", "profile", "doctor", "kv_size"),
    },
    "trace": ANALYSIS,
    "verify": ANALYSIS | {"trace"},  # its prompts
    "prefix": ANALYSIS | {"trace"},  # records and reader
    "kv_size": ANALYSIS,
    "simulate": ANALYSIS | {"trace", "prefix"},  # runs as workloads, and the prompts file
    "profile": ANALYSIS | {"trace"},  # records and reader
    "export": {"trace", "profile"},  # a run, and the samples beside it
    "live": {"trace", "report"},
    "monitor": ANALYSIS | {"trace"},  # a run of the same server
    "doctor": {"report"},
    "tensor_cache": set(),
    "report": set(),
    "errors": set(),
    "advice": set(),
}

# Imported by vLLM in each of its processes, traced or not.
LOADED_BY_EVERY_VLLM_PROCESS = ["__init__.py", "engine/__init__.py", "engine/plugin.py"]


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def statements_at_load(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module loads: not in functions, not under TYPE_CHECKING."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from statements_at_load(statement.orelse)
            continue
        yield statement
        for field in ("body", "orelse", "finalbody"):
            yield from statements_at_load(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements_at_load(handler.body)


def names_of(nodes: Iterable[ast.AST], path: Path) -> set[str]:
    """Dotted names that these nodes import; `from a import b` gives a.b."""
    package = ["omnicache_cli", *path.relative_to(PACKAGE).parts[:-1]]
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imports_at_load(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return names_of(statements_at_load(tree.body), path)


def imports_anywhere(path: Path) -> set[str]:
    return names_of(ast.walk(ast.parse(path.read_text(encoding="utf-8"))), path)


def rooms_in(names: set[str]) -> set[str]:
    parts = [name.split(".") for name in names]
    rooms = {part[1] for part in parts if part[0] == "omnicache_cli" and len(part) > 1}
    return rooms - {"__version__", "__init__"}


def test_imports_go_down_only() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in sources()
        if (room := room_of(path)) != "__init__"
        for other in rooms_in(imports_anywhere(path)) - {room, *EVERYWHERE} - MAY_IMPORT[room]
    }
    assert wrong == set()


def test_only_a_command_asks_the_engine_and_only_when_it_runs() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports engine at load"
        for path in sources()
        if room_of(path) != "engine" and "engine" in rooms_in(imports_at_load(path))
    }
    assert wrong == set()


def test_no_light_room_loads_a_heavy_library() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sources()
        if room_of(path) not in HEAVY_ROOMS
        for name in imports_at_load(path)
        if name.split(".")[0] in HEAVY
    }
    assert wrong == set()


def test_only_the_engine_room_imports_vllm() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sources()
        if room_of(path) != "engine"
        for name in imports_anywhere(path)
        if name.split(".")[0] in {"vllm", "vllm_omni"}
    }
    assert wrong == set()


def test_the_tensor_cache_needs_torch_and_nothing_of_an_engine() -> None:
    loaded = {
        name
        for path in sources()
        if room_of(path) == "tensor_cache"
        for name in imports_anywhere(path)
        if name.split(".")[0] not in sys.stdlib_module_names
    }
    assert {name.split(".")[0] for name in loaded} == {"omnicache_cli", "torch", "numpy"}
    assert rooms_in(loaded) == {"tensor_cache", "errors"}


@pytest.mark.parametrize("name", LOADED_BY_EVERY_VLLM_PROCESS)
def test_what_every_vllm_process_loads_imports_only_the_standard_library(name: str) -> None:
    roots = {imported.split(".")[0] for imported in imports_at_load(PACKAGE / name)}
    assert roots - sys.stdlib_module_names == set()


def test_loading_the_plugin_loads_nothing_else_of_ours() -> None:
    code = (
        "import sys; before = set(sys.modules); import omnicache_cli.engine.plugin; "
        "print(*sorted(name for name in set(sys.modules) - before "
        "if name.split('.')[0] not in sys.stdlib_module_names))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout.split() == [
        "omnicache_cli",
        "omnicache_cli.engine",
        "omnicache_cli.engine.plugin",
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch", {"torch"}),
        ("try:\n    import torch\nexcept ImportError:\n    import vllm", {"torch", "vllm"}),
        ("class A:\n    from torch import nn", {"torch.nn"}),
        ("def f():\n    import torch", set()),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import vllm", {"vllm"}),
    ],
)
def test_the_import_reader_sees_what_runs_at_load(source: str, found: set[str]) -> None:
    assert names_of(statements_at_load(ast.parse(source).body), PACKAGE / "x.py") == found
