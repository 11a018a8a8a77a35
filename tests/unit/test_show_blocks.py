"""`omnicache show --blocks` and `--block N`: whole outputs, as a user sees them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnicache_cli.trace.records import (
    NO_REQUEST,
    Allocated,
    CachedPartial,
    Freed,
    Gap,
    HashesMoved,
    Preempted,
    SchedulerStep,
)
from omnicache_cli.trace.views import block as block_view
from omnicache_cli.trace.views import blocks as blocks_view
from tests.unit.pool_builder import PoolRecording, shared_prefix
from tests.unit.run_builder import Admit, Recording, cache_group
from tests.unit.showing import Ran, Show


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run with a shared prefix, in the folder `run` of the working directory."""
    monkeypatch.chdir(tmp_path)
    return shared_prefix().write(Path("run"))


BLOCKS = """\
Blocks of run
pool                 7 blocks that can be handed out, and the null block 0
KV cache group 0     FullAttentionSpec, 4 tokens
in use               3.6 blocks on average, 6 at most (step 3)
at the end           0 in use, 0 free and cached, 7 free
taken                12 blocks
reused               3 blocks
cached               2 blocks
evicted              1 block
prefix cache resets  1
free blocks          as the engine counted them, in 5 steps

Blocks of the pool by step
7 ···░·
6 ···▓·
5 ···▓·
4 ·▓·▓·
3 ·▓▓▓▓
2 ▓█▓▓▓
1 ▓█▓▓▓
  step 0 step 4
· free   ░ free, cached   ▓ in use   █ in use by several

Each block by step
1 ▓█▓░▓
2 ▓█▓▓·
3 ·▓·▓▓
4 ·▓▓▓▓
5 ···▓·
6 ···▓·
7 ···▓·
  step 0 step 4
· free   ░ free, cached   ▓ in use   █ in use by several

Owners, by step
blocks  taken by  steps   reused by        cached  freed  evicted
1       #0        0 .. 1  #1 1 .. 2, #3 4  0       4      4 by a reset
2       #0        0 .. 1  #1 1 .. 2        0       2      3 for #2
3       #0        1       -                -       1      -
4       #1        1 .. 2  -                -       2      -
2 .. 7  #2        3       -                -       3      -
3, 4    #3        4       -                -       4      -
""".splitlines()

BLOCK_2 = """\
Block 2
engine          host.1.0
KV cache group  0, FullAttentionSpec, 4 tokens
at the end      free
taken           twice
hit             once
evicted         once

Life
step  what happened
   0  #0 takes it
   0  #0 caches it as its block 1: hash a1
   1  #1 finds it in the cache, as its block 1; #0 holds it too
   1  #0 finishes; #1 holds it
   2  #1 finishes
   2  is free, and can be hit
   3  is evicted for #2: it loses hash a1, cached by #0
   3  #2 takes it
   3  #2 finishes
   3  is free
""".splitlines()


# -- all blocks -------------------------------------------------------------------------------


def test_who_owned_which_block_when(show: Show, run: Path) -> None:
    ran = show(run, "--blocks")

    assert ran.lines == BLOCKS
    assert (ran.code, ran.err) == (0, "next: omnicache show run --block 2\n")


def test_blocks_as_json(show: Show, run: Path) -> None:
    (engine,) = show(run, "--blocks", "--format", "json").json["engines"]

    assert {name: engine[name] for name in engine if name not in ("occupancy", "uses")} == {
        "engine": "host.1.0",
        "num_gpu_blocks": 8,
        "usable_blocks": 7,
        "groups": [{"group": 0, "spec": "FullAttentionSpec", "block_size": 4}],
        "num_steps": 5,
        "mean_blocks_in_use": 18 / 5,
        "peak_blocks_in_use": 6,
        "peak_step": 3,
        "at_the_end": {"free": 7, "cached": 0, "in_use": 0, "shared": 0},
        "taken_blocks": 12,
        "hit_blocks": 3,
        "cached_blocks": 2,
        "freed_blocks": 13,
        "evicted_blocks": 1,
        "prefix_cache_resets": 1,
        "steps_that_disagree": 0,
        "disagreements": [],
        "records_lost_before": None,
        "num_uses": 12,
    }
    assert engine["uses"][1] == {
        "block": 2,
        "group": 0,
        "taken_step": 0,
        "taken_by": 0,
        "holders": [
            {"request": 0, "first_step": 0, "last_step": 1},
            {"request": 1, "first_step": 1, "last_step": 2},
        ],
        "num_holders": 2,
        "num_hits": 1,
        "cached_step": 0,
        "cached_by": 0,
        "hash": "a1",
        "freed_step": 2,
        "evicted_step": 3,
        "evicted_for": 2,
        "reset_step": None,
    }
    occupancy = engine["occupancy"]
    assert (occupancy["steps_per_column"], occupancy["blocks_per_row"]) == (1, 1)
    assert occupancy["rows"][6] == {"first_block": 7, "last_block": 7}
    assert [
        tuple(column[name] for name in ("first_step", "last_step", "free", "cached", "in_use"))
        for column in occupancy["columns"]
    ] == [(0, 0, 5, 0, 2), (1, 1, 3, 0, 2), (2, 2, 4, 0, 3), (3, 3, 0, 1, 6), (4, 4, 4, 0, 3)]
    assert [column["shared"] for column in occupancy["columns"]] == [0, 2, 0, 0, 0]
    assert [column["peak_in_use"] for column in occupancy["columns"]] == [2, 4, 3, 6, 3]
    assert occupancy["columns"][3]["rows"][0] == {"cached": 1, "in_use": 0, "shared": 0}


