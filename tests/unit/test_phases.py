"""Where the time of the steps goes: exact phase times, the rest of a step, the slowest steps."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from omnicache_cli.profile.phases import REST, measure, own_times
from omnicache_cli.profile.slowest import NUM_SLOWEST, SlowestSteps
from omnicache_cli.trace.phases import PHASES, step_times
from omnicache_cli.trace.records import (
    BatchDescriptor,
    CacheReset,
    Evicted,
    ForwardStep,
    RankStep,
    SchedulerStep,
    WorkerSource,
)
from omnicache_cli.trace.run import Run
from tests.unit.run_builder import Admit, Recording, cache_group, two_rounds
from tests.unit.showing import Show

MS = 1_000_000


def timed(recording: Recording, step: int, *, whole_ns: int = 4_200_000, **worker: int) -> None:
    """Give a step the times that a builder leaves out; the output takes 0.2 ms."""
    (record,) = (
        one for one in recording.records if isinstance(one, SchedulerStep) and one.step == step
    )
    recording.change(
        SchedulerStep,
        step,
        lookup_ns=20_000,
        allocate_ns=30_000,
        output_start_ns=record.start_ns + whole_ns - 200_000,
        output_ns=200_000,
    )
    if worker:
        recording.change(ForwardStep, step, **worker)


def all_timed() -> Recording:
    recording = two_rounds()
    for step in range(5):
        timed(recording, step)
    return recording


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return all_timed().write(Path("run"))


def test_a_phase_without_its_parts_and_what_is_left_of_the_step(run: Path) -> None:
    first = next(iter(Run(run).steps()))
    assert own_times(first) == {
        "schedule": 50_000,  # of 0.1 ms
        "lookup": 20_000,
        "allocate": 30_000,
        "prepare": 500_000,
        "forward": 2_000_000,
        "sample": 300_000,
        "output": 200_000,
        "save": None,
        "restore": None,
        "copy": None,
        REST: 1_100_000,
    }


def test_what_a_tensor_cache_does_inside_a_phase_is_not_counted_twice(tmp_path: Path) -> None:
    recording = all_timed()
    timed(
        recording,
        1,
        save_ns=400_000,
        restore_ns=100_000,
        copy_ns=50_000,
        prepare_tensor_ns=200_000,
        sample_tensor_ns=150_000,
    )
    steps = list(Run(recording.write(tmp_path / "run")).steps())
    times = own_times(steps[1])
    assert (times["prepare"], times["sample"]) == (300_000, 150_000)
    assert [times[phase] for phase in ("save", "restore", "copy")] == [400_000, 100_000, 50_000]
    assert sum(one for one in times.values() if one is not None) == 4_200_000


def two_ranks(**second: int) -> Recording:
    """One step; on rank 1 the model takes half a millisecond more and nothing is sampled."""
    recording = Recording(ranks=2)
    number = recording.arrive("a", 4)
    recording.step({number: 4}, admit={number: Admit([[1]])})
    timed(recording, 0, whole_ns=9 * MS)
    slow = RankStep(2, 0, 0, 100_000, 2_500_000, None, "d")
    recording.records = [
        slow
        if isinstance(one, ForwardStep) and one.source == 2
        else replace(one, **second)
        if isinstance(one, WorkerSource) and one.source == 2
        else one
        for one in recording.records
    ]
    return recording


@pytest.mark.parametrize(
    ("second", "busy_ns"),
    [({}, 2_800_000), ({"tp_rank": 0, "pp_rank": 1}, 2_800_000 + 2_600_000)],
    ids=["tensor-parallel", "pipeline-parallel"],
)
def test_ranks_of_one_stage_run_together_and_stages_one_after_the_other(
    second: dict[str, int], busy_ns: int, tmp_path: Path
) -> None:
    run = two_ranks(**second).write(tmp_path / "run")
    (step,) = Run(run).steps()
    assert (step_times(step)["prepare"], step_times(step)["forward"]) == (500_000, 2_500_000)
    assert own_times(step)[REST] == 9 * MS - 100_000 - busy_ns - 200_000
    (engine,) = measure(Run(run)).engines.values()
    assert engine.phases["forward", 0].durations.total_ns == 2_000_000
    assert engine.phases["forward", 1].durations.total_ns == 2_500_000
    assert ("sample", 1) not in engine.phases


def test_shares_are_of_the_steps_whose_own_time_is_known(tmp_path: Path) -> None:
    """The output of the last step never came: the process was killed."""
    recording = all_timed()
    recording.change(SchedulerStep, 4, output_ns=None, output_start_ns=None)
    (engine,) = measure(Run(recording.write(tmp_path / "run"))).engines.values()
    forward = engine.phases["forward", 0]
    assert (engine.num_steps, engine.steps.count) == (5, 4)
    assert (forward.durations.total_ns, forward.in_whole_steps_ns) == (10 * MS, 8 * MS)
    assert engine.share(forward) == 8 / 16.8
    assert engine.largest == "forward"
    assert not engine.overlap


def test_steps_in_flight_together_are_told(tmp_path: Path) -> None:
    recording = two_rounds()
    for step in range(5):  # a step begins every 10 ms and lasts 15
        timed(recording, step, whole_ns=15 * MS)
    (engine,) = measure(Run(recording.write(tmp_path / "run"))).engines.values()
    assert engine.overlap


PHASES_TEXT = """\
Phases of run

