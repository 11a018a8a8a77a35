"""The plugin entry point: nothing when tracing is off, and never an exception into vLLM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omnicache_cli.engine import plugin

LOADED = """
import json, sys
before = set(sys.modules)
from omnicache_cli.engine import plugin
plugin.register()
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_without_the_variable_only_our_small_modules_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(plugin.ENVIRONMENT_VARIABLE, raising=False)
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [
        "omnicache_cli",
        "omnicache_cli.engine",
        "omnicache_cli.engine.plugin",
    ]


@pytest.mark.parametrize("value", ["x", "{}", '{"folder": 5, "salt_key": ""}', "[1]"])
def test_a_bad_value_is_said_and_not_raised(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numpy", reason="the probe runs beside vLLM, which brings numpy")
    monkeypatch.setenv(plugin.ENVIRONMENT_VARIABLE, value)
    plugin.register()
    assert capsys.readouterr().err.startswith("omnicache: this process is not traced: ")


def test_the_entry_point_is_the_one_vllm_looks_for() -> None:
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name=plugin.PLUGIN_NAME)
    assert found.load() is plugin.register


def test_modules_are_wrapped_when_they_are_imported_and_not_before(tmp_path: Path) -> None:
    pytest.importorskip("numpy", reason="the probe runs beside vLLM, which brings numpy")
    package = tmp_path / "vllm" / "v1" / "core"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "block_pool.py").write_text(
        "class BlockPool:\n    def get_new_blocks(self, num_blocks):\n        return [num_blocks]\n"
    )
    script = (
        "import json, sys\n"
        "from omnicache_cli.engine import plugin\n"
        "plugin.register()\n"
        "assert not any(name.startswith('vllm') for name in sys.modules)\n"
        "from vllm.v1.core.block_pool import BlockPool\n"
        "from omnicache_cli.engine.probe import recorder\n"
        "print(hasattr(BlockPool.get_new_blocks, '__omnicache__'))\n"
        "print(BlockPool().get_new_blocks(3))\n"
        "print(sorted(recorder.current().errors))\n"
    )
    settings = json.dumps({"folder": str(tmp_path), "salt_key": "00"})
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(tmp_path), plugin.ENVIRONMENT_VARIABLE: settings},
    )
    wrapped, result, missing = ran.stdout.splitlines()
    assert (wrapped, result) == ("True", "[3]")
    assert "missing BlockPool.free_blocks" in missing
