"""Imports that break, each in the way a broken installation breaks, tried by a real child."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnicache_cli.doctor.facts import Attention, Gpu, Probe
from omnicache_cli.engine.doctor import probes, system
from omnicache_cli.engine.doctor.probes import probe

LIMIT_S = 20.0

MODULES = {
    "one_good": "print('noise on stdout'); value = 1",
    "one_raises": "raise RuntimeError('operator torchvision::nms does not exist\\nand more')",
    "one_segfaults": "import ctypes; ctypes.string_at(0)",
    "one_exits": "import sys; sys.exit('goodbye')",
    "one_leaves": "import os; os._exit(7)",
    "one_library": "raise OSError('libtorchcodec.so: cannot open shared object file')",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """These modules, where a child finds them too."""
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    before = os.environ.get("PYTHONPATH", "")
    ours = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), ours, before]))
    return tmp_path


@pytest.mark.usefixtures("modules")
def test_each_way_to_break_is_told_apart_and_costs_only_itself() -> None:
    found = probe(list(MODULES), limit_s=LIMIT_S)
    assert {name: (one.outcome, one.error) for name, one in found.items()} == {
        "one_good": ("imports", ""),
        "one_raises": ("fails", "RuntimeError: operator torchvision::nms does not exist"),
        "one_segfaults": ("crashes", "it ends the process with SIGSEGV"),
        "one_exits": ("fails", "SystemExit: goodbye"),
        "one_leaves": ("crashes", "it ends the process with exit code 7"),
        "one_library": ("fails", "OSError: libtorchcodec.so: cannot open shared object file"),
    }


def test_a_module_that_hangs_is_killed_with_what_it_started(modules: Path) -> None:
    """Its own child too: it writes its number first."""
    (modules / "one_hangs.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(modules / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n",
        encoding="utf-8",
    )
    found = probe(["one_hangs", "one_good"], limit_s=3.0)
    assert found["one_hangs"] == Probe("hangs", 3.0, "no answer within 3 s")
    assert found["one_good"].outcome == "imports"
    orphan = int((modules / "pid").read_text(encoding="utf-8"))
    assert has_ended(orphan)


def has_ended(pid: int) -> bool:
    """Not there, or a zombie that nobody has waited for."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    return status.rpartition(")")[2].split()[0] in {"Z", "X"}


def test_nothing_to_try_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "COMMAND", ("/is/not/there",))
    assert probe([], limit_s=LIMIT_S) == {}


@pytest.mark.usefixtures("modules")
def test_a_module_that_is_not_there_fails() -> None:
    found = probe(["one_absent"], limit_s=LIMIT_S)["one_absent"]
    assert (found.outcome, found.error) == (
        "fails",
        "ModuleNotFoundError: No module named 'one_absent'",
    )


def test_a_signal_without_a_name_has_its_number() -> None:
    assert probes._end_of(-signal.SIGKILL) == "it ends the process with SIGKILL"
    assert probes._end_of(-99) == "it ends the process with signal 99"


# -- the machine ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("online", "nodes"),
    [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,3", [0, 1, 3]), ("", None), (None, None)],
)
def test_numa_nodes_as_the_kernel_lists_them(online: str | None, nodes: list[int] | None) -> None:
    assert system.numa_nodes(online) == nodes


def test_the_limits_of_attention_are_read_where_the_source_states_them() -> None:
    source = (
        "class A:\n"
        "    @staticmethod\n"
        "    def get_supported_kernel_block_sizes():\n        return [MultipleOf(32)]\n"
        "    @classmethod\n"
        "    def get_supported_head_sizes(cls):\n        return [32, 64]\n"
    )
    assert system.limits_in(source) == Attention(32, [32, 64])
    assert system.limits_in(source.replace("[32, 64]", "cls.sizes")) == Attention(32, None)
    assert system.limits_in(source.replace("[MultipleOf(32)]", "[16]")) == Attention(None, [32, 64])


def test_cards_of_nvidia_smi() -> None:
    listing = "NVIDIA H100 80GB HBM3, 81559, 550.54\nNVIDIA GB10, [N/A], 580.1\n"
    assert system.cards_in(listing) == [
        Gpu("NVIDIA H100 80GB HBM3", 81559, "550.54"),
        Gpu("NVIDIA GB10", None, "580.1"),
    ]
    assert system.cards_in("no devices were found\n") == []


@pytest.mark.parametrize(
    ("mask", "capable"),
    [("000001fffeffffff", True), ("0000000000080000", True), ("00000000a80425fb", False)],
)
def test_the_capability_is_one_bit(mask: str, capable: bool) -> None:
    assert system.is_capable(f"Name:\tx\nCapEff:\t{mask}\n") is capable
    assert system.is_capable("Name:\tx\n") is False


def fake_py_spy(folder: Path, script: str) -> str:
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return str(program)


def test_py_spy_is_tried_on_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A py-spy that is refused says why in its first line; its target does not stay."""
    program = fake_py_spy(
        tmp_path, f'echo "$3" > {tmp_path}/pid; echo "Permission Denied: try sudo" >&2; exit 1'
    )
    monkeypatch.setattr(system, "py_spy", lambda: program)
    found = system.sample_a_process()
    assert found is not None
    assert (found.outcome, found.error) == ("fails", "Permission Denied: try sudo")
    assert has_ended(int((tmp_path / "pid").read_text(encoding="utf-8")))

    program = fake_py_spy(tmp_path, "exec sleep 600")
    monkeypatch.setattr(system, "py_spy", lambda: program)
    found = system.sample_a_process(limit_s=0.5)
    assert found is not None
    assert found.outcome == "hangs"

    monkeypatch.setattr(system, "py_spy", lambda: None)
    assert system.sample_a_process() is None


def test_py_spy_of_this_environment_reads_a_process_or_says_why() -> None:
    found = system.sample_a_process()
    assert found is not None, "py-spy is among the test requirements"
    assert found.outcome in {"imports", "fails"}
    assert (found.error == "") == (found.outcome == "imports")


def test_only_known_variables_are_read() -> None:
    environment = {"HF_TOKEN": "hf_secret", "VLLM_PLUGINS": "x", "OMNICACHE_TRACE": "{}", "A": "b"}
    assert system.variables(environment) == {"VLLM_PLUGINS": "x"}


def test_the_child_imports_nothing_by_itself() -> None:
    code = (
        "import sys; before = set(sys.modules); import omnicache_cli.engine.doctor.child; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} "
        "- sys.stdlib_module_names))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["omnicache_cli"]