Phases of 5 steps
phase                  of         steps  total ms  share    p50 ms  p90 ms  p99 ms  max ms
schedule               scheduler      5       0.5  2.4 %       0.1     0.1     0.1     0.1
lookup, in schedule    scheduler      5       0.1  0.5 %      0.02    0.02    0.02    0.02
allocate, in schedule  scheduler      5      0.15  0.7 %      0.03    0.03    0.03    0.03
prepare                rank 0         5       2.5  11.9 %      0.5     0.5     0.5     0.5
forward                rank 0         5        10  47.6 %        2       2       2       2
sample                 rank 0         5       1.5  7.1 %       0.3     0.3     0.3     0.3
output                 scheduler      5         1  4.8 %       0.2     0.2     0.2     0.2
rest                                  5       5.5  26.2 %      1.1     1.1     1.1     1.1
whole step                            5        21  100.0 %     4.2     4.2     4.2     4.2

most of the time is in forward, 48 % of it

Slowest steps
step   ms  most of it  reqs  tokens  prefill  graph  special
   0  4.2  forward 2      1      40       40  NONE   the first step of its engine, 1 request
                                                     admitted
   1  4.2  forward 2      1       1        0  NONE   the first with a batch of 1 token
   2  4.2  forward 2      1       1        0  NONE   1 finished request
   3  4.2  forward 2      1       8        8  NONE   the first with a batch of 8 tokens, 1 request
                                                     admitted
   4  4.2  forward 2      1       1        0  NONE   1 finished request
