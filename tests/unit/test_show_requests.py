"""`omnicache show --requests` and `--evictions`: whole outputs, as a user sees them."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from omnicache_cli.trace.records import (
    Allocated,
    Cached,
    CacheReset,
    Evicted,
    Finished,
    Gap,
    MultiModalSpan,
    RequestRecord,
    SchedulerStep,
)
from omnicache_cli.trace.views import evictions as evictions_view
from omnicache_cli.trace.views import requests as requests_view
from tests.unit.pool_builder import PoolRecording, shared_prefix
from tests.unit.run_builder import Admit, Recording, cache_group
from tests.unit.showing import Ran, Show
from tests.unit.test_show import busy, resumed_with_a_hit


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run with a shared prefix, in the folder `run` of the working directory."""
    monkeypatch.chdir(tmp_path)
    return shared_prefix().write(Path("run"))


# -- requests ---------------------------------------------------------------------------------


def test_every_request_in_one_line(show: Show, run: Path) -> None:
    ran = show(run, "--requests")

    assert ran.lines == [
        "Requests of run",
        "requests  4",
        "",
        "request id arrives prompt hit computed first last blocks preempted status           with",
        "#0      a        0      8   0        9     0    1      3         0 FINISHED_STOPPED -",
        "#1      b        1      9   8        2     1    2      3         0 FINISHED_STOPPED "
        "LoRA sql",
        "#2      c        3     24   0       24     3    3      6         0 FINISHED_STOPPED salt",
        "#3      d        4      9   4        5     4    4      3         0 FINISHED_STOPPED -",
    ]
    assert (ran.code, ran.err) == (0, 'next: omnicache show run --request "#1"\n')


def test_requests_as_json(show: Show, run: Path) -> None:
    result = show(run, "--requests", "--format", "json").json

    assert (result["num_requests"], result["listed"]) == (4, 4)
    assert result["requests"][1] == {
        "engine": "host.1.0",
        "number": 1,
        "request": "b",
        "request_id": "b-00000001",
        "arrival_step": 1,
        "num_prompt_tokens": 9,
        "queried_tokens": 9,
        "hit_tokens": 8,
        "resumed_hit_tokens": None,
        "computed_tokens": 2,
        "num_steps": 2,
        "first_step": 1,
        "last_step": 2,
        "most_blocks": [3],
        "num_preemptions": 0,
        "status": "FINISHED_STOPPED",
        "num_output_tokens": 1,
        "lora_name": "sql",
        "has_cache_salt": False,
        "multimodal_items": {},
        "skip_reading_prefix_cache": False,
    }


def test_a_preempted_request_computes_its_tokens_again(show: Show, tmp_path: Path) -> None:
    lines = show(busy().write(tmp_path / "busy"), "--requests").lines
    assert [line.split() for line in lines[-2:]] == [
        ["#0", "a", "0", "8", "0", "9", "0", "1", "3", "0", "FINISHED_STOPPED", "-"],
        ["#1", "b", "0", "6", "0", "13", "0", "2", "2", "1", "FINISHED_STOPPED", "-"],
    ]

    run = resumed_with_a_hit().write(tmp_path / "resumed")
    (first, _) = show(run, "--requests", "--format", "json").json["requests"]
    assert (first["hit_tokens"], first["resumed_hit_tokens"]) == (0, 16)
    assert (first["computed_tokens"], first["status"]) == (25, None)


def test_what_a_request_brings_is_named(show: Show, tmp_path: Path) -> None:
    recording = Recording([cache_group(), cache_group()])
    spans = [MultiModalSpan("image", 0, 4, "aa"), MultiModalSpan("image", 4, 4, "bb")]
    a = recording.arrive("a", 9, multimodal=[*spans, MultiModalSpan("audio", 8, 1, "cc")])
    b = recording.arrive("b", 9, skip_reading_prefix_cache=True)
    recording.step({a: 9, b: 9}, admit={a: Admit([[1], [0]]), b: Admit([[2], [3]])})
    recording.arrive("late", 5)
    recording.write(tmp_path / "run")

    assert show(tmp_path / "run", "--requests").lines[3:] == [
        "request id   arrives prompt hit computed first last blocks preempted status       with",
        "#0      a          0      9   0        9     0    0 1, 0           0 not finished "
        "2 images, 1 audio",
        "#1      b          0      9   0        9     0    0 1, 1           0 not finished "
        "no cache read",
        "#2      late       1      5   -        0     -    - -              0 not finished -",
    ]


