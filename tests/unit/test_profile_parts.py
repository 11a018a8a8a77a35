"""The parts of `omnicache profile` that need neither py-spy nor a process."""

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from omnicache_cli.profile import permission
from omnicache_cli.profile.flamegraph import as_flamegraph
from omnicache_cli.profile.formats import as_raw, as_speedscope
from omnicache_cli.profile.hottest import hottest
from omnicache_cli.profile.manifest import ProfileManifest, SampledProcess
from omnicache_cli.profile.recording import (
    Frame,
    StackRecording,
    ThreadStacks,
    Timeline,
    read_samples,
)
from omnicache_cli.profile.report import profile_report
from omnicache_cli.profile.results import ProcessProfile, Profile
from omnicache_cli.profile.roles import TracedProcess, role_of
from omnicache_cli.report.text import as_text
from omnicache_cli.trace.run import Run
from tests.unit.run_builder import two_rounds


@pytest.mark.parametrize(
    ("command_line", "traced", "role"),
    [
        (["VLLM::EngineCore"], None, "engine core"),
        (["VLLM::EngineCore_DP1"], None, "engine core"),
        (["VLLM::StageEngineCoreProc_thinker_replica0_DP0"], None, "engine core"),
        (["VLLM::Worker_TP1"], None, "worker"),
        (["vLLM-Omni::DiffusionWorker"], None, "worker"),
        (["MINE::Worker"], None, "worker"),
        (["VLLM::APIServer_0"], None, "API server"),
        (["VLLM::DPCoordinator"], None, "coordinator"),
        (["python", "EngineCore"], None, "other"),
        ([], None, "other"),
        (["python"], TracedProcess("MainProcess", has_scheduler=True), "in-process engine"),
        (["python"], TracedProcess("EngineCore_DP0", has_scheduler=True), "engine core"),
        (["python"], TracedProcess("SpawnProcess-1", has_runner=True), "worker"),
        (["python"], TracedProcess("MainProcess"), "other"),
        (
            ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "x"],
            None,
            "API server",
        ),
        (
            ["/x/python3.11", "-X", "dev", "-um", "vllm.entrypoints.launchers.api_server.entry"],
            TracedProcess("MainProcess"),
            "API server",
        ),
        (["python3", "-m", "vllm_omni.entrypoints.openai.api_server"], None, "API server"),
        (["python", "/x/vllm/entrypoints/openai/api_server.py"], None, "API server"),
        (["/x/bin/python", "/x/bin/vllm", "serve", "x"], None, "API server"),
        (["python", "-m", "vllm.entrypoints.cli.main", "serve", "x"], None, "API server"),
        (
            ["python", "-m", "vllm.entrypoints.openai.api_server"],
            TracedProcess("MainProcess", has_scheduler=True),
            "in-process engine",
        ),
        (["python", "/x/bin/vllm", "bench", "serve"], None, "other"),
        (["python", "-m", "vllm.entrypoints.openai.run_batch"], None, "other"),
        (["python", "-c", "vllm.entrypoints.openai.api_server"], None, "other"),
        (["bash", "-c", "vllm serve x"], None, "other"),
        (["python", "/x/bin/omnicache", "profile", "--", "vllm", "serve", "x"], None, "other"),
        (["python", "-X"], None, "other"),
        (["python"], None, "other"),
    ],
)
def test_the_role_of_a_process_is_its_name_or_what_it_records(
    command_line: list[str], traced: TracedProcess | None, role: str
) -> None:
    assert role_of(command_line, traced) == role


EVENTS = [
    ("B", 7, 100, "thread (11): MainThread", ""),
    ("B", 7, 100, "main", "/x/site-packages/a/b.py"),
    ("B", 7, 100, "work", "/x/site-packages/a/b.py"),
    ("B", 9, 110, "thread (12): first", ""),
    ("B", 9, 110, "once", "/x/y/c.py"),
    ("E", 7, 300, "work", "/x/site-packages/a/b.py"),
    ("B", 7, 300, "rest", "/x/site-packages/a/b.py"),
    ("E", 9, 700, "once", "/x/y/c.py"),
    ("E", 9, 700, "thread (12): first", ""),
    ("B", 9, 700, "thread (13): second", ""),
    ("B", 9, 700, "again", "/x/y/c.py"),
    ("E", 7, 1000, "rest", "/x/site-packages/a/b.py"),
    ("E", 7, 1000, "main", "/x/site-packages/a/b.py"),
    ("E", 7, 1000, "thread (11): MainThread", ""),
    ("E", 9, 1000, "again", "/x/y/c.py"),
    ("E", 9, 1000, "thread (13): second", ""),
]
"""py-spy's Chrome trace of three threads; the third has the pthread number of the second."""