""".splitlines()


def test_the_phases_of_a_run(show: Show, run: Path) -> None:
    ran = show(run, "--phases")
    assert ran.lines == PHASES_TEXT
    assert (ran.code, ran.err) == (0, "next: omnicache show run --step 0\n")


def test_a_run_of_an_older_omnicache_has_unknown_phases_and_no_zero(
    show: Show, tmp_path: Path
) -> None:
    recording = two_rounds()
    folder = recording.write(tmp_path / "run")
    lines = show(folder, "--phases").lines
    assert "not recorded: lookup, allocate, output" in lines
    assert not any(line.startswith(("lookup", "output", "rest", "whole")) for line in lines)
    assert "Slowest steps, by the phases that were recorded" in lines
    data = show(folder, "--phases", "--format", "json").json
    (engine,) = data["engines"]
    assert engine["not_recorded"] == ["lookup", "allocate", "output"]
    assert [one["phase"] for one in engine["phases"]] == [
        *("schedule", "prepare", "forward", "sample")
    ]
    assert all(one["share"] is None for one in engine["phases"])
    assert engine["steps"]["total_ns"] is None
    assert engine["rest"]["total_ns"] is None
    assert engine["hashing"]["count"] == 0
    assert data["slowest_steps"][0]["duration_ns"] == 2_900_000
    assert data["slowest_steps"][0]["times_ns"]["output"] is None
    totals = show(folder, "--summary", "--format", "json").json["phases"]
    assert list(totals) == list(PHASES)
    assert totals["output"]["total_ns"] is None
    assert totals["lookup"]["p50_ns"] is None


def test_the_summary_and_two_runs_show_the_new_phases_too(show: Show, run: Path) -> None:
    lines = show(run, "--summary").lines
    assert "lookup        5       0.1    0.02    0.02    0.02    0.02" in lines
    two_rounds().write(Path("old"))
    assert "output     0.2    -" in show(run, "old").lines
    assert "save" not in " ".join(lines)


def test_a_slow_phase_is_named(show: Show, tmp_path: Path) -> None:
    recording = all_timed()
    timed(recording, 3, whole_ns=44 * MS, copy_ns=40 * MS)
    data = show(recording.write(tmp_path / "run"), "--phases", "--format", "json").json
    slowest = data["slowest_steps"][0]
    assert (slowest["step"], slowest["largest"]) == (3, "copy")
    assert slowest["times_ns"]["copy"] == 40 * MS
    assert data["engines"][0]["largest"] == "copy"


def test_what_was_special_about_a_step(tmp_path: Path) -> None:
    recording = Recording([cache_group(block_size=4)], num_blocks=32)
    a, b = recording.arrive("a", 20), recording.arrive("b", 6)
    recording.step({a: 8}, admit={a: Admit([[1, 2]])})
    recording.step(
        {a: 8, b: 6},
        admit={b: Admit([[3, 4]])},
        grow={a: [[5, 6]]},
        events=(Evicted(5, 0, "00000000000000aa", b, a), Evicted(5, 0, "00000000000000ab", b, a)),
        padding=2,
        descriptor=BatchDescriptor(16),
        cudagraph_mode="PIECEWISE",
    )
    recording.change(SchedulerStep, 1, scheduled_encoder_inputs=[(b, [0, 1])])
    recording.after(CacheReset(True))
    recording.step({a: 4}, grow={a: [[7]]}, events=recording.preempt(b))
    recording.step({a: 1}, grow={a: [[8]]})
    recording.step({b: 6}, admit={b: Admit([[3, 4]], resumed=True)})
    found = SlowestSteps()
    for step in Run(recording.write(tmp_path / "run")).steps():
        found.add(step, own_times(step))
    special = {one.step: one for one in found.ordered()}
    assert special[0].special == (
        "the first step of its engine",
        "a chunk of #0, tokens 0 to 8 of 20",
        "1 request admitted",
    )
    assert special[1].special == (
        "the first with a batch of 16 tokens",
        "a chunk of #0, tokens 8 to 16 of 20",
        "1 request admitted",
        "1 evicted block",
        "the encoder ran on 2 items",
        "a reset of the prefix cache",
    )
    assert (special[1].cudagraph_mode, special[1].num_padding_tokens) == ("PIECEWISE", 2)
    assert special[2].special == (
        "the first with a batch of 4 tokens",
        "a chunk of #0, tokens 16 to 20 of 20",
        "1 preemption",
    )
    assert special[3].special == ("the first with a batch of 1 token",)
    assert special[4].special == (
        "the first with a batch of 6 tokens",
        "1 request resumed after a preemption",
    )


def test_only_the_slowest_are_kept_and_of_equals_the_first(tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("a", 4)
    recording.step({number: 4}, admit={number: Admit([[1, 2, 3, 4]])})
    for _ in range(29):
        recording.step({number: 1})
    for step in (7, 21):
        recording.change(ForwardStep, step, forward_ns=50 * MS)
    phases = measure(Run(recording.write(tmp_path / "run")))
    assert [one.step for one in phases.slowest] == [7, 21, 0, 1, 2, 3, 4, 5, 6, 8]
    assert len(phases.slowest) == NUM_SLOWEST


def test_hashing_is_told_beside_the_steps(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    for name, spent in (("a", 300_000), ("b", 100_000)):
        recording.arrive(name, 4, hash_ns=spent)
    recording.step({0: 4, 1: 4}, admit={0: Admit([[1]]), 1: Admit([[2]])})
    lines = show(recording.write(tmp_path / "run"), "--phases").lines
    wanted = "beside the steps: hashing 2 prompts, 0.4 ms in all, p50 0.1 ms, max 0.3 ms"
    assert wanted in lines


def test_a_run_without_steps_says_so(show: Show, tmp_path: Path) -> None:
    lines = show(Recording().write(tmp_path / "run"), "--phases").lines
    assert lines == ["Phases of run", "no step was recorded"]


def test_several_engines_are_told_apart(show: Show, tmp_path: Path) -> None:
    all_timed().write(tmp_path / "run")
    other = Recording(engine="host.2.0", enable_prefix_caching=False)
    number = other.arrive("a", 4)
    other.step({number: 4}, admit={number: Admit([[1]])})
    timed(other, 0, whole_ns=9 * MS)
    other.write(tmp_path / "run", name="host.2")
    ran = show(tmp_path / "run", "--phases")
    assert "Engine 0, host.1.0: phases of 5 steps" in ran.lines
    assert "Engine 1, host.2.0: phases of 1 step" in ran.lines
    assert ran.lines.count("prefix caching is off on this engine") == 1
    assert ran.err == f"next: omnicache show {tmp_path / 'run'} --engine 1 --step 0\n"
    only = show(tmp_path / "run", "--phases", "--engine", 0)
    assert "host.2.0" not in only.out
