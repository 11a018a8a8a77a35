"""`omnicache export --to perfetto`: what is on the timeline, where, and in which form."""

import errno
import gzip
import json
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from omnicache_cli.cli.app import app
from omnicache_cli.export.clock import join_clocks
from omnicache_cli.export.event import microseconds
from omnicache_cli.export.timeline import Timeline
from omnicache_cli.profile.manifest import (
    ProfileManifest,
    SampledProcess,
    write_profile_manifest,
)
from omnicache_cli.trace.files import SUFFIX
from omnicache_cli.trace.records import (
    CacheReset,
    End,
    Evicted,
    Finished,
    ForwardStep,
    Gap,
    Header,
    Preempted,
    RequestRecord,
    SchedulerStep,
)
from omnicache_cli.trace.run import Run
from tests.unit.exporting import Export, events_of, timeline_bytes
from tests.unit.run_builder import Admit, Recording, header, two_rounds
from tests.unit.showing import Ran
from tests.unit.trace_event_format import problems

Event = dict[str, Any]
RECORDED = Path(__file__).parents[1] / "data" / "runs"
SECOND = 1_000_000_000


def of_phase(events: list[Event], *phases: str) -> list[Event]:
    return [event for event in events if event["ph"] in phases]


def slices_of(events: list[Event], *, first_us: int = 0, end_us: int = 1 << 40) -> list[Event]:
    """The slices that begin in a time, in order of the file, each with its `dur`."""
    found: list[Event] = []
    open_slices: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in of_phase(events, "B", "E"):
        track = open_slices[event["pid"], event["tid"]]
        if event["ph"] == "B":
            track.append(dict(event))
            found.append(track[-1])
        else:
            begun = track.pop()
            assert (begun["name"], begun.get("args")) == (event["name"], event.get("args"))
            begun["dur"] = event["ts"] - begun["ts"]
    return [one for one in found if first_us <= one["ts"] < end_us]


def without(event: Event, *names: str) -> Event:
    return {key: value for key, value in event.items() if key not in names}


def write_files(folder: Path, recording: Recording, headers: list[Header]) -> Path:
    """The scheduler's records in the first file, those of the ranks in the following ones."""
    folder.mkdir()
    for source, head in enumerate(headers):
        mine = [one for one in recording.records if getattr(one, "source", None) == source]
        lines = [head, *mine, End(len(mine), 0, {}, 0)]
        path = folder / f"{head.host}.{head.pid}{SUFFIX}"
        if path.exists():
            path = folder / f"{head.host}.{head.pid}.1{SUFFIX}"
        path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    return folder


# -- what is on it ----------------------------------------------------------------------------


def test_a_step_is_slices_on_the_threads_of_scheduler_and_runner(tmp_path: Path) -> None:
    data = events_of(two_rounds().write(tmp_path / "run"))
    events = data["traceEvents"]
    assert problems(data) == []
    names = {
        (event["name"], event.get("tid")): event["args"]["name"]
        for event in of_phase(events, "M")
        if "name" in event["args"]
    }
    assert names == {
        ("process_name", None): "MainProcess (host, pid 1)",
        ("thread_name", 1): "scheduler host.1.0",
        ("thread_name", 2): "model runner, rank 0 of host.1.0 on cpu",
    }
    third = slices_of(events, first_us=20_000, end_us=30_000)
    assert [without(event, "args", "ph", "pid") for event in third] == [
        {"tid": 1, "ts": 20_000, "dur": 100, "cat": "step", "name": "schedule"},
        {"tid": 2, "ts": 20_200, "dur": 2_500, "cat": "step", "name": "execute_model"},
        {"tid": 2, "ts": 20_200, "dur": 500, "cat": "phase", "name": "prepare"},
        {"tid": 2, "ts": 20_700, "dur": 2_000, "cat": "phase", "name": "forward"},
        {"tid": 2, "ts": 22_700, "dur": 300, "cat": "phase", "name": "sample"},
    ]
    assert third[0]["args"] == {
        "step": 2,
        "requests": 1,
        "scheduled_tokens": 1,
        "finished": 1,
    }
    assert third[1]["args"] == {"step": 2, "requests": 1, "tokens": 1, "cudagraph_mode": "NONE"}