def test_a_request_whose_record_was_lost_has_no_numbers_made_up(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("a", 20)
    recording.step({number: 20}, admit={number: Admit([[1, 2]])})
    place = next(
        index for index, one in enumerate(recording.records) if isinstance(one, RequestRecord)
    )
    recording.records[place] = Gap(1)
    recording.write(tmp_path / "run")

    (row,) = show(tmp_path / "run", "--requests", "--format", "json").json["requests"]

    assert (row["request"], row["arrival_step"], row["num_prompt_tokens"]) == (
        "(lost #0)",
        None,
        None,
    )
    assert (row["computed_tokens"], row["first_step"]) == (20, 0)


def test_a_request_that_is_aborted_before_it_runs_has_ended(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    a = recording.arrive("a", 4)
    recording.step({a: 4}, admit={a: Admit([[1]])})
    b = recording.arrive("b", 4)
    recording.after(Finished(b, "FINISHED_ABORTED", 0))
    recording.step({a: 1})
    recording.write(tmp_path / "run")

    rows = show(tmp_path / "run", "--requests", "--format", "json").json["requests"]

    assert [(row["request"], row["status"], row["first_step"]) for row in rows] == [
        ("a", None, 0),
        ("b", "FINISHED_ABORTED", None),
    ]


def test_many_requests_are_cut_in_words(
    show: Show, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_view, "TEXT_ROWS", 1)
    monkeypatch.setattr(requests_view, "JSON_ROWS", 2)

    assert show(run, "--requests").lines[-4:] == [
        "request  id  arrives  prompt  hit  computed  first  last  blocks  preempted  "
        "status            with",
        "#0       a         0       8    0         9      0     1       3          0  "
        "FINISHED_STOPPED  -",
        "",
        "… and 3 more requests; --request ID or --format json",
    ]
    result = show(run, "--requests", "--format", "json").json
    assert (result["num_requests"], result["listed"]) == (4, 2)
    assert [one["number"] for one in result["requests"]] == [0, 1]


def test_each_engine_has_its_requests_and_evictions(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("host.1", "host.2"):
        recording = PoolRecording(engine=f"{name}.0")
        number = recording.arrive("a", 4)
        events = [Evicted(1, 0, "aa", -1, number)]
        recording.step({number: 4}, admit={number: Admit([[1]])}, events=events)
        recording.arrive(name, 4)
        recording.write(Path("run"), name=name)

    ran = show("run", "--requests")
    assert [line for line in ran.lines if line.startswith("Engine")] == [
        "Engine 0, host.1.0",
        "Engine 1, host.2.0",
    ]
    assert ran.err == 'next: omnicache show run --request "#0" --engine 0\n'
    rows = show("run", "--requests", "--engine", 1, "--format", "json").json["requests"]
    assert [(one["engine"], one["request"]) for one in rows] == [
        ("host.2.0", "a"),
        ("host.2.0", "host.2"),
    ]
    ran = show("run", "--evictions")
    assert [line for line in ran.lines if line.startswith("Engine")] == [
        "Engine 0, host.1.0",
        "Engine 1, host.2.0",
    ]
    assert ran.err == "next: omnicache show run --block 1 --engine 0\n"


# -- evictions --------------------------------------------------------------------------------


def test_every_eviction_and_who_needed_it_again(show: Show, run: Path) -> None:
    ran = show(run, "--evictions")

    assert ran.lines == [
        "Evictions of run",
        "evicted       1 hash from 1 block",
        "needed again  1 (100.0 %)",
        "",
        "Evictions",
        "step  block  hash  cached by  taken by  needed again",
        "   3      2  a1    #0         #2        step 4 by #3 d",
    ]
    assert (ran.code, ran.err) == (0, "next: omnicache show run --block 2\n")


def test_evictions_as_json(show: Show, run: Path) -> None:
    result = show(run, "--evictions", "--format", "json").json

    assert result["evictions"] == [
        {
            "engine": "host.1.0",
            "step": 3,
            "block": 2,
            "group": 0,
            "hash": "a1",
            "owner": 0,
            "request": 2,
            "needed_again": {"step": 4, "request": 3, "external_id": "d", "resumed": False},
            "followed": True,
        }
    ]
    assert result["engines"] == [
        {
            "engine": "host.1.0",
            "num_evictions": 1,
            "num_blocks": 1,
            "num_needed_again": 1,
            "num_not_followed": 0,
            "records_lost_before": None,
        }
    ]


def evicting(
    hashes: list[str], *, prompt: int, hit: int = 0, queried: int | None = None
) -> PoolRecording:
    """Hash b0 of block 5 is evicted by request 0; then request 1 with these hashes comes."""
    recording = PoolRecording(num_blocks=64)
    a = recording.arrive("a", 4)
    recording.step({a: 4}, admit={a: Admit([[5]])}, events=[Evicted(5, 0, "b0", -1, a)])
    b = recording.arrive("b", prompt, block_hashes=hashes)
    blocks = list(range(10, 10 + -(-prompt // 4)))
    recording.step({b: prompt - hit}, admit={b: Admit([blocks], hit=hit)})
    if queried is not None:
        (admission,) = recording.records[-2].admitted  # type: ignore[union-attr]
        recording.change(SchedulerStep, 1, admitted=[replace(admission, queried_tokens=queried)])
    return recording


@pytest.mark.parametrize(
    ("recording", "needed"),
    [
        (evicting(["b0"], prompt=5), "step 1 by #1 b"),
        (evicting(["c0"], prompt=5), "no"),  # another prefix
        (evicting(["b0"], prompt=4), "no"),  # its last token is computed anyway
        (evicting(["b0"], prompt=5, hit=4), "no"),  # another block had the same hash
        (evicting(["b0"], prompt=5, queried=0), "no"),  # the cache was not asked
        (evicting(["a9", "b0"], prompt=9), "step 1 by #1 b"),  # behind another miss
    ],
)
def test_a_hash_is_needed_again_where_a_full_hit_would_have_had_it(
    recording: PoolRecording, needed: str, show: Show, tmp_path: Path
) -> None:
    lines = show(recording.write(tmp_path / "run"), "--evictions").lines

    assert lines[-1] == f"   0      5  b0    not known  #0        {needed}"


def test_a_hash_that_is_cached_again_is_not_missing(show: Show, tmp_path: Path) -> None:
    recording = evicting(["b0"], prompt=4)
    recording.after(Cached(1, 0, [0, 1], [10, 1]))
    c = recording.arrive("c", 5, block_hashes=["b0"])
    recording.step({c: 5}, admit={c: Admit([[20, 21]])})

    lines = show(recording.write(tmp_path / "run"), "--evictions").lines
    assert lines[-1] == "   0      5  b0    not known  #0        no"


def test_what_a_reset_took_is_no_regret(show: Show, tmp_path: Path) -> None:
    recording = PoolRecording()
    a = recording.arrive("a", 4)
    recording.step({a: 4}, admit={a: Admit([[5]])}, events=[Evicted(5, 0, "b0", -1, a)])
    recording.after(CacheReset(True))
    b = recording.arrive("b", 5, block_hashes=["b0"])
    recording.step({b: 5}, admit={b: Admit([[1, 2]])})

    assert show(recording.write(tmp_path / "run"), "--evictions").lines[-1].endswith("no")


def test_a_request_does_not_regret_what_it_evicts_itself(show: Show, tmp_path: Path) -> None:
    recording = PoolRecording()
    b = recording.arrive("b", 9, block_hashes=["a9", "b0"])
    events = [Evicted(1, 0, "b0", -1, b), Allocated(b, [1, 3])]
    recording.step({b: 9}, admit={b: Admit([[1, 2, 3]])})
    recording.change(SchedulerStep, 0, events=events)

    assert show(recording.write(tmp_path / "run"), "--evictions").lines[-1].endswith("no")


def test_a_running_request_can_evict_what_another_one_needs_in_the_same_step(
    show: Show, tmp_path: Path
) -> None:
    recording = PoolRecording()
    a = recording.arrive("a", 4)
    recording.step({a: 4}, admit={a: Admit([[1]])})
    b = recording.arrive("b", 5, block_hashes=["b0"])
    recording.step(
        {a: 1, b: 5},
        grow={a: [[2]]},
        admit={b: Admit([[3, 4]])},
    )
    events = [Evicted(2, 0, "b0", b, a), Allocated(a, [2, 1]), Allocated(b, [3, 2])]
    recording.change(SchedulerStep, 1, events=events)

    lines = show(recording.write(tmp_path / "run"), "--evictions").lines
    assert lines[-1] == "   1      2  b0    #1         #0        step 1 by #1 b"


def test_a_resumed_request_regrets_too(show: Show, tmp_path: Path) -> None:
    recording = PoolRecording()
    a = recording.arrive("a", 5, block_hashes=["a0"])
    recording.step({a: 5}, admit={a: Admit([[1, 2]])})
    b = recording.arrive("b", 4)
    events = [*recording.preempt(a), Evicted(1, 0, "a0", a, b)]
    recording.step({b: 4}, events=events, admit={b: Admit([[1]])})
    recording.step({a: 6}, admit={a: Admit([[3, 4]], resumed=True)})

    lines = show(recording.write(tmp_path / "run"), "--evictions").lines
    assert lines[-1] == "   1      1  a0    #0         #1        step 2 by #0 a, resumed"


def test_behind_a_sliding_window_nothing_is_needed(show: Show, tmp_path: Path) -> None:
    window = cache_group(block_size=4, spec="SlidingWindowSpec", sliding_window=5)
    recording = PoolRecording([cache_group(block_size=4), window], num_blocks=64)
    a = recording.arrive("a", 4)
    events = [Evicted(5, 1, "b0", -1, a), Evicted(6, 1, "b1", -1, a)]
    recording.step({a: 4}, admit={a: Admit([[5], [6]])}, events=events)
    b = recording.arrive("b", 9, block_hashes=["b0", "b1"])
    recording.step({b: 9}, admit={b: Admit([[10, 11, 12], [13, 14, 15]])})

    ran = show(recording.write(tmp_path / "run"), "--evictions")
    assert ran.lines[-3:] == [
        "step  block  group  hash  cached by  taken by  needed again",
        "   0      5      1  b0    not known  #0        no",
        "   0      6      1  b1    not known  #0        step 1 by #1 b",
    ]


def test_memory_is_bounded_and_what_is_forgotten_is_said(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictions_view, "MAX_FOLLOWED", 1)
    monkeypatch.setattr(evictions_view, "TEXT_ROWS", 2)
    recording = PoolRecording()
    a = recording.arrive("a", 12)
    events = [Evicted(block, 0, f"b{block}", -1, a) for block in (1, 2, 3)]
    recording.step({a: 12}, admit={a: Admit([[1, 2, 3]])}, events=events)
    recording.after(Finished(a, "FINISHED_STOPPED", 1))

    lines = show(recording.write(tmp_path / "run"), "--evictions").lines
    assert lines[1:] == [
        "evicted                  3 hashes from 3 blocks",
        "needed again             0 (0.0 %)",
        "not followed to the end  2",
        "",
        "Evictions",
        "step  block  hash  cached by  taken by  needed again",
        "   0      1  b1    not known  #0        not known",
        "   0      2  b2    not known  #0        not known",
        "",
        "… and 1 more eviction; --format json",
    ]


def test_a_run_without_evictions_says_so(show: Show, tmp_path: Path) -> None:
    recording = PoolRecording()
    a = recording.arrive("a", 4)
    recording.step({a: 4}, admit={a: Admit([[1]])})
    recording.write(tmp_path / "run")

    ran = show(tmp_path / "run", "--evictions", "--quiet")
    assert ran == Ran(
        0,
        "Evictions of run\n"
        "evicted       0 hashes from 0 blocks\n"
        "needed again  0\n"
        "\n"
        "Evictions\n"
        "step  block  hash  cached by  taken by  needed again\n"
        "(none)\n",
        "",
    )
