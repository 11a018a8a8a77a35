"""`omnicache profile` with the real py-spy, on small Python programs instead of an engine."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.advice import install_extra
from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.profile.manifest import ProfileManifest, read_profile_manifest
from omnicache_cli.trace.run import Run
from tests.unit.profile_kit import (
    BUSY,
    ENGINE,
    WAITING,
    Ran,
    command_line,
    left_of,
    omnicache,
    running,
    surroundings,
)

pytest.importorskip("psutil", reason="the extra `profile` is not installed")
KINDS = ("flamegraph", "speedscope", "raw")


def profiled(folder: Path) -> ProfileManifest:
    manifest = read_profile_manifest(folder)
    assert manifest is not None
    return manifest


def raw_stacks(folder: Path, name: str) -> dict[tuple[str, ...], int]:
    lines = [line.rpartition(" ") for line in (folder / name).read_text().splitlines()]
    return {tuple(stack.split(";")): int(weight) for stack, _, weight in lines}


def functions(stack: tuple[str, ...]) -> list[str]:
    return [frame.partition(" (")[0] for frame in stack]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    folder = tmp_path_factory.mktemp("samples") / "profile"
    with running(BUSY, 30) as process:
        ran = omnicache("profile", "--pid", process.pid, "--duration", 1, "-o", folder)
    return folder, ran


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran, tuple[int, int]]:
    """Also: the wall clock before and after it was sampled."""
    folder = tmp_path_factory.mktemp("timeline") / "profile"
    with running(BUSY, 30) as process:
        before = time.time_ns()
        ran = omnicache(
            *("profile", "--pid", process.pid, "--duration", 1, "--timeline"),
            *("--format", "json", "-o", folder),
        )
        after = time.time_ns()
    return folder, ran, (before, after)


def test_a_running_process_is_sampled_and_said_to_be(samples: tuple[Path, Ran]) -> None:
    folder, ran = samples
    assert ran.code == 0, ran.err
    (process,) = profiled(folder).processes
    assert ran.out.splitlines()[0] == "Profile of profile"
    assert re.search(r"^self % +total % +function +file$", ran.out, re.MULTILINE)
    assert re.search(r" spin +-?c?", ran.out)
    picture = folder / process.files["flamegraph"]
    assert ran.last_words == f"next: open {picture} in a browser"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} == {0o600}


def test_three_files_are_the_same_samples_in_three_formats(samples: tuple[Path, Ran]) -> None:
    folder, _ = samples
    (process,) = profiled(folder).processes
    assert tuple(process.files) == KINDS
    raw = raw_stacks(folder, process.files["raw"])
    assert sum(raw.values()) == process.samples > 0
    working = {stack: weight for stack, weight in raw.items() if stack[0] == "MainThread"}
    assert all(functions(stack)[1:4] == ["<module>", "outermost", "middle"] for stack in working), (
        working
    )

    scope = json.loads((folder / process.files["speedscope"]).read_text())
    frames = [f"{one['name']} ({one['file']}:{one['line']})" for one in scope["shared"]["frames"]]
    counted: Counter[tuple[str, ...]] = Counter()
    for thread in scope["profiles"]:
        assert thread["endValue"] == sum(thread["weights"]) == len(thread["samples"])
        for stack in thread["samples"]:
            counted[(thread["name"], *(frames[one] for one in stack))] += 1
    assert sorted(counted.values()) == sorted(raw.values())

    picture = ET.parse(folder / process.files["flamegraph"]).getroot()
    titles = [one.text or "" for one in picture.iter("{http://www.w3.org/2000/svg}title")]
    whole = Counter(
        name
        for stack, weight in raw.items()
        for name in set(functions(stack))
        for _ in range(weight)
    )
    share = 100 * whole["middle"] / process.samples
    assert any(one.startswith("middle (") and one.endswith(f", {share:.2f} %") for one in titles)
    assert not list(picture.iter("{http://www.w3.org/2000/svg}script"))


def test_a_timeline_is_on_the_wall_clock(timeline: tuple[Path, Ran, tuple[int, int]]) -> None:
    folder, ran, (before, after) = timeline
    assert ran.code == 0, ran.err
    (process,) = profiled(folder).processes
    assert tuple(process.files) == (*KINDS, "chrometrace")
    assert before < process.started_unix_ns < after
    assert process.started_unix_ns + process.duration_ns <= after
    assert process.duration_ns >= 1e9
    assert 0 < process.start_uncertainty_ns < (after - before) / 2


def test_the_events_of_a_timeline_are_whole_and_named(
    timeline: tuple[Path, Ran, tuple[int, int]],
) -> None:
    folder, _, _ = timeline
    (process,) = profiled(folder).processes
    events = json.loads((folder / process.files["chrometrace"]).read_text())
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert names[process.pid] == "MainThread"  # the system numbers it as its process
    assert set(names.values()) == {"MainThread", "waiting"}
    stacks: dict[int, list[str]] = {tid: [] for tid in names}
    last = dict.fromkeys(names, 0)
    deepest = set()
    for one in (event for event in events if event["ph"] != "M"):
        assert one["pid"] == process.pid
        assert one["ts"] >= last[one["tid"]]
        last[one["tid"]] = one["ts"]
        stack = stacks[one["tid"]]
        if one["ph"] == "B":
            stack.append(one["name"])
            deepest.add(tuple(stack))
        else:
            assert stack.pop() == one["name"]
    assert set(map(tuple, stacks.values())) == {()}
    assert ("<module>", "outermost", "middle", "spin") in deepest
    assert max(last.values()) * 1000 <= process.duration_ns + 2 * process.start_uncertainty_ns + 1e9


def test_a_timeline_counts_time_and_has_the_threads_that_wait(
    timeline: tuple[Path, Ran, tuple[int, int]],
) -> None:
    folder, ran, _ = timeline
    (process,) = profiled(folder).processes
    by_thread: Counter[str] = Counter()
    for stack, weight in raw_stacks(folder, process.files["raw"]).items():
        by_thread[stack[0]] += weight
    # Each was seen from the first sample on to the end.
    assert by_thread.keys() == {"MainThread", "waiting"}
    assert all(0.5e6 < weight < process.duration_ns / 1000 + 1e6 for weight in by_thread.values())
    result = json.loads(ran.out)
    assert (result["command"], result["idle"], result["phases"]) == ("profile", True, None)
    shares = {one["function"]: one["total_share"] for one in result["hottest"]}
    assert shares["<module>"] == shares["outermost"] == 1
    assert "wait_for_ever" not in shares


# -- what cannot be profiled ----------------------------------------------------------------------


def test_a_process_that_only_waits_gives_no_profile(tmp_path: Path) -> None:
    with running(WAITING) as process:
        folder = tmp_path / "profile"
        ran = omnicache("profile", "--pid", process.pid, "--duration", 0.5, "-o", folder)
        assert (ran.code, ran.out) == (5, "")
        assert ran.last_words == (
            "omnicache: no sample was taken: every thread was waiting whenever py-spy looked; send "
            "the engine requests, sample for longer, or add --idle"
        )
        assert not folder.exists()
        ran = omnicache("profile", "--pid", process.pid, "--duration", 0.5, "-o", folder, "--idle")
        assert ran.code == 0, ran.err


def test_a_process_that_ends_early_keeps_what_was_seen(tmp_path: Path) -> None:
    with running(BUSY, 60) as target:
        arguments = ("--pid", target.pid, "--duration", 60, "-o", tmp_path / "p")
        process = started(tmp_path, "profile", *arguments)
        until_sampling(process, tmp_path)
        target.kill()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    (sampled,) = profiled(tmp_path / "p").processes
    assert sampled.samples > 0
    assert 0 < sampled.duration_ns < 60e9


def test_a_process_that_ends_before_it_is_sampled_is_an_error(tmp_path: Path) -> None:
    with running(WAITING) as process:
        slow = fake_py_spy(tmp_path, f"import os; os.kill({process.pid}, 9)", real=True)
        ran = omnicache("profile", "--pid", process.pid, "-o", tmp_path / "p", PATH=slow)
    assert ran.code == 5
    assert ran.last_words.startswith(f"omnicache: no sample was taken: process {process.pid} ended")
    assert not (tmp_path / "p").exists()


def zombie() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def test_a_wrong_process_number_is_named(tmp_path: Path) -> None:
    used = max(int(name) for name in os.listdir("/proc") if name.isdecimal())
    free = next(
        pid for pid in range(used + 50_000, used + 60_000) if not Path(f"/proc/{pid}").exists()
    )
    ran = omnicache("profile", "--pid", free, "-o", tmp_path / "p")
    assert (ran.code, ran.last_words) == (
        3,
        f"omnicache: no process {free}; name a running engine: pgrep -f EngineCore, or its server",
    )
    for pid in zombie():
        ran = omnicache("profile", "--pid", pid, "-o", tmp_path / "p")
        assert ran.code == 3
        assert f"process {pid} has ended: it is a zombie" in ran.last_words


def test_a_process_that_is_no_python_is_named(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        ran = omnicache("profile", "--pid", process.pid, "-o", tmp_path / "p")
        assert (ran.code, ran.last_words) == (
            3,
            f"omnicache: no sample was taken: process {process.pid} runs no Python that py-spy "
            "knows; name the process of an engine",
        )
    finally:
        process.kill()
        process.wait()


def fake_py_spy(folder: Path, code: str, *, real: bool = False) -> str:
    """A search path on which another py-spy comes first: it runs `code`, then perhaps the real."""
    import shutil

    program = folder / "fake" / "py-spy"
    program.parent.mkdir(exist_ok=True)
    there = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    go_on = f"os.execv({there!r}, [{there!r}, *sys.argv[1:]])" if real else ""
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "if sys.argv[1] == '--version': print('py-spy 0.4.3'); sys.exit()\n"
        f"{code}\n{go_on}\n"
    )
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


DENIED = """
sys.stderr.write('''Error: Failed to copy PyInterpreterState

Caused by:
    0: Permission denied (os error 13)
''')
sys.exit(1)
"""


def test_no_permission_names_the_setting_before_an_engine_starts(tmp_path: Path) -> None:
    path = fake_py_spy(tmp_path, DENIED)
    started = time.monotonic()
    ran = omnicache("profile", tmp_path, "--prompt", "x", "-o", tmp_path / "run", PATH=path)
    assert ran.code == 3
    assert ran.last_words.startswith("omnicache: py-spy may not read this Python: ")
    assert time.monotonic() - started < 30
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_refused_for_real(tmp_path: Path) -> None:
    from omnicache_cli.profile.pyspy import find_py_spy, what_failed

    with running(BUSY, 30) as process:
        command = [find_py_spy(), "dump", "--pid", str(process.pid)]
        looked = subprocess.run(
            command, user=65534, group=65534, extra_groups=[], capture_output=True, text=True
        )
        if "ermission" not in looked.stderr + looked.stdout:
            pytest.skip(f"the other user cannot run py-spy: {looked.stderr[:200]}")
        error = what_failed(process.pid, looked.stderr, f"process {process.pid}")
    assert error.exit_code == 3
    assert str(error).startswith(f"py-spy may not read process {process.pid}: ")


def test_without_py_spy_the_line_to_install_it_is_shown(tmp_path: Path) -> None:
    code = (
        "import shutil, sys; shutil.which = lambda *args, **more: None\n"
        "from omnicache_cli.cli.main import main; sys.argv[0] = 'omnicache'; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "profile", "--pid", "1"],
        capture_output=True,
        text=True,
        env=surroundings(),
    )
    assert (done.returncode, done.stderr) == (
        4,
        f"omnicache: py-spy is not installed; {install_extra('profile')}\n",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "0"], "--rate 0 is not from 1 to 1000"),
        (["--rate", "100000"], "--rate 100000 is not from 1 to 1000"),
        (["--duration", "0"], "--duration 0 is not a time to sample"),
        (["--duration", "nan"], "--duration nan is not a time to sample"),
        (["--duration", "1e11"], "give seconds above 0 and up to 1,000,000"),
        (["--duration", "inf"], "give seconds above 0 and up to 1,000,000"),
        (["--gil", "--timeline"], "--timeline cannot be combined with --gil"),
        (["--role", "cook"], "no role 'cook'; roles: engine-core, worker"),
        (["--prompt", "x"], "--prompt cannot be combined with --pid"),
        (["--startup"], "--startup cannot be combined with --pid"),
        (["some-model"], "MODEL cannot be combined with --pid"),
        (["--", "true"], "--pid cannot be combined with a command"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], words: str, here: Callable[..., Ran]
) -> None:
    ran = here("profile", "--pid", os.getpid(), *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.last_words


def test_a_folder_that_is_not_free_is_refused_before_sampling(
    tmp_path: Path, here: Callable[..., Ran]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    ran = here("profile", "--pid", os.getppid(), "-o", tmp_path)
    assert ran.code == 3
    assert "holds 'mine.txt', which is not part of a run" in ran.last_words


@pytest.mark.parametrize("arguments", [("--pid", "1"), (".", "--compare-cache")])
def test_a_report_into_a_device_names_its_option(
    arguments: tuple[str, ...],
    here: Callable[..., Ran],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    prompt = ("--prompt", "x") if "--compare-cache" in arguments else ()
    ran = here("profile", *arguments, *prompt, "--report", "/dev/full")
    assert (ran.code, ran.last_words) == (
        3,
        "omnicache: /dev/full is not a regular file; leave out --report and redirect stdout",
    )


def test_the_help_names_the_least_number_of_pairs(here: Callable[..., Ran]) -> None:
    assert "--compare-cache; at least 3." in " ".join(
        re.sub("[│ ]+", " ", here("profile", "--help").out).split()
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """A command line in this process: one that comes to no other."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["omnicache", *map(str, arguments)])
        code = exit_code_of_run()
        return Ran(code, *capsys.readouterr())

    return run