def test_a_terminal_without_unicode_gets_a_picture_in_ascii(run: Path) -> None:
    command = [sys.executable, "-m", "omnicache_cli.cli", "show", "run", "--blocks", "--quiet"]
    ran = subprocess.run(
        command,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )

    lines = ran.stdout.decode("ascii").splitlines()
    assert lines[lines.index("Each block by step") + 1 :][:9] == [
        "1 %#%:%",
        "2 %#%%.",
        "3 .%.%%",
        "4 .%%%%",
        "5 ...%.",
        "6 ...%.",
        "7 ...%.",
        "  step 0 step 4",
        ". free   : free, cached   % in use   # in use by several",
    ]


def test_events_that_contradict_the_engine_are_said(show: Show, run: Path) -> None:
    recording = shared_prefix()
    recording.change(SchedulerStep, 2, num_free_blocks=6)
    recording.change(SchedulerStep, 3, num_free_blocks=0)
    recording.write(run)

    assert [line for line in show(run, "--blocks").lines if "differ" in line] == [
        "free blocks          events and engine differ in 2 of 5 steps: step 2: 4 by the events, 6 "
        "by the",
    ]
    (engine,) = show(run, "--blocks", "--format", "json").json["engines"]
    assert (engine["steps_that_disagree"], engine["disagreements"]) == (
        2,
        [
            {"step": 2, "by_events": 4, "num_free_blocks": 6},
            {"step": 3, "by_events": 1, "num_free_blocks": 0},
        ],
    )


def test_lost_records_are_named_where_the_counts_part(show: Show, run: Path) -> None:
    recording = shared_prefix()
    place = next(
        index
        for index, one in enumerate(recording.records)
        if isinstance(one, SchedulerStep) and one.step == 3
    )
    # The record that freed b's blocks is lost: until they are taken again they look held.
    recording.records[place - 2 : place - 1] = [Gap(1)]
    recording.write(run)

    text = " ".join(show(run, "--blocks").out.split())
    assert (
        "events and engine differ in 1 of 5 steps (records were lost before step 3): "
        "step 3: 0 by the events, 1 by the engine" in text
    )
    (engine,) = show(run, "--blocks", "--format", "json").json["engines"]
    assert engine["records_lost_before"] == 3


def test_each_group_is_named(show: Show, tmp_path: Path) -> None:
    recording = PoolRecording(
        [cache_group(block_size=4), cache_group(block_size=4, spec="SlidingWindowSpec")]
    )
    a = recording.arrive("a", 8, block_hashes=["a0", "a1"])
    recording.step({a: 8}, admit={a: Admit([[1, 2], [0, 3]])})
    recording.caches(0, a, [1, 2])
    recording.after(Freed(a, [3, 1]))  # behind the window
    recording.step({a: 1}, grow={a: [[4], [3]]})

    ran = show(recording.write(tmp_path / "run"), "--blocks")

    assert ran.lines[2:4] == [
        "KV cache group 0  FullAttentionSpec, 4 tokens",
        "KV cache group 1  SlidingWindowSpec, 4 tokens",
    ]
    assert ran.lines[ran.lines.index("Owners, by step") + 1 :] == [
        "blocks  group  taken by  steps  reused by  cached  freed  evicted",
        "1, 2        0  #0        0 ..   -          0       -      -",
        "3           1  #0        0      -          -       0      -",
        "3           1  #0        1 ..   -          -       -      -",
        "4           0  #0        1 ..   -          -       -      -",
    ]
    assert "free blocks       as the engine counted them, in 2 steps" in ran.lines