def test_a_request_is_a_span_with_its_states_and_its_hit(tmp_path: Path) -> None:
    recording = two_rounds()
    for number, at_ms in ((0, 0), (1, 27)):
        replace_request(recording, number, arrival_ns=at_ms * 1_000_000)
    events = events_of(recording.write(tmp_path / "run"))["traceEvents"]
    second = [event for event in of_phase(events, "b", "e") if event["id"] == "0x2"]
    assert [(one["ph"], one["name"], one["ts"], one.get("args")) for one in second] == [
        (
            "b",
            "p0-r2",
            27_000,
            {
                "request": 1,
                "request_id": "p0-r2-00000001",
                "prompt_tokens": 40,
                "max_tokens": 16,
            },
        ),
        ("b", "waiting", 27_000, None),
        ("e", "waiting", 30_000, None),
        (
            "b",
            "running",
            30_000,
            {"step": 3, "computed_tokens": 32, "hit_tokens": 32, "queried_tokens": 40},
        ),
        ("e", "running", 30_000, None),  # this recording's ends carry instant 0
        (
            "e",
            "p0-r2",
            30_000,
            {
                "status": "FINISHED_STOPPED",
                "output_tokens": 2,
                "hit_tokens": 32,
                "scheduled_tokens": 9,
                "preemptions": 0,
            },
        ),
    ]


def replace_request(recording: Recording, number: int, **changes: Any) -> None:
    for index, record in enumerate(recording.records):
        if isinstance(record, RequestRecord) and record.request == number:
            recording.records[index] = msgspec.structs.replace(record, **changes)


