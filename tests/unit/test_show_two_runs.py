"""`omnicache show A B`: whole outputs, as a user sees them."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from omnicache_cli.trace.records import Evicted, ForwardStep, SchedulerStep
from omnicache_cli.trace.views import two_runs as two_runs_view
from tests.unit.pool_builder import PoolRecording, shared_prefix
from tests.unit.run_builder import Admit, Recording, two_rounds
from tests.unit.showing import Ran, Show


def without_cache() -> Recording:
    """`two_rounds` on an engine whose prefix cache is off."""
    recording = Recording(enable_prefix_caching=False, options={"seed": 1})
    for number, name in enumerate(("p0-r1", "p0-r2")):
        recording.arrive(name, 40)
        tokens = 40
        recording.step({number: tokens}, admit={number: Admit([[1, 2, 3]])})
        recording.step({number: 1})
        recording.step({number: 1})
        recording.finish(number, 3)
    return recording


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """One prompt in two rounds, with and without the prefix cache: folders `on` and `off`."""
    monkeypatch.chdir(tmp_path)
    return two_rounds().write(Path("on")), without_cache().write(Path("off"))


TWO_RUNS = """\
Two runs
A  on
B  off

Engine options that differ
option                 A    B
enable_prefix_caching  yes  no
seed                   -    1

Totals that differ
total              A        B
steps              5        6
forwards           5        6
scheduled_tokens   51      84
hit_tokens         32       0
kv_cache_hit_rate  0.4      0
modal_cache_ratio  text 1   -

Requests
in both    2
the same   1
differ     1
only in A  0
only in B  0

Requests that differ
request   prompt  hit A  hit B  computed A  computed B  steps A  steps B  differ in
#1 p0-r2      40     32      0           9          42        2        3  hit tokens, computed
                                                                          tokens, steps, output
                                                                          tokens

First step that differs
step 3: hit tokens of #1 p0-r2
  A: 32
  B: 0