def test_each_engine_has_its_blocks(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("host.1", "host.2"):
        recording = PoolRecording(engine=f"{name}.0")
        number = recording.arrive("a", 4)
        recording.step({number: 4}, admit={number: Admit([[1]])})
        recording.write(Path("run"), name=name)

    ran = show("run", "--blocks")
    assert [line for line in ran.lines if line.startswith("Engine")] == [
        "Engine 0, host.1.0",
        "Engine 1, host.2.0",
    ]
    assert ran.err == "next: omnicache show run --block 1 --engine 0\n"
    one = show("run", "--blocks", "--engine", 1, "--format", "json").json
    assert [engine["engine"] for engine in one["engines"]] == ["host.2.0"]
    assert show("run", "--block", 1) == Ran(
        3,
        "",
        "omnicache: 2 engines have a block 1; pass --engine: 0 (host.1.0), 1 (host.2.0)\n",
    )
    assert "engine          host.2.0" in show("run", "--block", 1, "--engine", 1).lines


def test_a_block_of_many_readers_counts_those_that_it_does_not_list(
    show: Show, tmp_path: Path
) -> None:
    recording = PoolRecording(num_blocks=64)
    a = recording.arrive("a", 8, block_hashes=["a0", "a1"])
    recording.step({a: 8}, admit={a: Admit([[1, 2]])})
    recording.caches(0, a, [1, 2])
    for reader in range(20):
        number = recording.arrive(f"b{reader}", 9)
        table = [1, 2, 3 + reader]
        recording.step({number: 1}, admit={number: Admit([table], hit=8)})
    recording.write(tmp_path / "run")

    lines = show(tmp_path / "run", "--blocks").lines
    assert "1, 2    #0        0 ..   #1 1 .., #2 2 .., 18 more  0       -      -" in lines
    (engine,) = show(tmp_path / "run", "--blocks", "--format", "json").json["engines"]
    first = engine["uses"][0]
    assert (first["num_holders"], first["num_hits"], len(first["holders"])) == (21, 20, 8)


def test_a_block_given_back_behind_a_window_is_held_by_the_other_alone(
    show: Show, tmp_path: Path
) -> None:
    recording = PoolRecording()
    a = recording.arrive("a", 12, block_hashes=["a0", "a1", "a2"])
    recording.step({a: 12}, admit={a: Admit([[1, 2, 3]])})
    recording.caches(0, a, [1, 2, 3])
    b = recording.arrive("b", 9, block_hashes=["a0", "a1"])
    recording.step({b: 1}, admit={b: Admit([[1, 2, 4]], hit=8)})
    recording.after(Freed(a, [], [1, 1]))
    recording.ends(a, 3)
    recording.write(tmp_path / "run")

    (engine,) = show(tmp_path / "run", "--blocks", "--format", "json").json["engines"]
    first = next(one for one in engine["uses"] if one["block"] == 1)
    assert [(one["request"], one["first_step"], one["last_step"]) for one in first["holders"]] == [
        (a, 0, 1),
        (b, 1, None),
    ]
    assert engine["disagreements"] == []
    life = show(tmp_path / "run", "--block", 1).lines
    assert any("#0 gives it back; #1 holds it" in line for line in life)


def test_long_lists_are_cut_in_words(
    show: Show, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_view, "TEXT_ROWS", 2)
    monkeypatch.setattr(blocks_view, "JSON_USES", 3)

    assert show(run, "--blocks").lines[-5:] == [
        "2       #0        0 .. 1  #1 1 .. 2  0       2      3 for #2",
        "3       #0        1       -          -       1      -",
        "",
        "… and 1 more row; --block N or --format json",
        "of 12 uses the 3 that ended first were kept",
    ]


def test_a_run_without_a_step_has_no_blocks(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    recording.arrive("a", 4)

    ran = show(recording.write(tmp_path / "run"), "--blocks")

    assert ran.lines[-1] == "no step was recorded"
    assert (ran.code, ran.err) == (0, "")


def test_a_block_that_the_pool_does_not_have_is_a_damaged_trace(show: Show, run: Path) -> None:
    recording = shared_prefix()
    recording.after(Freed(0, [8, 1]))
    recording.write(run)

    ran = show(run, "--blocks")

    assert (ran.code, ran.out) == (3, "")
    assert ran.err == (
        "omnicache: engine host.1.0 has a pool of 8 blocks, and block 8 was taken or freed; the "
        "trace is damaged, record it again\n"
    )


# -- one block --------------------------------------------------------------------------------


def test_the_life_of_a_block(show: Show, run: Path) -> None:
    ran = show(run, "--block", 2)

    assert ran.lines == BLOCK_2
    assert (ran.code, ran.err) == (0, "next: omnicache show run --step 0\n")


def test_the_life_of_a_block_as_json(show: Show, run: Path) -> None:
    result = show(run, "--block", 1, "--format", "json").json

    assert {name: result[name] for name in result if name.startswith("times_")} == {
        "times_taken": 1,
        "times_hit": 2,
        "times_cached": 1,
        "times_evicted": 0,
    }
    assert (result["block"], result["group"], result["at_the_end"]) == (1, 0, "free")
    assert [(one["step"], one["what"]) for one in result["life"]] == [
        (0, "take"),
        (0, "cache"),
        (1, "hit"),
        (1, "let_go"),
        (2, "let_go"),
        (2, "free"),
        (4, "hit"),
        (4, "let_go"),
        (4, "free"),
        (4, "reset"),
    ]
    assert result["life"][1] == {
        "step": 0,
        "what": "cache",
        "words": "#0 caches it as its block 0: hash a0",
        "request": 0,
        "hash": "a0",
    }


def test_a_block_of_a_live_request_names_it(show: Show, tmp_path: Path) -> None:
    recording = PoolRecording()
    a = recording.arrive("a", 4)
    recording.step({a: 4}, admit={a: Admit([[1]])})
    recording.write(tmp_path / "run")

    assert "at the end      in use by #0" in show(tmp_path / "run", "--block", 1).lines
    untouched = show(tmp_path / "run", "--block", 7).lines
    assert untouched[2:] == [
        "at the end  free",
        "taken       never",
        "hit         never",
        "evicted     never",
        "",
        "Life",
        "step  what happened",
        "(none)",
    ]


def test_rarer_events_of_a_block(show: Show, tmp_path: Path) -> None:
    recording = PoolRecording()
    a = recording.arrive("a", 7, block_hashes=["a0"])
    partial = CachedPartial(a, 0, 2, 6)
    recording.step({a: 7}, admit={a: Admit([[1, 2]])})
    recording.change(
        SchedulerStep,
        0,
        events=[Allocated(a, [1, 2]), partial, Allocated(NO_REQUEST, [3, 1]), HashesMoved(2, 3)],
        num_free_blocks=4,
    )
    recording.after(Preempted(a), Freed(a, [2, -2]), Freed(NO_REQUEST, [3, 1]))
    recording.write(tmp_path / "run")

    def life(block: int) -> list[str]:
        lines = show(tmp_path / "run", "--block", block).lines
        return lines[lines.index("Life") + 2 :]

    assert life(2) == [
        "   0  #0 takes it",
        "   0  #0 caches it for a prefix of 6 tokens",
        "   0  its content is cached in block 3 from now on",
        "   0  #0 is preempted",
        "   0  is free",
    ]
    assert life(3) == [
        "   0  nobody takes it",
        "   0  is cached in place of block 2",
        "   0  is free, and can be hit",
    ]
    assert show(tmp_path / "run", "--blocks").lines[-3:] == [
        "blocks  taken by  steps  reused by  cached   freed  evicted",
        "1, 2    #0        0      -          -        0      -",
        "3       nobody    -      -          0 by #0  0      -",
    ]


def test_what_is_no_block_is_refused(show: Show, run: Path) -> None:
    assert show(run, "--block", 0) == Ran(
        3,
        "",
        "omnicache: block 0 is the null block: it fills gaps in block tables and is never handed "
        "out; name another block\n",
    )
    assert show(run, "--block", 8) == Ran(
        3, "", "omnicache: run has no block 8; its blocks go from 1 to 7\n"
    )
    assert show(run, "--block", -1).code == 3


def test_a_long_life_is_cut_in_words(
    show: Show, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_view, "TEXT_ROWS", 8)
    monkeypatch.setattr(block_view, "JSON_ROWS", 9)

    assert show(run, "--block", 2).lines[-3:] == [
        "   3  #2 takes it",
        "",
        "… and 2 more events; --format json",
    ]
    result = show(run, "--block", 2, "--format", "json").json
    assert (result["num_events"], len(result["life"])) == (10, 9)


def test_the_views_of_the_pool_exclude_each_other(show: Show, run: Path) -> None:
    assert show(run, "--blocks", "--block", 2) == Ran(
        2, "", "omnicache: --blocks and --block cannot be combined; give one of them\n"
    )
    assert show(run, "--requests", "--evictions", "--blocks") == Ran(
        2,
        "",
        "omnicache: --requests and --blocks and --evictions cannot be combined; give one of them\n",
    )