def timeline_of(path: Path, last_seen_us: dict[int, int]) -> StackRecording:
    events = [
        {"ph": ph, "tid": tid, "ts": ts, "name": name, "pid": 11, "cat": "py-spy"}
        | {"args": {"filename": filename, "line": 3 if filename else 0}}
        for ph, tid, ts, name, filename in EVENTS
    ]
    path.write_text(json.dumps(events))
    timeline = Timeline(path)
    assert timeline.end_us == 1000
    return timeline.replay(last_seen_us)


def test_a_timeline_is_stacks_with_the_time_they_were_there(tmp_path: Path) -> None:
    recording = timeline_of(tmp_path / "t.json", {})
    assert as_raw(recording).splitlines() == [
        "MainThread;main (a/b.py:3);work (a/b.py:3) 200",
        "MainThread;main (a/b.py:3);rest (a/b.py:3) 700",
        "first;once (y/c.py:3) 590",
        "second;again (y/c.py:3) 300",
    ]
    assert [(one.name, one.os_id) for one in recording.threads] == [
        ("MainThread", 11),
        ("first", 12),
        ("second", 13),
    ]
    scope = json.loads(as_speedscope(recording, "x"))
    assert [one["endValue"] for one in scope["profiles"]] == [1000, 700, 1000]


def test_the_last_stack_of_a_thread_that_ended_counts_until_it_was_last_there(
    tmp_path: Path,
) -> None:
    recording = timeline_of(tmp_path / "t.json", {11: 1000, 12: 200, 13: 650})
    weights = dict(line.rsplit(" ", 1) for line in as_raw(recording).splitlines())
    assert weights["first;once (y/c.py:3)"] == "90"
    assert "second;again (y/c.py:3)" not in weights  # seen once, and never again
    ends = {one["name"]: one["ts"] for one in recording.events if one["ph"] == "E"}
    assert ends == {"work": 300, "rest": 1000, "main": 1000, "once": 200, "again": 700}


def test_a_function_that_calls_itself_counts_once_in_a_stack() -> None:
    frames = [Frame("f", "/x/y.py", 1), Frame("f", "/x/y.py", 2), Frame("g", "/x/y.py", 9)]
    threads = [ThreadStacks("MainThread", None, [((0, 1), 1), ((0, 1, 2), 3), ((), 5)])]
    found = hottest([StackRecording("samples", frames, threads)], main_thread_only=False)
    assert found.weight == 4
    assert [(one.name, one.self_weight, one.total_weight) for one in found.functions] == [
        ("g", 3, 3),
        ("f", 1, 4),
    ]


def test_hostile_names_break_no_format() -> None:
    name = "a;b\n<script>&\x1b[31m\ud800"
    recording = StackRecording(
        "samples", [Frame(name, name, 1)], [ThreadStacks(name, None, [((0,), 2)])]
    )
    (line,) = as_raw(recording).splitlines()
    assert line.count(";") == 1
    assert line.endswith(" 2")
    picture = as_flamegraph(recording, name)
    ET.fromstring(picture)
    assert "<script" not in picture
    assert "\x1b" not in picture
    json.loads(as_speedscope(recording, name))