Phase times, p50 in ms (never a difference above)
phase       A    B
schedule  0.1  0.1
prepare   0.5  0.5
forward     2    2
sample    0.3  0.3
""".splitlines()


def test_two_runs_side_by_side(show: Show, runs: tuple[Path, Path]) -> None:
    ran = show(*runs)

    assert ran.lines == TWO_RUNS
    assert (ran.code, ran.err) == (0, "")


def test_two_runs_as_json(show: Show, runs: tuple[Path, Path]) -> None:
    result = show(*runs, "--format", "json").json

    assert result["runs"] == ["on", "off"]
    assert result["options"] == {"enable_prefix_caching": [True, False], "seed": [None, 1]}
    assert result["totals"]["kv_cache_hit_rate"] == [0.4, 0]
    assert result["first_differences"] == [
        {
            "engines": ["host.1.0", "host.1.0"],
            "difference": {
                "steps": [3, 3],
                "what": "hit tokens of #1 p0-r2",
                "values": [32, 0],
            },
        }
    ]
    (same, other) = result["requests"]
    assert (same["matched_by"], same["differ_in"]) == ("id", [])
    assert other["differ_in"] == ["hit_tokens", "computed_tokens", "num_steps", "num_output_tokens"]
    assert (other["a"]["hit_tokens"], other["b"]["hit_tokens"]) == (32, 0)
    assert result["phases_p50_ns"]["forward"] == [2_000_000, 2_000_000]


def test_equal_runs_differ_in_nothing_but_times(show: Show, runs: tuple[Path, Path]) -> None:
    recording = two_rounds()
    recording.change(ForwardStep, 1, forward_ns=9_000_000)
    recording.write(Path("again"))

    lines = show("on", "again").lines

    assert lines[5:11] == [
        "option  A  B",
        "(none)",
        "",
        "Totals that differ",
        "total  A  B",
        "(none)",
    ]
    assert "none: every step scheduled, hit, took and freed the same" in lines
    assert show("on", "again", "--format", "json").json["first_differences"] == [
        {"engines": ["host.1.0", "host.1.0"], "difference": None}
    ]


def parting(show: Show, changed: Recording, *options: object) -> list[str]:
    """What the run with a shared prefix and this one did differently first."""
    shared_prefix().write(Path("on"))
    changed.write(Path("off"))
    lines = show("on", "off", *options).lines
    place = lines.index("First step that differs")
    return lines[place + 1 : lines.index("", place)]


@pytest.mark.usefixtures("runs")
def test_the_first_difference_names_its_cause(show: Show) -> None:
    recording = shared_prefix()
    recording.change(SchedulerStep, 2, num_free_blocks=3)
    assert parting(show, recording) == ["step 2: blocks in use", "  A: 3", "  B: 4"]

    recording = shared_prefix()
    recording.change(SchedulerStep, 1, num_waiting=3)
    recording.change(SchedulerStep, 2, num_free_blocks=3)
    assert parting(show, recording) == [
        "step 1: running and waiting requests",
        "  A: 2, 0",
        "  B: 2, 3",
    ]

    recording = shared_prefix()
    (record,) = (
        one for one in recording.records if isinstance(one, SchedulerStep) and one.step == 3
    )
    events = [one for one in record.events if not isinstance(one, Evicted)]
    recording.change(SchedulerStep, 3, events=events)
    assert parting(show, recording) == ["step 3: evicted blocks", "  A: 2", "  B: none"]

    recording = shared_prefix()
    number = recording.arrive("e", 4)
    recording.step({number: 4}, admit={number: Admit([[1]])})
    assert parting(show, recording) == [
        "step 5: number of steps",
        "  A: ended before",
        "  B: goes on",
    ]


@pytest.mark.usefixtures("runs")
def test_a_hash_with_another_seed_is_no_difference(show: Show) -> None:
    recording = shared_prefix()
    recording.records = [
        _with_other_hash(one) if isinstance(one, SchedulerStep) else one
        for one in recording.records
    ]
    assert parting(show, recording) == ["none: every step scheduled, hit, took and freed the same"]


def _with_other_hash(record: SchedulerStep) -> SchedulerStep:
    return replace(
        record,
        events=[
            replace(event, hash="ff") if isinstance(event, Evicted) else event
            for event in record.events
        ],
    )


@pytest.mark.usefixtures("runs")
def test_requests_are_matched_by_id_and_then_by_arrival(show: Show) -> None:
    for name, ids in (("on", ("x", "x", "chat-1", "y")), ("off", ("x", "chat-2", "chat-3"))):
        recording = PoolRecording()
        for number, external_id in enumerate(ids):
            prompt = 4 if external_id != "chat-3" else 5
            recording.arrive(external_id, prompt)
            recording.step({number: prompt}, admit={number: Admit([[1, 2]])})
            recording.ends(number, 1, 2)
        recording.write(Path(name))

    lines = show("on", "off").lines

    place = lines.index("Requests")
    assert lines[place + 1 : place + 7] == [
        "in both             2",
        "the same            2",
        "differ              0",
        "only in A           2",
        "only in B           1",
        "matched by arrival  1",
    ]
    pairs = show("on", "off", "--format", "json").json["requests"]
    names = [
        tuple(None if pair[side] is None else pair[side]["request"] for side in "ab")
        for pair in pairs
    ]
    assert names == [("x", "x"), ("x", "chat-2"), ("chat-1", None), ("y", None), (None, "chat-3")]
    assert [pair["matched_by"] for pair in pairs] == ["id", "arrival", None, None, None]


def test_engines_are_compared_in_their_order(show: Show, runs: tuple[Path, Path]) -> None:
    for folder in runs:
        recording = PoolRecording(engine=f"{folder}.2", num_blocks=8 if folder.name == "on" else 9)
        number = recording.arrive("a", 4)
        recording.step({number: 4}, admit={number: Admit([[1]])})
        recording.write(folder, name="host.2")

    lines = show(*runs).lines
    assert "engine 1: num_gpu_blocks         8    9" in lines
    place = lines.index("First step that differs")
    assert lines[place + 1 : place + 5] == [
        "engine 0: step 3: hit tokens of #1 p0-r2",
        "  A: 32",
        "  B: 0",
        "engine 1: none: every step scheduled, hit, took and freed the same",
    ]
    only = show(*runs, "--engine", 1, "--format", "json").json["first_differences"]
    assert [one["engines"] for one in only] == [["on.2", "off.2"]]


def test_long_lists_are_cut_in_words(
    show: Show, runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_runs_view, "TEXT_ROWS", 0)
    assert "… and 1 more request; --format json" in show(*runs).lines


def test_an_option_for_one_run_is_refused_with_two(show: Show, runs: tuple[Path, Path]) -> None:
    assert show(*runs, "--summary") == Ran(
        2, "", "omnicache: --summary is about one run; leave out off, or the option\n"
    )
    assert show(*runs, "--engine", 7).code == 3
    assert show("on", "nowhere").code == 3