def test_counters_are_written_when_they_change(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change(SchedulerStep, 2, num_waiting=3, events=[Evicted(9, 0, "ab", 0, 0)] * 2)
    events = events_of(recording.write(tmp_path / "run"))["traceEvents"]
    counted = [(one["name"], one["ts"], one["args"]) for one in of_phase(events, "C")]
    assert counted == [
        ("blocks in use", 100, {"blocks": 23}),
        ("pool occupancy", 100, {"percent": 36.508}),
        ("requests", 100, {"running": 1, "waiting": 0}),
        ("hit rate", 100, {"percent": 0.0}),
        ("evicted blocks", 100, {"blocks": 0}),
        ("preemptions", 100, {"requests": 0}),
        ("blocks in use", 10_100, {"blocks": 24}),
        ("pool occupancy", 10_100, {"percent": 38.095}),
        ("blocks in use", 20_100, {"blocks": 25}),
        ("pool occupancy", 20_100, {"percent": 39.683}),
        ("requests", 20_100, {"running": 1, "waiting": 3}),
        ("evicted blocks", 20_100, {"blocks": 1}),
        ("blocks in use", 30_100, {"blocks": 26}),
        ("pool occupancy", 30_100, {"percent": 41.27}),
        ("requests", 30_100, {"running": 1, "waiting": 0}),
        ("hit rate", 30_100, {"percent": 40.0}),
        ("blocks in use", 40_100, {"blocks": 27}),
        ("pool occupancy", 40_100, {"percent": 42.857}),
    ]


def test_phases_that_were_recorded_are_slices_at_their_places(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change(
        SchedulerStep,
        1,
        lookup_ns=30_000,
        allocate_ns=20_000,
        output_start_ns=14_000_000,
        output_ns=50_000,
    )
    recording.change(
        ForwardStep, 1, sample_start_ns=13_000_000, save_ns=4_000, restore_ns=0, copy_ns=6_000
    )
    data = events_of(recording.write(tmp_path / "run"))
    assert problems(data) == []
    slices = [
        (event["tid"], event["name"], event["ts"], event["dur"])
        for event in slices_of(data["traceEvents"], first_us=10_000, end_us=20_000)
    ]
    assert slices == [
        (1, "schedule", 10_000, 100),
        (1, "lookup", 10_000, 30),
        (1, "allocate", 10_030, 20),
        (1, "output", 14_000, 50),
        (2, "execute_model", 10_200, 2_500),
        (2, "prepare", 10_200, 500),
        (2, "forward", 10_700, 2_000),
        (2, "sample", 13_000, 300),
        (3, "save", 12_700, 4),
        (3, "copy", 12_704, 6),
    ]


def test_sums_that_are_longer_than_what_they_are_of_do_not_leave_it(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change(SchedulerStep, 1, lookup_ns=90_000, allocate_ns=20_000)
    data = events_of(recording.write(tmp_path / "run"))
    assert problems(data) == []
    allocate = [one for one in slices_of(data["traceEvents"]) if one["name"] == "allocate"]
    assert [(one["ts"], one["dur"]) for one in allocate] == [(10_090, 10)]


def test_a_preempted_request_is_preempted_until_it_runs_again(tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("r", 40)
    recording.step({number: 40}, admit={number: Admit([[1, 2, 3]])})
    other = recording.arrive("s", 8)
    recording.step({other: 8}, admit={other: Admit([[4]])}, events=[Preempted(number)])
    recording.step({number: 8}, admit={number: Admit([[1, 2, 5]], hit=32, resumed=True)})
    recording.after(CacheReset(True), CacheReset(False))
    data = events_of(recording.write(tmp_path / "run", is_finished=False))
    assert problems(data) == []
    mine = [one for one in of_phase(data["traceEvents"], "b", "e") if one["id"] == "0x1"]
    assert [(one["ph"], one["name"], one["ts"]) for one in mine] == [
        ("b", "r", 0),
        ("b", "waiting", 0),
        ("e", "waiting", 0),
        ("b", "running", 0),
        ("e", "running", 10_000),
        ("b", "preempted", 10_000),
        ("e", "preempted", 20_000),
        ("b", "running", 20_000),
        ("e", "running", 23_000),  # the last instant of the trace
        ("e", "r", 23_000),
    ]
    assert mine[-1]["args"]["status"] == "not finished in this trace"
    assert (mine[-1]["args"]["preemptions"], mine[7]["args"]["hit_tokens"]) == (1, 32)
    marks = of_phase(data["traceEvents"], "i")
    assert [(one["name"], one["s"]) for one in marks] == [("prefix cache reset", "p")]
    assert data["otherData"]["incomplete"] == [
        "host.1.trace.jsonl has no end record: its process was stopped, or is "
        "still running; what it did later is not there"
    ]


def test_requests_without_a_step_have_spans_too(tmp_path: Path) -> None:
    recording = two_rounds()
    aborted = recording.arrive("aborted", 40, arrival_ns=41_000_000)
    recording.after(Finished(aborted, "FINISHED_ABORTED", 0))
    later = recording.arrive("later", 40, arrival_ns=42_000_000)
    recording.step({later: 40}, admit={later: Admit([[1, 2, 3]])})
    recording.arrive("never", 40, arrival_ns=44_000_000)
    data = events_of(recording.write(tmp_path / "run"))
    assert problems(data) == []
    ends = {
        one["name"]: one["args"]["status"]
        for one in of_phase(data["traceEvents"], "e")
        if "args" in one
    }
    assert ends["aborted"] == "FINISHED_ABORTED"
    assert ends["never"] == "not finished in this trace"


def test_a_session_goes_on_in_a_further_running_span(tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("session", 10)
    recording.step({number: 10}, admit={number: Admit([[1]])})
    recording.step({number: 10}, admit={number: Admit([[1, 2]], session_prompt_tokens=20)})
    data = events_of(recording.write(tmp_path / "run"))
    assert problems(data) == []
    running = [one for one in of_phase(data["traceEvents"], "b") if one["name"] == "running"]
    assert running[1]["args"] == {"step": 1, "computed_tokens": 10, "session_prompt_tokens": 20}


def test_lost_records_are_marked_and_nothing_is_made_up(tmp_path: Path) -> None:
    recording = two_rounds()
    place = next(
        index
        for index, one in enumerate(recording.records)
        if isinstance(one, RequestRecord) and one.request == 1
    )
    recording.records[place] = Gap(1)
    data = events_of(recording.write(tmp_path / "run"))
    assert problems(data) == []
    events = data["traceEvents"]
    assert [one["name"] for one in of_phase(events, "i")] == ["records were lost before this step"]
    lost = next(one for one in of_phase(events, "b") if one["id"] == "0x2")
    assert lost["args"] == {
        "request": 1,
        "request_id": "(lost #1)",
        "record": "lost",
    }


def test_slices_that_touch_have_the_very_same_instant(tmp_path: Path) -> None:
    """Readers that add a start and a duration in floating point would see them overlap."""
    recording = two_rounds()
    recording.change(ForwardStep, 1, start_ns=10_200_001, prepare_ns=333_333, forward_ns=777_779)
    events = of_phase(events_of(recording.write(tmp_path / "run"))["traceEvents"], "B", "E")
    at = {(one["ph"], one["name"]): one["ts"] for one in events if 10_200 <= one["ts"] < 12_000}
    assert at["B", "execute_model"] == at["B", "prepare"] == 10_200.001
    assert at["E", "prepare"] == at["B", "forward"] == 10_533.334
    assert at["E", "forward"] == at["E", "execute_model"] == at["B", "sample"] == 11_311.113


def test_no_token_of_a_prompt_is_on_it(tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("r", 3, token_ids=[777_001, 777_002, 777_003], cache_salt="5a17")
    recording.step({number: 3}, admit={number: Admit([[1]])})
    text = json.dumps(events_of(recording.write(tmp_path / "run")))
    assert "77700" not in text
    assert "5a17" not in text


# -- clocks and processes ---------------------------------------------------------------------


def test_files_of_a_host_are_joined_by_its_monotonic_clock_and_hosts_by_the_wall_clock() -> None:
    clocks = join_clocks(
        {
            "a.1": header(host="a", pid=1, started_unix_ns=50 * SECOND, monotonic_ns=7 * SECOND),
            # Its wall clock was set back by 10 ms between the two.
            "a.2": header(host="a", pid=2, started_unix_ns=51_990_000_000, monotonic_ns=9 * SECOND),
            "b.1": header(host="b", pid=1, started_unix_ns=49 * SECOND, monotonic_ns=80 * SECOND),
            # Another boot of a.
            "a.3": header(host="a", pid=3, started_unix_ns=90 * SECOND, monotonic_ns=SECOND),
        }
    )
    assert {name: (one.zero_unix_ns, one.joined_by) for name, one in clocks.items()} == {
        "a.1": (50 * SECOND, "reference"),
        "a.2": (52 * SECOND, "monotonic clock"),
        "a.3": (90 * SECOND, "wall clock"),
        "b.1": (49 * SECOND, "reference"),
    }


def test_ranks_on_two_hosts_stand_on_one_clock(tmp_path: Path) -> None:
    recording = two_rounds_on(2)
    headers = [
        header(started_unix_ns=100 * SECOND),
        header(pid=2, process="Worker-0", started_unix_ns=101 * SECOND, monotonic_ns=SECOND),
        header(host="b", pid=2, process="Worker-1", started_unix_ns=99 * SECOND),
    ]
    data = events_of(write_files(tmp_path / "run", recording, headers))
    assert problems(data) == []
    passes = [one for one in slices_of(data["traceEvents"]) if one["name"] == "execute_model"]
    assert [(one["pid"], one["ts"]) for one in passes[:2]] == [(3, 2_000_200), (2, 200)]
    other = data["otherData"]
    assert other["origin_unix_ns"] == str(99 * SECOND)
    assert [
        (one["file"], one["track_pid"], one["joined_by"], one["starts_at_us"])
        for one in other["files"]
    ] == [
        ("b.2.trace.jsonl", 2, "reference", 0),
        ("host.1.trace.jsonl", 1, "reference", 1_000_000),
        ("host.2.trace.jsonl", 3, "monotonic clock", 2_000_000),
    ]


def two_rounds_on(ranks: int) -> Recording:
    recording = Recording(ranks=ranks)
    number = recording.arrive("r", 40)
    recording.step({number: 40}, admit={number: Admit([[1, 2, 3]])})
    recording.step({number: 1})
    recording.finish(number, 2)
    return recording


def test_a_process_number_that_was_used_again_is_a_second_process(tmp_path: Path) -> None:
    headers = [header(), header(pid=7, process="A"), header(pid=7, process="B")]
    data = events_of(write_files(tmp_path / "run", two_rounds_on(2), headers))
    assert problems(data) == []
    names = {
        one["pid"]: one["args"]["name"]
        for one in data["traceEvents"]
        if one["name"] == "process_name"
    }
    assert names == {1: "MainProcess (host, pid 1)", 7: "B (host, pid 7)", 8: "A (host, pid 7)"}


def test_two_stages_are_two_processes_and_two_engines_of_one_have_counters_apart(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    for pid, name in enumerate(("thinker", "talker"), start=1):
        recording = Recording(engine=f"host.{pid}.0", stage_id=pid - 1, stage=name)
        number = recording.arrive("r", 40)
        recording.step({number: 40}, admit={number: Admit([[1, 2, 3]])})
        write_file(run, recording, header(pid=pid), f"host.{pid}")
    data = events_of(run)
    assert problems(data) == []
    events = data["traceEvents"]
    assert {one["args"]["name"] for one in events if one["name"] == "thread_name"} == {
        "scheduler host.1.0, stage 0 thinker",
        "model runner, rank 0 of host.1.0 on cpu",
        "scheduler host.2.0, stage 1 talker",
        "model runner, rank 0 of host.2.0 on cpu",
    }
    assert {one.get("id") for one in of_phase(events, "C")} == {None}
    assert {one["id"] for one in of_phase(events, "b")} == {"0x1", "0x2"}


def write_file(folder: Path, recording: Recording, head: Header, name: str) -> None:
    folder.mkdir(exist_ok=True)
    lines = [head, *recording.records, End(len(recording.records), 0, {}, 0)]
    content = b"".join(msgspec.json.encode(one) + b"\n" for one in lines)
    (folder / f"{name}{SUFFIX}").write_bytes(content)


def test_two_engines_of_one_process_have_counters_of_their_own(tmp_path: Path) -> None:
    first, second = two_rounds_on(1), Recording(engine="host.1.5")
    number = second.arrive("s", 40)
    second.step({number: 40}, admit={number: Admit([[1, 2, 3]])})
    moved = [msgspec.structs.replace(one, source=one.source + 5) for one in second.records]
    first.records += moved
    data = events_of(first.write(tmp_path / "run"))
    assert problems(data) == []
    assert {one.get("id") for one in of_phase(data["traceEvents"], "C")} == {None, "host.1.5"}


@given(st.integers(-(10**9), 10**15))
def test_microseconds_give_the_nanoseconds_back_however_they_are_read(nanoseconds: int) -> None:
    value = microseconds(nanoseconds)
    assert int(value * 1000) == round(value * 1000) == nanoseconds
    assert json.loads(msgspec.json.encode(value)) == value


# -- samples ----------------------------------------------------------------------------------


def sampled_of(data: Any) -> list[Event]:
    """The events of py-spy."""
    return [one for one in data["traceEvents"] if one.get("cat") == "py-spy"]


FRAME = {"filename": "core.py", "line": 7}


def sampled(ph: str, name: str, ts: int, tid: int = 140_000) -> Event:
    return {
        "args": FRAME,
        "cat": "py-spy",
        "name": name,
        "ph": ph,
        "pid": 1,
        "tid": tid,
        "ts": ts,
    }


STEP_FRAMES = [
    sampled("B", "run_busy_loop", 0),
    sampled("B", "step", 0),
    sampled("B", "main", 5, tid=9),
    sampled("E", "step", 10_000),
    sampled("E", "run_busy_loop", 10_000),
    sampled("E", "main", 10_000, tid=9),
]


def add_samples(
    run: Path, content: bytes, *, started_unix_ns: int = SECOND, **changes: Any
) -> Path:
    (run / "host.1.chrometrace.json").write_bytes(content)
    process = SampledProcess(
        pid=1,
        host="host",
        role="engine core",
        command="python",
        samples=2,
        started_unix_ns=started_unix_ns,
        start_uncertainty_ns=2_000_000,
        duration_ns=SECOND,
        files={"chrometrace": "host.1.chrometrace.json"},
    )
    process = msgspec.structs.replace(process, **changes)
    manifest = ProfileManifest(1, "0.1.0", "0.4.3", 100, False, False, False, [process])
    write_profile_manifest(run, manifest)
    return run


def test_samples_stand_in_their_process_on_the_same_clock(tmp_path: Path) -> None:
    recording = two_rounds()
    run = recording.write(tmp_path / "run")  # its header: started at 0 on the wall clock
    add_samples(run, json.dumps(STEP_FRAMES).encode(), started_unix_ns=30_000_000)
    data = events_of(run)
    assert problems(data) == []
    frames = sampled_of(data)
    assert [(one["ph"], one["name"], one["pid"], one["tid"], one["ts"]) for one in frames] == [
        ("B", "run_busy_loop", 1, 3, 30_000),
        ("B", "step", 1, 3, 30_000),
        ("B", "main", 1, 4, 30_005),
        ("E", "step", 1, 3, 40_000),
        ("E", "run_busy_loop", 1, 3, 40_000),
        ("E", "main", 1, 4, 40_000),
    ]
    assert frames[0]["args"] == FRAME
    assert data["otherData"]["samples"] == {
        "py_spy_version": "0.4.3",
        "rate_hz": 100,
        "processes": [
            {"pid": 1, "role": "engine core", "samples": 2, "start_uncertainty_us": 2_000}
        ],
    }
    assert data["otherData"]["incomplete"] == []


def test_threads_of_samples_have_the_names_that_the_profile_gives(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run")
    names = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "engine core"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 9, "args": {"name": "MainThread"}},
    ]
    add_samples(run, json.dumps(names + STEP_FRAMES).encode())
    data = events_of(run)
    assert problems(data) == []
    assert data["otherData"]["incomplete"] == []
    threads = [one["args"]["name"] for one in data["traceEvents"] if one["name"] == "thread_name"]
    assert threads[2:] == ["py-spy: thread 140000", "py-spy: MainThread"]


def test_sampling_that_began_before_the_run_begins_the_timeline(tmp_path: Path) -> None:
    run = write_files(tmp_path / "run", two_rounds_on(1), [header(started_unix_ns=5 * SECOND)] * 2)
    add_samples(run, json.dumps(STEP_FRAMES).encode(), started_unix_ns=4 * SECOND)
    data = events_of(run)
    assert problems(data) == []
    assert data["otherData"]["origin_unix_ns"] == str(4 * SECOND)
    first = slices_of(data["traceEvents"])[0]
    assert first["ts"] == 1_000_000


def test_a_sampled_process_without_a_file_is_a_process_of_its_own(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run")
    add_samples(run, json.dumps(STEP_FRAMES).encode(), host="other", role="API server")
    data = events_of(run)
    assert problems(data) == []
    names = [
        (one["pid"], one["args"]["name"])
        for one in data["traceEvents"]
        if one["name"] == "process_name"
    ]
    assert names == [(1, "MainProcess (host, pid 1)"), (2, "API server (other, pid 1)")]


WHOLE = json.dumps(STEP_FRAMES).encode()


@pytest.mark.parametrize(
    ("content", "num_frames", "remark"),
    [
        (WHOLE[:-1], 6, "read up to a damaged place (cut: the array has no end)"),
        (WHOLE[:-30], 6, "read up to a damaged place (cut inside an event)"),
        (b"", 0, "read up to a damaged place (cut: the array has no end)"),
        (b"{}", 0, "read up to a damaged place (no JSON array)"),
        (
            b'[{"ph": "B"}]',
            0,
            "read up to a damaged place (Object missing required field `tid`)",
        ),
        (b"[\xff]", 0, "read up to a damaged place ('utf-8' codec can't decode byte 0xff in"),
        (json.dumps(STEP_FRAMES[3:]).encode(), 0, "3 frames had no beginning or no end"),
    ],
)
def test_a_damaged_profile_gives_what_it_holds_and_says_so(
    content: bytes, num_frames: int, remark: str, tmp_path: Path
) -> None:
    run = two_rounds().write(tmp_path / "run")
    add_samples(run, content)
    data = events_of(run)
    assert problems(data) == []
    assert len(sampled_of(data)) == num_frames
    assert data["otherData"]["incomplete"][0].startswith(f"host.1.chrometrace.json: {remark}")


def test_a_profile_that_is_gone_is_said(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run")
    add_samples(run, b"")
    (run / "host.1.chrometrace.json").unlink()
    assert events_of(run)["otherData"]["incomplete"] == [
        "host.1.chrometrace.json: read up to a damaged place (No such file or directory)"
    ]
    add_samples(run, b"", files={})
    assert events_of(run)["otherData"]["incomplete"] == [
        "pid 1 was sampled without its times; omnicache profile --timeline records them"
    ]


def test_a_profile_is_read_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnicache_cli.export.samples.PIECE_BYTES", 7)
    run = two_rounds().write(tmp_path / "run")
    frames = [{**one, "name": f"{one['name']} é"} for one in STEP_FRAMES]
    add_samples(run, json.dumps(frames, ensure_ascii=False).encode())
    data = events_of(run)
    assert data["otherData"]["incomplete"] == []
    assert [one["name"] for one in sampled_of(data) if one["ph"] == "B"] == [
        "run_busy_loop é",
        "step é",
        "main é",
    ]


def test_a_path_in_the_manifest_cannot_leave_the_run(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run")
    (tmp_path / "outside.json").write_bytes(WHOLE)
    add_samples(run, b"", files={"chrometrace": "../outside.json"})
    assert sampled_of(events_of(run)) == []


# -- real runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["preemption", "two-ranks"])
def test_a_recorded_run_is_in_the_format(name: str) -> None:
    data = events_of(RECORDED / name)
    assert problems(data) == []
    run = Run(RECORDED / name)
    steps = list(run.steps())
    events = data["traceEvents"]
    slices = [one["name"] for one in slices_of(events)]
    assert slices.count("schedule") == len(steps)
    assert slices.count("execute_model") == sum(len(step.passes) for step in steps)
    assert {"prepare", "forward", "sample", "lookup", "allocate", "output"} <= set(slices)
    requests = {one["id"] for one in of_phase(events, "b")}
    assert len(requests) == sum(len(step.arrived) for step in steps)


def test_a_schedule_of_a_recorded_run_comes_before_its_forward_pass_on_every_rank() -> None:
    """On one clock: three processes, each with its own file and its own zero."""
    events = slices_of(events_of(RECORDED / "two-ranks")["traceEvents"])
    scheduled = {
        one["args"]["step"]: one["ts"] + one["dur"] for one in events if one["name"] == "schedule"
    }
    started = [one for one in events if one["name"] == "execute_model"]
    ended = {one["args"]["step"]: one["ts"] + one["dur"] for one in started}
    for one in started:
        step = one["args"]["step"]
        assert scheduled[step] < one["ts"]
        if step + 1 in scheduled:
            assert ended[step] < scheduled[step + 1]


def test_hits_on_spans_are_those_of_the_summary() -> None:
    events = events_of(RECORDED / "preemption")["traceEvents"]
    ends = [one["args"] for one in of_phase(events, "e") if "args" in one]
    assert [one["hit_tokens"] for one in ends] == [0, 0, 32, 32]
    assert sum(one["preemptions"] for one in ends) == 2


# -- the command ------------------------------------------------------------------------------


def test_the_command_writes_a_private_file_and_says_so(tmp_path: Path, export: Export) -> None:
    run, path = two_rounds().write(tmp_path / "run"), tmp_path / "a.json"
    ran = export(run, "--to", "perfetto", "-o", path)
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.splitlines() == [
        f"wrote {path}",
        "next: open it in ui.perfetto.dev or speedscope.app; neither sends it anywhere",
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_bytes()) == events_of(run)
    refused = export(run, "--to", "perfetto", "-o", path)
    assert (refused.code, refused.err) == (
        3,
        f"omnicache: {path} exists; pass --force to replace it\n",
    )
    assert export(run, "--to", "perfetto", "-o", path, "--force", "-q") == Ran(0, "", "")


@pytest.mark.parametrize(
    ("to", "name"), [("perfetto", "run.json.gz"), ("parquet", "run-parquet"), ("csv", "run-csv")]
)
def test_without_a_name_the_run_gives_it(
    to: str, name: str, tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = two_rounds().write(tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ran = export(run, "--to", to)
    assert ran.code == 0
    assert ran.err.startswith(f"wrote {name}")
    assert [one.name for one in (tmp_path / "here").iterdir()] == [name]


def test_the_same_run_gives_the_same_bytes(tmp_path: Path, export: Export) -> None:
    names = [tmp_path / one for one in ("a.json", "b.json", "a.json.gz", "b.json.gz")]
    for path in names:
        assert export(RECORDED / "two-ranks", "--to", "perfetto", "-o", path).code == 0
    plain, again, packed, repacked = [path.read_bytes() for path in names]
    assert plain == again == gzip.decompress(packed)
    assert packed == repacked


def test_stdout_gets_the_file_and_nothing_else(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run = two_rounds().write(tmp_path / "run")
    command = typer.main.get_command(app)
    command(["export", str(run), "--to", "perfetto", "-o", "-"], standalone_mode=False)
    assert capfdbinary.readouterr() == (timeline_bytes(run), b"")


def test_a_pipe_that_is_closed_ends_the_export_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "omnicache_cli.cli", "export", str(RECORDED / "two-ranks")]
    with subprocess.Popen(
        [*command, "--to", "perfetto", "-o", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_a_full_disk_leaves_the_old_file_and_no_litter(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run, path = two_rounds().write(tmp_path / "run"), tmp_path / "a.json.gz"
    path.write_text("old")
    monkeypatch.setattr("omnicache_cli.export.perfetto.gzip.GzipFile.write", full)
    ran = export(run, "--to", "perfetto", "-o", path, "--force")
    assert (ran.code, ran.err) == (
        3,
        f"omnicache: cannot write {path}: No space left on device; name another file, or free some "
        "space\n",
    )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.json.gz", "run"]
    assert path.read_text() == "old"


def test_an_empty_run_is_a_timeline_without_steps(tmp_path: Path, export: Export) -> None:
    path = tmp_path / "a.json"
    run = Recording().write(tmp_path / "run")
    ran = export(run, "--to", "perfetto", "-o", path)
    assert (ran.code, ran.err.splitlines()[1]) == (0, f"{run}: no step was recorded")
    data = json.loads(path.read_bytes())
    assert problems(data) == []
    assert {one["ph"] for one in data["traceEvents"]} == {"M"}


def test_a_run_that_is_still_written_is_exported_up_to_its_last_whole_line(
    tmp_path: Path, export: Export
) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    path = next(run.glob(f"*{SUFFIX}"))
    path.write_bytes(path.read_bytes()[:-20])
    ran = export(run, "--to", "perfetto", "-o", tmp_path / "a.json")
    assert ran.code == 0
    assert "has no end record" in ran.err
    assert problems(json.loads((tmp_path / "a.json").read_bytes())) == []


def test_a_damaged_line_is_refused_and_leaves_no_file(tmp_path: Path, export: Export) -> None:
    run = two_rounds().write(tmp_path / "run")
    path = next(run.glob(f"*{SUFFIX}"))
    path.write_bytes(path.read_bytes().replace(b'"type":"forward"', b'"type":"what"', 1))
    ran = export(run, "--to", "perfetto", "-o", tmp_path / "a.json")
    assert ran.code == 3
    assert "not a trace record" in ran.err
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, export: Export) -> None:
    ran = export(tmp_path, "--to", "perfetto", "-o", tmp_path / "a.json")
    assert (ran.code, ran.out) == (3, "")
    assert "is not a run folder" in ran.err


def test_an_instant_before_the_origin_of_a_file_keeps_its_place(tmp_path: Path) -> None:
    """A damaged or foreign trace may say so; the order must not break."""
    recording = two_rounds()
    replace_request(recording, 0, arrival_ns=-5_500)
    events = events_of(recording.write(tmp_path / "run"))["traceEvents"]
    assert of_phase(events, "b")[0]["ts"] == -5.5


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """The reader's own bound: what is kept is per live request, and none lives on here."""
    recording = Recording(num_blocks=128)
    for number in range(300):
        request = recording.arrive(f"r{number}", 8)
        recording.step({request: 8}, admit={request: Admit([[1 + number % 40]])})
        recording.finish(request)
    run = Run(recording.write(tmp_path / "run"))
    timeline = Timeline(run, None)
    for event in timeline.events():
        if event.ph == "C":
            engine = timeline._engines["host.1.0"]
            assert len(engine._spans._open) <= 1
    assert timeline.num_steps == 300


def test_a_timeline_does_not_take_the_place_of_the_trace(tmp_path: Path, export: Export) -> None:
    run = two_rounds().write(tmp_path / "run")
    path = next(run.glob("*.trace.jsonl"))
    before = path.read_bytes()
    assert export(run, "--to", "perfetto", "-o", path, "--force") == Ran(
        3,
        "",
        f"omnicache: {path} has the name of a file of the run in its folder; name another file\n",
    )
    assert path.read_bytes() == before