@pytest.mark.parametrize(
    ("scope", "status", "words"),
    [
        ("1", "CapEff:\t0\n", "kernel.yama.ptrace_scope is 1; run sudo sysctl kernel.yama"),
        ("3", "CapEff:\t0\n", "kernel.yama.ptrace_scope is 3, which forbids it until"),
        (
            "0",
            "CapEff:\t0\nSeccomp:\t2\n",
            "a seccomp filter forbids ptrace; in a container: ",
        ),
        (
            "",
            "CapEff:\t0\n",
            "CAP_SYS_PTRACE is missing; in a container: docker run --cap",
        ),
        ("1", "CapEff:\t0000000000080000\n", "the kernel refuses it in spite of CAP_SYS_PTRACE"),
    ],
)
def test_a_refusal_is_explained_by_what_the_system_says(
    scope: str, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scope").write_text(scope)
    (tmp_path / "status").write_text(status)
    monkeypatch.setattr(permission, "PTRACE_SCOPE", tmp_path / "scope")
    monkeypatch.setattr(permission, "OWN_STATUS", tmp_path / "status")
    assert permission.why_denied(os.getpid()).startswith(words)


def test_another_tracer_of_any_thread_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.getpid()
    for thread, tracer in ((pid, 0), (pid + 1, 4711)):
        status = tmp_path / str(pid) / "task" / str(thread) / "status"
        status.parent.mkdir(parents=True)
        status.write_text(f"Name:\tpython\nTracerPid:\t{tracer}\n")
    (tmp_path / "status").write_text("CapEff:\t0000000000080000\n")
    monkeypatch.setattr(permission, "OWN_STATUS", tmp_path / "status")
    assert "another user namespace" in permission.why_denied(pid)
    monkeypatch.setattr(permission, "PROCESSES", tmp_path)
    assert permission.why_denied(pid) == "process 4711 traces it already; end that one first"


def profile_of(samples: int) -> Profile:
    """A worker with one stack."""
    process = SampledProcess(7, "host", "worker", "VLLM::Worker", samples, 0, 0, 10**9, {})
    frames, stacks = [Frame("f", "/x/y.py", 1)], [((0,), samples)]
    recording = StackRecording("samples", frames, [ThreadStacks("MainThread", None, stacks)])
    manifest = ProfileManifest(1, "0.1.0", "0.4.3", 100, False, False, False, [process])
    return Profile(manifest, [ProcessProfile(process, recording)], [])


@pytest.mark.parametrize(("samples", "is_said"), [(99, True), (100, False)])
def test_few_samples_are_called_few(samples: int, is_said: bool, tmp_path: Path) -> None:
    text = as_text(profile_report(tmp_path, profile_of(samples), None))
    assert ("fewer than 100 samples" in text) == is_said


def test_phases_are_said_to_be_longer_for_the_sampling(tmp_path: Path) -> None:
    run = Run(two_rounds().write(tmp_path / "run"))
    words = (
        "phases and steps were timed while py-spy sampled, which stops the process for each "
        "sample: they are longer than without; for their own times run omnicache trace "
        "(docs/overhead.md)"
    )
    text = " ".join(as_text(profile_report(run.folder, profile_of(100), run)).split())
    assert words in text
    assert text.index("Phases of 5 steps") < text.index(words) < text.index("Files process")
    assert words not in " ".join(as_text(profile_report(tmp_path, profile_of(100), None)).split())


def test_threads_that_wait_are_left_out_by_where_they_wait(tmp_path: Path) -> None:
    frames = [
        {"name": "Thread.run", "file": "/usr/lib/python3.11/threading.py", "line": 1},
        {"name": "Condition.wait", "file": "/usr/lib/python3.11/threading.py", "line": 2},
        {"name": "wait", "file": "/x/my_threading.py", "line": 3},
        {"name": "Poller.poll", "file": "/x/site-packages/zmq/sugar/poll.py", "line": 4},
    ]
    samples = [[0, 1], [0, 2], [0, 1, 2], [0, 3], []]
    profile = {"name": 'Thread 7 "MainThread"', "samples": samples}
    idle = {"name": 'Thread 8 "idle"', "samples": [[0, 1]]}
    path = tmp_path / "recording"
    path.write_text(json.dumps({"profiles": [profile, idle], "shared": {"frames": frames}}))
    busy = read_samples(path, waiting=False)
    assert [(one.name, one.stacks) for one in busy.threads] == [
        ("MainThread", [((0, 2), 1), ((0, 1, 2), 1)])
    ]
    assert read_samples(path, waiting=True).total == 5