def test_an_earlier_profile_is_replaced_with_force_only(
    samples: tuple[Path, Ran], tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "profile"
    shutil.copytree(samples[0], folder)
    with running(BUSY, 30) as process:
        refused = omnicache("profile", "--pid", process.pid, "-o", folder)
        assert refused.code == 3
        assert "pass --force to replace it" in refused.last_words
        arguments = ("profile", "--pid", process.pid, "--duration", 0.5, "-o", folder, "--force")
        assert omnicache(*arguments, "--report", tmp_path / "report.html").code == 0
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    (sampled,) = profiled(folder).processes
    names = {*sampled.files.values(), "profile.json"}
    assert {one.name for one in folder.iterdir()} == names


def test_of_two_profiles_into_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    with running(BUSY, 60) as target, running(BUSY, 60) as other:
        first = started(tmp_path, "profile", "--pid", target.pid, "-o", folder)
        until_sampling(first, tmp_path)
        second = omnicache("profile", "--pid", other.pid, "--duration", 0.5, "-o", folder)
        assert (second.code, second.out, second.last_words) == (
            3,
            "",
            f"omnicache: another omnicache is about to write into {folder}; name another folder",
        )
        assert list(folder.iterdir()) == []
        first.send_signal(signal.SIGINT)
        _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    (sampled,) = profiled(folder).processes
    assert sampled.pid == target.pid
    assert {one.name for one in folder.iterdir()} == {*sampled.files.values(), "profile.json"}


# -- a command, and ends -------------------------------------------------------------------------


def test_a_command_is_sampled_from_its_first_step_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ran = omnicache("profile", "-o", run, "--", sys.executable, "-c", ENGINE, 1.5, 2.5, 7)
    assert ran.code == 7, ran.err
    assert ran.out == ""  # stdout is the command's
    (sampled,) = profiled(run).processes
    assert sampled.role == "in-process engine"
    found = {name for stack in raw_stacks(run, sampled.files["raw"]) for name in functions(stack)}
    assert "step" in found
    assert "before_the_first_step" not in found
    assert sum(1 for _ in Run(run).steps()) == 1
    assert any(line.startswith("Phases of ") for line in ran.err.splitlines())


def test_a_command_without_an_engine_is_an_error(tmp_path: Path) -> None:
    ran = omnicache("profile", "-o", tmp_path / "run", "--", "sleep", 0.3)
    assert ran.code == 5
    assert "no process wrote a trace into" in ran.last_words
    ran = omnicache("profile", "-o", tmp_path / "other", "--", "no-such-program")
    assert ran.code == 3
    assert "no such program" in ran.last_words


def children_of(pid: int) -> list[Any]:
    import psutil

    return list(psutil.Process(pid).children(recursive=True))


def started(scratch: Path, *arguments: object, **environment: str) -> "subprocess.Popen[str]":
    """`omnicache`, keeping its recordings under `scratch`."""
    return subprocess.Popen(
        command_line(*arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=surroundings(TMPDIR=str(scratch), **environment),
        start_new_session=True,
    )


def until_sampling(process: "subprocess.Popen[str]", scratch: Path) -> list[Any]:
    """The processes below it, once a py-spy has been sampling for a while."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any("Sampling" in one.read_text() for one in scratch.glob("omnicache-*/*.out")):
            time.sleep(1)  # a hundred samples
            return children_of(process.pid)
        time.sleep(0.05)
    raise AssertionError("py-spy did not start")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_keeps_what_was_seen(
    number: signal.Signals, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = started(
        *(tmp_path, "profile", "-o", run, "--", sys.executable, "-c", ENGINE, 0, 60, 0)
    )
    below = until_sampling(process, tmp_path)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert left_of(below) == []
    (sampled,) = profiled(run).processes
    assert sampled.samples > 0
    assert not list(tmp_path.glob("omnicache-*"))


def test_a_signal_is_for_the_command_and_not_for_what_it_started(tmp_path: Path) -> None:
    process = started(
        *(tmp_path, "profile", "-o", tmp_path / "run", "--", "bash", "-c", "sleep 60; true")
    )

    def names() -> dict[str, Any]:
        return {one.name(): one for one in children_of(process.pid)}

    def listens() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    deadline = time.monotonic() + 60
    while "sleep" not in (found := names()) or not listens():
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(60)  # its stderr is that of the sleep too, and stays open
    finally:
        runs_on = found["sleep"].is_running()
        found["sleep"].kill()
        _, err = process.communicate()
    assert code == 128 + signal.SIGTERM, err
    assert left_of([found["bash"]]) == []
    assert runs_on


def test_a_killed_omnicache_leaves_nothing_running(tmp_path: Path) -> None:
    command = ("--", sys.executable, "-c", ENGINE, 0, 60, 0)
    process = started(tmp_path, "profile", "-o", tmp_path / "run", *command)
    below = until_sampling(process, tmp_path)
    process.kill()
    process.communicate()
    assert left_of(below) == []


def test_a_third_ctrl_c_ends_a_py_spy_that_hangs(tmp_path: Path) -> None:
    hang = (
        "import signal, time; signal.signal(2, signal.SIG_IGN)\n"
        "if 'record' in sys.argv: print('Sampling process', flush=True); time.sleep(100)"
    )
    path = fake_py_spy(tmp_path, hang)
    with running(BUSY, 60) as target:
        arguments = ("profile", "--pid", target.pid, "-o", tmp_path / "p")
        process = started(tmp_path, *arguments, PATH=path)
        below = until_sampling(process, tmp_path)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)  # signals that wait together are one
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "omnicache: interrupted\n")
        assert left_of(below) == []
        assert target.poll() is None
    assert not (tmp_path / "p").exists()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with running(BUSY, 30) as process:
        path = fake_py_spy(
            tmp_path, "sys.argv[sys.argv.index('--output') + 1] = '/dev/full'", real=True
        )
        arguments = ("profile", "--pid", process.pid, "--duration", 0.5, "-o", tmp_path / "p")
        ran = omnicache(*arguments, PATH=path)
    assert ran.code == 3
    assert "no space left in" in ran.last_words


def test_native_frames_that_fail_are_left_out_with_a_sentence(tmp_path: Path) -> None:
    refuse = (
        "if '--native' in sys.argv:\n"
        "    sys.stderr.write('Error: native unwinding is not supported here')\n"
        "    sys.exit(1)\n"
    )
    path = fake_py_spy(tmp_path, refuse, real=True)
    with running(BUSY, 30) as process:
        arguments = ("profile", "--pid", process.pid, "--duration", 0.5, "-o", tmp_path / "p")
        ran = omnicache(*arguments, "--native", PATH=path)
    assert ran.code == 0, ran.err
    assert "native frames cannot be read" in ran.err
    assert profiled(tmp_path / "p").native is False
