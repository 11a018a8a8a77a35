"""`omnicache trace -- COMMAND`: the environment, the exit code, signals and streams.

The commands here start no engine; tests/engine has those that do.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnicache_cli.engine.environment import tracing_variables
from omnicache_cli.engine.plugin import ENVIRONMENT_VARIABLE
from omnicache_cli.trace.manifest import read_manifest
from tests.unit.run_builder import two_rounds

OMNICACHE = [sys.executable, "-m", "omnicache_cli.cli"]


def omnicache_trace(run: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*OMNICACHE, "trace", "-o", str(run), "--", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def copying(source: Path) -> list[str]:
    """A command that leaves a recorded run where it was told to trace."""
    code = (
        "import json, os, shutil, sys\n"
        f"folder = json.loads(os.environ['{ENVIRONMENT_VARIABLE}'])['folder']\n"
        "for name in os.listdir(sys.argv[1]):\n"
        "    if name != 'run.json': shutil.copy(os.path.join(sys.argv[1], name), folder)\n"
        "print('the server speaks')\n"
    )
    return python(code, str(source))


def test_a_traced_command_keeps_its_stdout_and_the_totals_go_to_stderr(tmp_path: Path) -> None:
    two_rounds().write(tmp_path / "made")
    ran = omnicache_trace(tmp_path / "run", *copying(tmp_path / "made"))
    assert (ran.returncode, ran.stdout) == (0, "the server speaks\n")
    assert ran.stderr.startswith("Summary of run\n")
    assert ran.stderr.endswith(f"next: omnicache show {tmp_path / 'run'}\n")
    manifest = read_manifest(tmp_path / "run")
    assert manifest is not None
    assert (manifest.layout, manifest.finished, manifest.exit_code) == ("command", True, 0)
    assert manifest.program == Path(sys.executable).name


def test_a_broken_invariant_makes_exit_code_1(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change_group(0, table_shape=(9, 64))
    recording.write(tmp_path / "made")
    ran = omnicache_trace(tmp_path / "run", *copying(tmp_path / "made"))
    assert ran.returncode == 1
    assert ran.stderr.endswith(f"next: omnicache show {tmp_path / 'run'} --check\n")


def test_a_command_without_an_engine_makes_exit_code_5(tmp_path: Path) -> None:
    ran = omnicache_trace(tmp_path / "run", "true")
    assert (ran.returncode, ran.stdout) == (5, "")
    assert ran.stderr == (
        f"omnicache: no process wrote a trace into {tmp_path / 'run'}; the command must start a "
        "vLLM engine, and omnicache-cli must be installed beside that vLLM (VLLM_PLUGINS must not "
        "leave it out)\n"
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["false"], 1),
        (python("raise SystemExit(42)"), 42),
        (python("import os; os.kill(os.getpid(), 9)"), 137),
    ],
)
def test_the_commands_own_exit_code_comes_first(
    tmp_path: Path, command: list[str], code: int
) -> None:
    ran = omnicache_trace(tmp_path / "run", *command)
    assert ran.returncode == code
    assert ran.stderr == (
        f"no process wrote a trace into {tmp_path / 'run'}; the command ended with exit code "
        f"{code} before any engine was traced\n"
    )


@pytest.mark.parametrize("failing", [["true"], ["false"], python("import os; os.kill(0, 9)")])
def test_what_traced_nothing_may_be_tried_again_without_force(
    tmp_path: Path, failing: list[str]
) -> None:
    """Also where the command took omnicache along: then run.json does not say how it ended."""
    two_rounds().write(tmp_path / "made")
    subprocess.run(
        [*OMNICACHE, "trace", "-o", str(tmp_path / "run"), "--", *failing],
        capture_output=True,
        check=False,
        timeout=60,
        start_new_session=True,
    )
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["run.json"]
    assert omnicache_trace(tmp_path / "run", *copying(tmp_path / "made")).returncode == 0
    refused = omnicache_trace(tmp_path / "run", "true")
    assert (refused.returncode, refused.stderr) == (
        3,
        f"omnicache: {tmp_path / 'run'} holds a run; pass --force to replace it\n",
    )
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_a_program_that_is_not_there_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    ran = omnicache_trace(tmp_path / "run", "no-such-program")
    assert (ran.returncode, ran.stderr) == (
        3,
        "omnicache: cannot run no-such-program: no such program; check the command after --\n",
    )
    assert not (tmp_path / "run").exists()


def test_options_of_a_model_are_refused_beside_a_command(tmp_path: Path) -> None:
    for options, named in ((["--rounds", "2"], "--rounds"), (["tiny"], "MODEL")):
        ran = subprocess.run(
            [*OMNICACHE, "trace", *options, "-o", str(tmp_path / "run"), "--", "true"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (
            2,
            f"omnicache: {named} cannot be combined with a command; leave it out\n",
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_command(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    command = [*OMNICACHE, "trace", "-o", str(tmp_path / "run"), "--", *python(code)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 7


def test_plugins_that_the_user_selected_stay_and_ours_is_added(tmp_path: Path) -> None:
    def plugins(value: str) -> str | None:
        return tracing_variables(tmp_path, {"VLLM_PLUGINS": value}).get("VLLM_PLUGINS")

    assert plugins("") == "omnicache_cli"
    assert plugins("lora_resolver") == "lora_resolver,omnicache_cli"
    assert plugins("a,omnicache_cli") is None
    assert "VLLM_PLUGINS" not in tracing_variables(tmp_path, {})


def test_the_variable_names_an_absolute_folder_and_a_fresh_salt_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (
        json.loads(tracing_variables(Path("run"), os.environ)[ENVIRONMENT_VARIABLE])
        for _ in range(2)
    )
    assert first["folder"] == str(tmp_path / "run")
    assert len(bytes.fromhex(first["salt_key"])) == 16
    assert first["salt_key"] != second["salt_key"]
