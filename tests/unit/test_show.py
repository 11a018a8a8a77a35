"""`omnicache show`: whole outputs, as a user sees them."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from omnicache_cli.trace.records import (
    Allocated,
    BatchDescriptor,
    CacheGroup,
    CacheReset,
    EngineSource,
    Evicted,
    ForwardStep,
    Freed,
    MultiModalSpan,
    RankStep,
    SchedulerStep,
    WorkerSource,
)
from omnicache_cli.trace.views import steps as steps_view
from omnicache_cli.trace.views.words import runs_text
from tests.unit.run_builder import Admit, Recording, cache_group, two_rounds, write_manifest
from tests.unit.showing import Ran, Show


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The two-round run, in the folder `run` of the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = two_rounds().write(Path("run"))
    write_manifest(folder)
    return folder


def test_a_block_table_that_was_not_read_says_so_everywhere(show: Show, tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change_group(0, block_table=None)
    run = recording.write(tmp_path / "run")
    write_manifest(run)

    assert "block_table        not read" in show(run, "--step", 0, "--quiet").lines
    (forward,) = show(run, "--step", 0, "--format", "json").json["forwards"]
    assert forward["groups"][0]["block_table"] is None
    first = next(line for line in show(run, "--rounds").lines if "first, step 0" in line)
    assert first.endswith("not read")
    shares = [
        one["first_forward"]["groups"][0]
        for one in show(run, "--rounds", "--format", "json").json["rounds"]
    ]
    assert [one["block_table"] for one in shares] == [None, [1, 2, 4]]
    assert [one["new_blocks"] for one in shares] == [None, [4]]


def busy() -> Recording:
    """Two requests in a batch, an eviction, a preemption, a resumption, a reset."""
    recording = Recording([cache_group(block_size=4)], num_blocks=8)
    a, b = recording.arrive("a", 8), recording.arrive("b", 6)
    recording.step({a: 8, b: 6}, admit={a: Admit([[1, 2]]), b: Admit([[3, 4]])})
    events = (*recording.preempt(b), Evicted(3, 0, "00000000000000aa", b, a))
    recording.step({a: 1}, events=events, grow={a: [[3]]})
    recording.finish(a, 2)
    recording.step({b: 7}, admit={b: Admit([[4, 5]], resumed=True)})
    recording.finish(b, 2)
    recording.after(CacheReset(True))
    return recording


def resumed_with_a_hit() -> Recording:
    """A request of 20 tokens is preempted for another one, and hits its own block afterwards."""
    recording = Recording()
    number = recording.arrive("a", 20)
    other = recording.arrive("b", 4)
    recording.step({number: 20}, admit={number: Admit([[1, 2]])})
    recording.step({other: 4}, admit={other: Admit([[3]])}, events=recording.preempt(number))
    recording.step({number: 5}, admit={number: Admit([[1, 2]], hit=16, resumed=True)})
    return recording


# -- steps ------------------------------------------------------------------------------------

STEPS = """\
Steps of run
model    tiny
steps    5
pool     64 blocks of 16 tokens, 1 KV cache group, prefix caching on
columns  adm, res, pre, fin: requests admitted, resumed, preempted, finished; new .. freed: blocks

Tokens, free blocks, times in ms
step reqs tokens prefill hit free sched prep fwd samp adm res pre fin new cached evict freed
   0    1     40      40   0   40   0.1  0.5   2  0.3   1   0   0   0   3      0     0     0
   1    1      1       0   -   39   0.1  0.5   2  0.3   0   0   0   0   0      0     0     0
   2    1      1       0   -   38   0.1  0.5   2  0.3   0   0   0   1   0      0     0     3
   3    1      8       8  32   37   0.1  0.5   2  0.3   1   0   0   0   1      0     0     0
   4    1      1       0   -   36   0.1  0.5   2  0.3   0   0   0   1   0      0     0     3
""".splitlines()

BUSY_STEPS = """\
step reqs tokens prefill hit free sched prep fwd samp adm res pre fin new cached evict freed
   0    2     14      14   0    7   0.1  0.5   2  0.3   2   0   0   0   4      0     0     0
   1    1      1       0   -    7   0.1  0.5   2  0.3   0   0   1   1   1      0     1     5
   2    1      7       7   -    7   0.1  0.5   2  0.3   0   1   0   1   2      0     0     2
""".splitlines()

LARGE_STEPS = """\
  step reqs tokens prefill   hit   free sched prep  fwd samp adm res pre fin  new cached evict freed
123456    1  99072   99072 32000 999999  12.3  0.5 1230  0.1   1   0   0   1 6192      0     0  8192
""".splitlines()


def test_the_steps_are_listed_one_a_line(show: Show, rounds: Path) -> None:
    ran = show(rounds)

    assert ran.lines == STEPS
    assert (ran.code, ran.err) == (0, "next: omnicache show run --step 0\n")


def test_the_steps_as_json(show: Show, rounds: Path) -> None:
    result = show(rounds, "--format", "json", "--quiet").json

    assert (result["command"], result["num_steps"]) == ("show", 5)
    assert result["steps"][3] == {
        "engine": "host.1.0",
        "step": 3,
        "num_requests": 1,
        "num_scheduled_tokens": 8,
        "num_prefill_tokens": 8,
        "num_decode_tokens": 0,
        "num_admitted": 1,
        "num_resumed": 0,
        "hit_tokens": 32,
        "resumed_hit_tokens": None,
        "allocated_blocks": 1,
        "cached_blocks": 0,
        "evicted_blocks": 0,
        "freed_blocks": 0,
        "num_preempted": 0,
        "num_finished": 0,
        "num_free_blocks": 37,
        "schedule_ns": 100_000,
        "lookup_ns": None,
        "allocate_ns": None,
        "output_ns": None,
        "prepare_ns": 500_000,
        "forward_ns": 2_000_000,
        "sample_ns": 300_000,
        "save_ns": None,
        "restore_ns": None,
        "copy_ns": None,
    }


def test_a_busy_run_keeps_one_line_per_step(show: Show, tmp_path: Path) -> None:
    ran = show(busy().write(tmp_path / "run"), "--quiet")

    assert ran.lines[-4:] == BUSY_STEPS
    assert ran.err == ""


def test_resumed_requests_and_their_hits_are_counted_apart(show: Show, tmp_path: Path) -> None:
    ran = show(resumed_with_a_hit().write(tmp_path / "run"), "--format", "json", "--quiet")

    names = ("num_admitted", "num_resumed", "hit_tokens", "resumed_hit_tokens")
    assert [tuple(one[name] for name in names) for one in ran.json["steps"]] == [
        (1, 0, 0, None),
        (1, 0, 0, None),
        (0, 1, None, 16),
    ]


def test_a_large_run_keeps_one_line_per_step_within_100_columns(show: Show, tmp_path: Path) -> None:
    recording = Recording(num_blocks=1 << 20)
    recording.next_step = 123_456
    number = recording.arrive("a", 131_072)
    recording.step({number: 99_072}, admit={number: Admit([list(range(1, 8193))], hit=32_000)})
    recording.finish(number)
    recording.change(
        SchedulerStep, 123_456, schedule_ns=12_345_678, num_free_blocks=999_999, num_waiting=5
    )
    recording.change(ForwardStep, 123_456, forward_ns=1_234_567_890, sample_ns=99_900)

    ran = show(recording.write(tmp_path / "run"), "--quiet")

    assert ran.lines[-2:] == LARGE_STEPS
    assert len(ran.lines[-1]) <= 100


def test_a_step_without_a_worker_record_has_no_times(show: Show, rounds: Path) -> None:
    recording = two_rounds()
    recording.drop(ForwardStep, 1)
    recording.write(rounds)

    assert show(rounds).lines[-4] == STEPS[-4].replace("0.5   2  0.3", "  -   -    -")


def test_a_long_run_is_cut_in_words(
    show: Show, rounds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_view, "TEXT_ROWS", 2)

    assert show(rounds).lines[-3:] == [
        STEPS[-4],
        "",
        "… and 3 more steps; --step N or --format json for all",
    ]
    assert len(show(rounds, "--format", "json").json["steps"]) == 5


def test_a_run_without_a_step_says_so(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    recording.arrive("a", 4)

    ran = show(recording.write(tmp_path / "run"))

    assert ran.lines[-1] == "no step was recorded"
    assert (ran.code, ran.err) == (0, "")


# -- one step ---------------------------------------------------------------------------------


def test_a_step_as_vllm_sees_it(show: Show, rounds: Path) -> None:
    ran = show(rounds, "--step", 3)

    assert ran.lines == [
        "Step 3 of engine host.1.0",
        "",
        "Scheduler",
        "requests                    1",
        "total_num_scheduled_tokens  8",
        "running, waiting            1, 0",
        "free blocks                 37",
        "num_common_prefix_blocks    0",
        "schedule                    0.1 ms",
        "",
        "Requests",
        "request  external id  computed  scheduled  hit  blocks",
        "#1       p0-r2              32          8   32  1, 2, 4",
        "",
        "Forward pass of rank 0 on cpu",
        "num_reqs          1",
        "rows              #1 p0-r2",
        "batch_descriptor  -",
        "cudagraph_mode    NONE",
        "prepare           0.5 ms",
        "forward           2.0 ms",
        "sample            0.3 ms",
        "",
        "KV cache group 0: FullAttentionSpec, block size 16, CPUAttentionMetadata",
        "num_actual_tokens  8",
        "max_query_len      8",
        "query_start_loc    0, 8",
        "max_seq_len        40",
        "seq_lens           40",
        "slot_mapping       64 .. 71",
        "block_table[0] #1  1, 2, 4",
        "block_table.shape  1, 64",
        "causal             yes",
        "use_cascade        -",
        "common_prefix_len  -",
        "",
        "Events while it was scheduled",
        "#1 takes block 4",
        "",
        "Events after it",
        "(none)",
    ]
    assert ran.err == 'next: omnicache show run --request "#1"\n'


def test_a_padded_step_shows_its_padding(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("a", 997)
    table = [*range(1, 63), 64]
    recording.step(
        {number: 5},
        admit={number: Admit([table], hit=992)},
        padding=3,
        descriptor=BatchDescriptor(8, 1, uniform=True),
        cudagraph_mode="FULL",
    )
    recording.write(tmp_path / "run")

    ran = show(tmp_path / "run", "--step", 0, "--quiet")

    assert "slot_mapping       1024 .. 1028, then -1 x 3" in ran.lines
    assert "block_table[0] #0  1 .. 62, 64" in ran.lines
    assert "batch_descriptor  num_tokens 8, num_reqs 1, uniform" in ran.lines
    data = show(tmp_path / "run", "--step", 0, "--format", "json").json
    (group,) = data["forwards"][0]["groups"]
    assert group["slot_mapping"] == [1024, 1025, 1026, 1027, 1028, -1, -1, -1]
    assert group["block_table"] == [table]
    assert data["forwards"][0]["batch_descriptor"]["num_tokens"] == 8


def test_each_batch_row_names_its_request(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    names = ("p1", "p2", "chat-completion-of-a-client")
    a, b, c = (recording.arrive(name, 20) for name in names)
    admit = {number: Admit([[2 * number + 1, 2 * number + 2]]) for number in (a, b, c)}
    recording.step({a: 20, b: 20, c: 20}, admit=admit, rows=[c, a, b])
    recording.write(tmp_path / "run")

    lines = show(tmp_path / "run", "--step", 0, "--quiet").lines

    assert lines[lines.index("Requests") :][:17] == [
        "Requests",
        "request  external id                  computed  scheduled  hit  blocks",
        "#0       p1                                  0         20    0  1, 2",
        "#1       p2                                  0         20    0  3, 4",
        "#2       chat-completion-of-a-client         0         20    0  5, 6",
        "",
        "Forward pass of rank 0 on cpu",
        "num_reqs          3",
        "rows              #2, #0 p1, #1 p2",
        "batch_descriptor  -",
        "cudagraph_mode    NONE",
        "prepare           0.5 ms",
        "forward           2.0 ms",
        "sample            0.3 ms",
        "",
        "KV cache group 0: FullAttentionSpec, block size 16, CPUAttentionMetadata",
        "num_actual_tokens  60",
    ]
    assert [line for line in lines if line.startswith("block_table[")] == [
        "block_table[0] #2  5, 6",
        "block_table[1] #0  1, 2",
        "block_table[2] #1  3, 4",
    ]
    data = show(tmp_path / "run", "--step", 0, "--format", "json").json
    assert data["forwards"][0]["request_numbers"] == [2, 0, 1]


def test_a_batch_row_that_was_not_scheduled_keeps_its_internal_id(
    show: Show, tmp_path: Path
) -> None:
    recording = two_rounds()
    recording.change(ForwardStep, 3, new_requests=[(1, "stranger")])
    recording.write(tmp_path / "run")

    lines = show(tmp_path / "run", "--step", 3, "--quiet").lines

    assert "rows              stranger (not scheduled)" in lines
    assert "block_table[0]     1, 2, 4" in lines


def test_the_events_of_a_step_are_told_in_words(show: Show, tmp_path: Path) -> None:
    ran = show(busy().write(tmp_path / "run"), "--step", 1, "--quiet")

    assert ran.lines[ran.lines.index("Events while it was scheduled") :] == [
        "Events while it was scheduled",
        "#1 is preempted",
        "#1 frees blocks 4, 3",
        "block 3 of group 0 is evicted (hash 00000000000000aa, cached by #1); #0 takes it",
        "#0 takes block 3",
        "",
        "Events after it",
        "#0 finishes: FINISHED_STOPPED, 2 output tokens",
        "#0 frees blocks 3 .. 1",
    ]
    data = show(tmp_path / "run", "--step", 1, "--format", "json").json
    assert data["events"][1] == {
        "event": "free",
        "request": 1,
        "block_ids": [4, 3],
        "still_held": [],
    }


def test_a_running_request_that_moves_on_leaves_null_blocks_and_says_who_keeps_the_rest(
    show: Show, tmp_path: Path
) -> None:
    recording = Recording([cache_group(spec="SlidingWindowSpec", sliding_window=16)])
    a, b = recording.arrive("a", 60), recording.arrive("b", 60)
    recording.step({a: 60}, admit={a: Admit([[1, 2, 3, 4]])})
    recording.step({a: 1, b: 12}, admit={b: Admit([[0, 2, 3, 5]], hit=48)})
    recording.step({a: 1, b: 1}, events=[Freed(a, [1, 1], [2, 2]), Freed(b, [], [2, 1])])

    ran = show(recording.write(tmp_path / "run"), "--step", 2, "--quiet")

    assert [line for line in ran.lines if line.startswith("#")] == [
        "#0       a                  61          1  -    0 x 3, 4",
        "#1       b                  60          1  -    0, 0, 3, 5",
        "#0 frees block 1; lets go of blocks 2, 3, which others hold",
        "#1 lets go of block 2, which others hold",
    ]
    assert [line for line in ran.lines if line.startswith("block_table[")] == [
        "block_table[0] #0  1 .. 4",
        "block_table[1] #1  0, 2, 3, 5",
    ]
    life = show(tmp_path / "run", "--request", "a", "--format", "json").json["life"]
    (free,) = [one for one in life if one["what"] == "free"]
    assert (free["block_ids"], free["still_held"]) == ([1], [2, 3])


def test_a_streaming_session_goes_on_without_a_lookup_and_without_a_connector(
    show: Show, tmp_path: Path
) -> None:
    recording = Recording()
    number = recording.arrive("chat", 20)
    recording.step({number: 20}, admit={number: Admit([[1, 2]])})
    recording.step({number: 1})
    part = Admit([[1, 2, 3]], session_prompt_tokens=40)
    recording.step({number: 19}, admit={number: part})
    recording.step({number: 1})
    recording.finish(number, 1)
    recording.write(tmp_path / "run")

    life = show(tmp_path / "run", "--request", "chat", "--quiet").lines
    assert life[life.index("Life") :] == [
        "Life",
        "step  what happened",
        "0     arrives: 20 prompt tokens, max_tokens 16",
        "0     starts to run: hit 0 of 20 tokens",
        "0     takes blocks 1, 2",
        "0     computes 20 tokens, positions 0 .. 19",
        "1     decodes 1 token, position 20",
        "2     goes on with the next part of its prompt, 40 tokens by now",
        "2     takes block 3",
        "2     computes 19 tokens, positions 21 .. 39",
        "3     decodes 1 token, position 40",
        "3     finishes: FINISHED_STOPPED, 1 output token",
        "3     frees blocks 3 .. 1",
    ]
    steps = show(tmp_path / "run", "--format", "json").json["steps"]
    assert [one["num_admitted"] for one in steps] == [1, 0, 0, 0]
    assert [one["hit_tokens"] for one in steps] == [0, None, None, None]
    assert [one["num_prefill_tokens"] for one in steps] == [20, 0, 19, 0]
    totals = show(tmp_path / "run", "--summary", "--format", "json").json
    assert (totals["queried_tokens"], totals["external_tokens"]) == (20, 0)
    check = show(tmp_path / "run", "--check", "--format", "json").json
    assert (check["broken"], [one["not_checked"] for one in check["invariants"]]) == (0, [{}] * 8)


def test_each_group_and_rank_is_shown(show: Show, tmp_path: Path) -> None:
    recording = Recording([cache_group(), cache_group(spec="MambaSpec", maps_slots=False)], ranks=2)
    number = recording.arrive("a", 20)
    recording.step({number: 20}, admit={number: Admit([[1, 2], [3, 4]])})

    ran = show(recording.write(tmp_path / "run"), "--step", 0, "--quiet")

    assert [line for line in ran.lines if "roup" in line or "rank" in line] == [
        "request  external id  computed  scheduled  hit  group  blocks",
        "Forward pass of rank 0 on cpu",
        "Rank 0, KV cache group 0: FullAttentionSpec, block size 16, CPUAttentionMetadata",
        "Rank 0, KV cache group 1: MambaSpec, block size 16, CPUAttentionMetadata",
        "slot_mapping       the group maps no tokens to slots",
        "Forward pass of rank 1 on cpu",
        "Rank 1, KV cache group 0: FullAttentionSpec, block size 16, CPUAttentionMetadata",
        "Rank 1, KV cache group 1: MambaSpec, block size 16, CPUAttentionMetadata",
        "slot_mapping       the group maps no tokens to slots",
    ]


def test_a_step_that_is_not_there(show: Show, rounds: Path) -> None:
    ran = show(rounds, "--step", 5)

    assert (ran.code, ran.out) == (3, "")
    assert ran.err == "omnicache: run has no step 5; its steps go up to 4\n"


# -- one request ------------------------------------------------------------------------------


def test_the_life_of_a_request(show: Show, rounds: Path) -> None:
    ran = show(rounds, "--request", "p0-r1")

    assert ran.lines == [
        "Request #0: p0-r1",
        "engine         host.1.0",
        "internal id    p0-r1-00000000",
        "prompt tokens  40",
        "max_tokens     16",
        "hit tokens     0",
        "preemptions    0",
        "status         FINISHED_STOPPED",
        "output tokens  3",
        "",
        "Life",
        "step    what happened",
        "0       arrives: 40 prompt tokens, max_tokens 16",
        "0       starts to run: hit 0 of 40 tokens",
        "0       takes blocks 1 .. 3",
        "0       computes 40 tokens, positions 0 .. 39",
        "1 .. 2  decodes 2 tokens, positions 40, 41",
        "2       finishes: FINISHED_STOPPED, 3 output tokens",
        "2       frees blocks 3 .. 1",
    ]
    assert ran.err == "next: omnicache show run --step 0\n"


def test_a_preempted_request_resumes(show: Show, tmp_path: Path) -> None:
    ran = show(busy().write(tmp_path / "run"), "--request", "b", "--quiet")

    assert ran.lines[ran.lines.index("step  what happened") + 1 :] == [
        "0     arrives: 6 prompt tokens, max_tokens 16",
        "0     starts to run: hit 0 of 6 tokens",
        "0     takes blocks 3, 4",
        "0     computes 6 tokens, positions 0 .. 5",
        "1     is preempted: #0 needs blocks",
        "1     frees blocks 4, 3",
        "1     block 3 evicted, taken by #0",
        "2     resumes: hit 0 of 6 tokens",
        "2     takes blocks 4, 5",
        "2     computes 7 tokens, positions 0 .. 6",
        "2     finishes: FINISHED_STOPPED, 2 output tokens",
        "2     frees blocks 5, 4",
    ]


@pytest.mark.parametrize(
    ("kv_connector", "words"),
    [
        (False, "is preempted: it needs blocks itself and none is left"),
        (True, "is preempted"),  # the scheduler may have given up
    ],
)
def test_a_request_that_is_the_last_one_has_to_go_itself(
    kv_connector: bool, words: str, show: Show, tmp_path: Path
) -> None:
    recording = Recording(options={"kv_connector": kv_connector})
    a, b = (recording.arrive(name, 16) for name in ("a", "b"))
    recording.step({a: 16, b: 16}, admit={a: Admit([[1]]), b: Admit([[2]])})
    recording.step({a: 1}, grow={a: [[3]]})
    recording.change(SchedulerStep, 1, events=[Allocated(a, [3, 1]), *recording.preempt(b)])
    recording.write(tmp_path / "run")

    ran = show(tmp_path / "run", "--request", "b", "--quiet")

    assert [line for line in ran.lines if "preempted" in line] == [f"1     {words}"]
    life = show(tmp_path / "run", "--request", "b", "--format", "json").json["life"]
    assert life[-2]["preempted_for"] == (None if kv_connector else b)


def test_hits_after_a_preemption_stand_in_the_header(show: Show, tmp_path: Path) -> None:
    run = resumed_with_a_hit().write(tmp_path / "run")

    assert show(run, "--request", "a", "--quiet").lines == [
        "Request #0: a",
        "engine                         host.1.0",
        "internal id                    a-00000000",
        "prompt tokens                  20",
        "max_tokens                     16",
        "hit tokens                     0",
        "preemptions                    1",
        "status                         not finished in this trace",
        "output tokens                  -",
        "hit tokens after a preemption  16",
        "",
        "Life",
        "step  what happened",
        "0     arrives: 20 prompt tokens, max_tokens 16",
        "0     starts to run: hit 0 of 20 tokens",
        "0     takes blocks 1, 2",
        "0     computes 20 tokens, positions 0 .. 19",
        "1     is preempted: #1 needs blocks",
        "1     frees blocks 2, 1",
        "2     resumes: hit 16 of 20 tokens; reuses block 1",
        "2     takes block 2",
        "2     computes 5 tokens, positions 16 .. 20",
    ]


@pytest.mark.parametrize(
    ("num_tokens", "hit", "why"),
    [
        (40, 32, "8 tokens computed: vLLM reuses full blocks of 16 and always computes the last"
        " token"),
        (33, 32, "1 token computed: vLLM reuses full blocks of 16 and always computes the last"
        " token"),
        (48, 32, "16 tokens computed: the last token is always computed, so the last full block "
        "is not reused"),
        (9, 0, "9 tokens computed: the prompt fills no block of 16"),
        (40, 16, None),  # another reason, or nothing like it was cached
        (40, 0, None),
    ],
)  # fmt: skip
def test_what_was_computed_is_explained_where_the_arithmetic_is_that(
    num_tokens: int, hit: int, why: str | None, show: Show, tmp_path: Path
) -> None:
    recording = Recording()
    number = recording.arrive("a", num_tokens)
    blocks = list(range(1, -(-num_tokens // 16) + 1))
    recording.step({number: num_tokens - hit}, admit={number: Admit([blocks], hit=hit)})
    recording.write(tmp_path / "run")

    data = show(tmp_path / "run", "--request", "a", "--format", "json").json
    assert data["why_computed"] == why
    lines = show(tmp_path / "run", "--request", "a", "--quiet").lines
    words = " ".join(lines[lines.index("Life") :])
    assert ("computed: " in words) == (why is not None)
    assert why is None or words.endswith(f"  {why}")


@pytest.mark.parametrize(
    ("groups", "changes", "admit"),
    [
        ([cache_group()], {"enable_prefix_caching": False}, {}),
        ([cache_group(spec="SlidingWindowSpec", sliding_window=16)], {}, {}),
        ([cache_group(), cache_group(spec="MambaSpec", maps_slots=False)], {}, {}),
        ([cache_group()], {"block_size": 32}, {}),
        ([cache_group()], {}, {"external": 4}),
        ([cache_group()], {}, {"resumed": True}),
    ],
)
def test_what_was_computed_is_not_explained_elsewhere(
    groups: list[CacheGroup],
    changes: dict[str, Any],
    admit: dict[str, Any],
    show: Show,
    tmp_path: Path,
) -> None:
    recording = Recording(groups, **changes)
    number = recording.arrive("a", 40)
    tables = [[10 * index + 1, 10 * index + 2, 10 * index + 3] for index in range(len(groups))]
    count = 8 - admit.get("external", 0)
    recording.step({number: count}, admit={number: Admit(tables, hit=32, **admit)})
    recording.write(tmp_path / "run")

    assert show(tmp_path / "run", "--request", "a", "--format", "json").json["why_computed"] is None


def test_chunks_are_told_one_by_one(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("a", 40)
    recording.step({number: 16}, admit={number: Admit([[1]])})
    recording.step({number: 24}, grow={number: [[2, 3]]})

    lines = show(recording.write(tmp_path / "run"), "--request", "a").lines

    assert [line for line in lines if "computes" in line] == [
        "0     computes 16 tokens, positions 0 .. 15; 24 prompt tokens left",
        "1     computes 24 tokens, positions 16 .. 39",
    ]


@pytest.mark.parametrize("name", ["p0-r2", "#1", "1", "p0-r2-00000001"])
def test_a_request_has_three_names(name: str, show: Show, rounds: Path) -> None:
    assert show(rounds, "--request", name).lines[0] == "Request #1: p0-r2"


def test_an_external_id_comes_before_an_arrival_number(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    for name in ("1", "0"):
        number = recording.arrive(name, 4)
        recording.step({number: 4}, admit={number: Admit([[1 + number]])})
    recording.write(tmp_path / "run")

    assert show(tmp_path / "run", "--request", "1").lines[0] == "Request #0: 1"
    assert show(tmp_path / "run", "--request", "#1").lines[0] == "Request #1: 0"


def test_an_unknown_request_names_the_nearest(show: Show, rounds: Path) -> None:
    ran = show(rounds, "--request", "p0_r3")

    assert (ran.code, ran.out) == (3, "")
    assert ran.err == "omnicache: run has no request p0_r3; nearest: p0-r2, p0-r1\n"


def test_an_id_that_was_used_twice_names_the_choices(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    for _ in range(2):
        number = recording.arrive("a", 4)
        recording.step({number: 4}, admit={number: Admit([[1 + number]])})

    ran = show(recording.write(tmp_path / "run"), "--request", "a")

    assert ran.code == 3
    assert "2 requests are called a: #0 of engine host.1.0, #1 of engine host.1.0;" in ran.err


def test_a_request_that_never_ran(show: Show, rounds: Path) -> None:
    recording = two_rounds()
    recording.arrive("late", 4)
    recording.write(rounds)

    ran = show(rounds, "--request", "late")

    assert ran.lines[-2:] == [
        "step  what happened",
        "5     arrives: 4 prompt tokens, max_tokens 16",
    ]
    assert "status         not finished in this trace" in ran.lines
    assert ran.err == ""


# -- rounds -----------------------------------------------------------------------------------


def test_the_rounds_side_by_side(show: Show, rounds: Path) -> None:
    ran = show(rounds, "--rounds")

    assert ran.lines == [
        "2 rounds of 1 prompt",
        "",
        "Prompt 0: 40 tokens",
        "round  pass            num_actual_tokens  seq_lens  hit  slot_mapping  block_table",
        "    1  first, step 0                  40        40    0  16 .. 55      1 .. 3",
        "    1  decode, step 1                  1        41    -  56            1 .. 3",
        "    2  first, step 3                   8        40   32  64 .. 71      1, 2 reused; 4 new",
        "    2  decode, step 4                  1        41    -  72            1, 2 reused; 4 new",
        "",
        "round 2: 8 tokens computed: vLLM reuses full blocks of 16 and always computes the last "
        "token",
    ]
    assert ran.err == "next: omnicache show run --request p0-r2\n"


def test_a_request_in_a_batch_shows_its_share_of_the_tokens(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    first, stranger = recording.arrive("p0-r1", 16), recording.arrive("x", 4)
    admit = {first: Admit([[1, 2]]), stranger: Admit([[3]])}
    recording.step({first: 16, stranger: 4}, admit=admit, rows=[stranger, first])
    recording.step({first: 1, stranger: 1})
    recording.finish(first, 2)
    for number, block in ((2, 4), (3, 5)):
        later = recording.arrive(f"p0-r{number}", 16)
        recording.step({later: 16}, admit={later: Admit([[block]])})
    write_manifest(recording.write(tmp_path / "run"), num_rounds=3)

    ran = show(tmp_path / "run", "--rounds", "-q")

    assert ran.lines == [
        "3 rounds of 1 prompt",
        "",
        "Prompt 0: 16 tokens",
        "round  pass            num_actual_tokens  seq_lens  hit  slot_mapping  block_table",
        "    1  first, step 0   16 of 20                 16    0  16 .. 31      1, 2",
        "    1  decode, step 1  1 of 2                   17    -  32            1, 2",
        "    2  first, step 2   16                       16    0  64 .. 79      4",
        "    3  first, step 3   16                       16    0  80 .. 95      5",
        "",
        "rounds 1 .. 3: 16 tokens computed: the last token is always computed, so the last full "
        "block is not",
        "reused",
    ]


def test_a_tail_block_that_was_taken_again_is_named(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    first = recording.arrive("p0-r1", 40)
    recording.step({first: 40}, admit={first: Admit([[1, 2, 3]])})
    recording.finish(first)
    second = recording.arrive("p0-r2", 40)
    recording.step({second: 8}, admit={second: Admit([[1, 2, 3]], hit=32)})
    write_manifest(recording.write(tmp_path / "run"))

    ran = show(tmp_path / "run", "--rounds")

    assert ran.lines[-1] == (
        "round 2: new block 3 was in the table of the first round too: freed in between and taken "
        "again"
    )


def test_groups_have_a_table_each(show: Show, tmp_path: Path) -> None:
    groups = [
        cache_group(spec="SlidingWindowSpec", sliding_window=16),
        cache_group(spec="MambaSpec", maps_slots=False),
    ]
    recording = Recording(groups)
    first = recording.arrive("p0-r1", 40)
    recording.step({first: 40}, admit={first: Admit([[1, 2, 3], [4, 5, 6]])})
    second = recording.arrive("p0-r2", 40)
    recording.step({second: 8}, admit={second: Admit([[0, 2, 7], [4, 5, 8]], hit=32)})
    write_manifest(recording.write(tmp_path / "run"))

    ran = show(tmp_path / "run", "--rounds", "-q")

    assert ran.lines[2:] == [
        "Prompt 0: 40 tokens, KV cache group 0",
        "round  pass           num_actual_tokens  seq_lens  hit  slot_mapping  block_table",
        "    1  first, step 0                 40        40    0  16 .. 55      1 .. 3",
        "    2  first, step 1                  8        40   32  112 .. 119    0, 2 reused; 7 new",
        "",
        "Prompt 0: 40 tokens, KV cache group 1",
        "round  pass           num_actual_tokens  seq_lens  hit  slot_mapping  block_table",
        "    1  first, step 0                 40        40    0  no slots      4 .. 6",
        "    2  first, step 1                  8        40   32  no slots      4, 5 reused; 8 new",
        "",
        "round 2: block 0 is the null block: what stood there is not needed any more (behind a "
        "sliding",
        "window, or before a state)",
    ]


def test_the_rounds_as_json_have_full_vectors(show: Show, rounds: Path) -> None:
    first, second = show(rounds, "--rounds", "--format", "json").json["rounds"]

    assert first["first_forward"]["groups"][0]["slot_mapping"] == list(range(16, 56))
    assert second["hit_tokens"] == 32
    assert second["first_forward"]["groups"][0] == {
        "group": 0,
        "seq_len": 40,
        "slot_mapping": list(range(64, 72)),
        "block_table": [1, 2, 4],
        "reused_blocks": [1, 2],
        "new_blocks": [4],
    }
    assert second["first_decode"]["step"] == 4


def test_a_run_without_rounds_says_so(show: Show, rounds: Path) -> None:
    write_manifest(rounds, num_rounds=1)
    assert show(rounds, "--rounds") == Ran(
        3, "", "omnicache: run has one round only; record it again with --rounds 2\n"
    )

    no_rounds = Ran(
        3,
        "",
        "omnicache: run has no rounds: only `omnicache trace MODEL --rounds N` makes them; "
        "try: omnicache show run\n",
    )
    write_manifest(rounds, num_rounds=1, layout="command", model=None, program="python")
    assert show(rounds, "--rounds") == no_rounds

    (rounds / "run.json").unlink()
    assert show(rounds, "--rounds") == no_rounds


# -- check ------------------------------------------------------------------------------------


def test_a_sound_run_passes_the_check(show: Show, rounds: Path) -> None:
    ran = show(rounds, "--check")

    assert ran.lines == [
        "Invariants of 5 steps: all hold",
        "no.  invariant                                                  checked                "
        "  broken",
        "  1  slots follow the block table                                     5  rows          "
        "       0",
        "  2  padding is -1, real slots are not, block 0 is not written        5  slot mappings "
        "       0",
        "  3  a written block has one owner                                    5  rows          "
        "       0",
        "  4  batch shape agrees with the scheduler                            5  forward passes"
        "       0",
        "  5  a common prefix is common to all rows                            0  forward passes"
        "       0",
        "  6  hit blocks were written before                                   2  hit blocks    "
        "       0",
        "  7  a hit is as long as every group allows                           2  admissions    "
        "       0",
        " 12  the worker's block table is the scheduler's                      5  rows          "
        "       0",
    ]
    assert (ran.code, ran.err) == (0, "next: omnicache show run --summary\n")


def test_the_agreement_of_ranks_is_listed_only_for_several(show: Show, rounds: Path) -> None:
    def listed() -> list[int]:
        data = show(rounds, "--check", "--format", "json").json
        return [one["invariant"] for one in data["invariants"]]

    assert listed() == [1, 2, 3, 4, 5, 6, 7, 12]

    recording = two_rounds()
    engine, worker = recording.records[:2]
    assert isinstance(engine, EngineSource)
    assert isinstance(worker, WorkerSource)
    second = replace(worker, source=2, rank=1, tp_rank=1)
    recording.records[:2] = [replace(engine, parallel={"world_size": 2}), worker, second]
    recording.records.append(RankStep(2, 0, 0, 1, 2, 3, "00" * 8))
    recording.write(rounds)
    assert listed() == [1, 2, 3, 4, 5, 6, 7, 11, 12]


def test_a_broken_run_fails_the_check(show: Show, rounds: Path) -> None:
    recording = two_rounds()
    recording.change_group(1, slot_mapping=[57, 1], table_shape=(2, 64))
    recording.write(rounds)

    ran = show(rounds, "--check")

    assert ran.lines[0] == "Invariants of 5 steps: 2 broken"
    assert ran.lines[ran.lines.index("Broken") :] == [
        "Broken",
        "4: batch shape agrees with the scheduler: step 1, rank 0, group 0",
        "   rows of block_table",
        "   expected 1 rows (num_reqs)",
        "   found    2",
        "1: slots follow the block table: step 1, rank 0, group 0, request p0-r1, row 0",
        "   slot_mapping[0], position 40",
        "   expected 56 = block_table[2] 3 x 16 + 8",
        "   found    57",
    ]
    assert (ran.code, ran.err) == (1, "next: omnicache show run --step 1\n")
    data = show(rounds, "--check", "--format", "json").json
    assert (data["broken"], data["listed"]) == (2, 2)
    assert data["violations"][1] == {
        "invariant": 1,
        "name": "slots follow the block table",
        "engine": "host.1.0",
        "step": 1,
        "rank": 0,
        "group": 0,
        "request": "p0-r1",
        "row": 0,
        "what": "slot_mapping[0], position 40",
        "expected": "56 = block_table[2] 3 x 16 + 8",
        "found": "57",
    }


def test_many_violations_are_cut_in_words(show: Show, tmp_path: Path) -> None:
    recording = Recording([cache_group(block_size=4)])
    number = recording.arrive("a", 1)
    recording.step({number: 1}, admit={number: Admit([list(range(1, 20))])})
    for _ in range(25):
        recording.step({number: 1})
        recording.change_group(recording.next_step - 1, table_shape=(2, 64))

    ran = show(recording.write(tmp_path / "run"), "--check")

    assert ran.lines[-1] == "… and 5 more; --format json for all"
    assert sum(line.startswith("4: batch shape") for line in ran.lines) == 20


def test_what_was_not_checked_is_said(show: Show, rounds: Path) -> None:
    recording = two_rounds()
    recording.drop(ForwardStep, 2)
    recording.write(rounds, is_finished=False)

    ran = show(rounds, "--check")

    assert ran.lines[ran.lines.index("Not checked") :] == [
        "Not checked",
        "1: 1 rows: no worker record",
        "2: 1 slot mappings: no worker record",
        "3: 1 rows: no worker record",
        "4: 1 forward passes: no worker record",
        "12: 1 rows: no worker record",
        "host.1.trace.jsonl has no end record: what its process did later is not there",
    ]
    assert ran.code == 0


def test_a_run_in_which_nothing_can_be_checked_is_not_sound(show: Show, rounds: Path) -> None:
    recording = two_rounds()
    for step in range(5):
        recording.drop(ForwardStep, step)
    recording.write(rounds)

    assert show(rounds, "--check") == Ran(
        3, "", "omnicache: run: nothing could be checked: no worker record\n"
    )


# -- summary ----------------------------------------------------------------------------------


def test_the_summary(show: Show, rounds: Path) -> None:
    ran = show(rounds, "--summary")

    assert ran.lines == [
        "Summary of run",
        "steps                    5",
        "forward passes           5",
        "requests                 2",
        "finished                 2 FINISHED_STOPPED",
        "not finished             0",
        "prompt tokens            80",
        "scheduled tokens         51",
        "queried tokens           80",
        "hit tokens               32",
        "hit rate                 40.0 % of the queried tokens",
        "evicted blocks           0",
        "evicted blocks per step  0",
        "preemptions              0",
        "prefix cache resets      0",
        "pool in use              39.7 % on average, 42.9 % at most (step 4), 42.9 % in the last "
        "step",
        "",
        "Phase times",
        "phase     steps  total ms  p50 ms  p90 ms  p99 ms  max ms",
        "schedule      5       0.5     0.1     0.1     0.1     0.1",
        "prepare       5       2.5     0.5     0.5     0.5     0.5",
        "forward       5        10       2       2       2       2",
        "sample        5       1.5     0.3     0.3     0.3     0.3",
    ]
    assert ran.err == "next: omnicache show run --check\n"


def test_the_summary_of_a_busy_run(show: Show, tmp_path: Path) -> None:
    data = show(busy().write(tmp_path / "run"), "--summary", "--format", "json").json

    assert {name: data[name] for name in ("steps", "requests", "finished_requests")} == {
        "steps": 3,
        "requests": 2,
        "finished_requests": {"FINISHED_STOPPED": 2},
    }
    assert (data["preemptions"], data["evicted_blocks"], data["prefix_cache_resets"]) == (1, 1, 1)
    assert data["eviction_frequency"] == pytest.approx(1 / 3)
    assert data["kv_cache_hit_rate"] == 0
    assert data["modal_cache_ratio"] is None


def test_hits_after_a_preemption_are_counted_apart_as_vllm_does(show: Show, tmp_path: Path) -> None:
    run = resumed_with_a_hit().write(tmp_path / "run")

    ran = show(run, "--summary", "--format", "json")

    data = ran.json
    assert (data["hit_tokens"], data["queried_tokens"], data["resumed_hit_tokens"]) == (0, 24, 16)
    assert "hit tokens after a preemption  16" in show(run, "--summary").lines


@pytest.mark.parametrize(
    ("longest", "reason"),
    [
        (15, "no prompt fills a block of 16 tokens, so nothing could hit"),
        (16, "no prompt is longer than a block of 16 tokens, so nothing could hit"),
        (17, None),
    ],
)
def test_prompts_too_short_to_hit_are_named(
    longest: int, reason: str | None, show: Show, tmp_path: Path
) -> None:
    recording = Recording()
    for length in (4, longest):
        number = recording.arrive("a", length)
        recording.step({number: length}, admit={number: Admit([[1 + number, 3 + number]])})
    recording.write(tmp_path / "run")

    data = show(tmp_path / "run", "--summary", "--format", "json").json
    assert (data["no_hit_reason"], data["longest_prompt_tokens"]) == (reason, longest)
    lines = show(tmp_path / "run", "--summary", "--quiet").lines
    told = [] if reason is None else ["", reason]
    pool = next(number for number, line in enumerate(lines) if line.startswith("pool in use"))
    assert lines[pool + 1 :][: len(told) + 2] == [
        *told,
        "",
        "Phase times",
    ]


def test_prompts_are_too_short_only_where_they_are_on_every_engine(
    show: Show, two_engines: Path
) -> None:
    recording = Recording(engine="host.1.0")
    number = recording.arrive("a", 4)
    recording.step({number: 4}, admit={number: Admit([[1]])})
    recording.write(two_engines, name="host.1")

    def reason(*options: object) -> object:
        return show(two_engines, "--summary", *options, "-f", "json").json["no_hit_reason"]

    assert reason() is None
    assert reason("--engine", 0) == "no prompt fills a block of 16 tokens, so nothing could hit"
    assert reason("--engine", 1) is None


def test_short_prompts_explain_nothing_where_something_hit_or_was_not_asked(
    show: Show, tmp_path: Path
) -> None:
    recording = busy()
    recording.change(SchedulerStep, 0, admitted=[])
    recording.write(tmp_path / "run")

    data = show(tmp_path / "run", "--summary", "--format", "json").json

    assert (data["queried_tokens"], data["no_hit_reason"]) == (0, None)


def test_the_share_of_each_modality_in_the_hits(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    spans = [MultiModalSpan("image", 4, 20, "aa"), MultiModalSpan("image", 30, 10, "bb")]
    a, b = (recording.arrive(name, 50, multimodal=spans) for name in ("a", "b"))
    recording.step({a: 50}, admit={a: Admit([[1, 2, 3, 4]])})
    recording.step({b: 18}, admit={b: Admit([[1, 2, 5, 6]], hit=32)})
    recording.write(tmp_path / "run")

    data = show(tmp_path / "run", "--summary", "--format", "json").json
    assert data["modal_cache_ratio"] == {"image": 22 / 32, "text": 10 / 32}

    assert data["modalities"] == {
        "image": {"queried_tokens": 60, "hit_tokens": 22, "hit_rate": 22 / 60},
        "text": {"queried_tokens": 40, "hit_tokens": 10, "hit_rate": 10 / 40},
    }

    lines = show(tmp_path / "run", "--summary").lines
    assert lines[lines.index("Tokens by modality") + 1 :][:3] == [
        "modality  queried  hit  hit rate  share of hits",
        "image          60   22  36.7 %    68.8 %",
        "text           40   10  25.0 %    31.2 %",
    ]


def test_percentiles_and_the_longest_phase(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("a", 4)
    recording.step({number: 4}, admit={number: Admit([[1, 2, 3, 4, 5, 6, 7]])})
    for _ in range(99):
        recording.step({number: 1})
    for step in range(100):
        recording.change(ForwardStep, step, forward_ns=(step + 1) * 1_000_000)
    recording.write(tmp_path / "run")

    phase = show(tmp_path / "run", "--summary", "--format", "json").json["phases"]["forward"]

    assert (phase["steps"], phase["total_ns"], phase["max_ns"]) == (100, 5_050_000_000, 100_000_000)
    assert phase["p50_ns"] == pytest.approx(50e6, rel=0.016)
    assert phase["p90_ns"] == pytest.approx(90e6, rel=0.016)
    assert phase["p99_ns"] == pytest.approx(99e6, rel=0.016)


def test_pool_usage_is_the_share_of_blocks_that_are_not_free(show: Show, tmp_path: Path) -> None:
    recording = Recording(num_blocks=11)  # ten of them can be handed out
    number = recording.arrive("a", 4)
    recording.step({number: 4}, admit={number: Admit([[1]])})
    recording.step({number: 1})
    recording.step({number: 1})
    for step, free in enumerate((4, 1, 7)):
        recording.change(SchedulerStep, step, num_free_blocks=free)
    recording.write(tmp_path / "run")

    assert show(tmp_path / "run", "--summary", "--format", "json").json["pools"] == [
        {
            "engine": "host.1.0",
            "usable_blocks": 10,
            "mean_usage": (6 + 9 + 3) / 30,
            "peak_usage": 0.9,
            "peak_step": 1,
            "final_usage": 0.3,
        }
    ]


def test_a_cache_that_was_never_asked_has_no_hit_rate(show: Show, tmp_path: Path) -> None:
    recording = Recording()
    recording.arrive("a", 4)
    recording.write(tmp_path / "run", is_finished=False)

    data = show(tmp_path / "run", "--summary", "--format", "json").json

    assert data["kv_cache_hit_rate"] is None
    assert data["eviction_frequency"] is None
    assert data["modal_cache_ratio"] is None
    assert (data["requests"], data["unfinished_requests"]) == (1, 1)
    assert data["phases"]["sample"] == {
        "steps": 0,
        "total_ns": None,
        "p50_ns": None,
        "p90_ns": None,
        "p99_ns": None,
        "max_ns": None,
    }
    assert data["pools"] == []
    lines = show(tmp_path / "run", "--summary").lines
    assert "hit rate                 not known: the prefix cache was never asked" in lines
    assert lines[-2:] == [
        "Incomplete",
        "host.1.trace.jsonl has no end record: its process was stopped, or is still running",
    ]


# -- engines, options -------------------------------------------------------------------------


@pytest.fixture
def two_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("host.1", "host.2"):
        recording = Recording(engine=f"{name}.0")
        number = recording.arrive("a", 20)
        recording.step({number: 20}, admit={number: Admit([[1, 2]])})
        recording.write(Path("run"), name=name)
    return Path("run")


def test_each_engine_has_its_table(show: Show, two_engines: Path) -> None:
    assert [line for line in show(two_engines).lines if line.startswith("Engine")] == [
        "Engine 0, host.1.0: tokens, free blocks, times in ms",
        "Engine 1, host.2.0: tokens, free blocks, times in ms",
    ]


@pytest.mark.parametrize("engine", ["1", "host.2.0"])
def test_one_engine_can_be_chosen(engine: str, show: Show, two_engines: Path) -> None:
    ran = show(two_engines, "--step", 0, "--engine", engine)
    assert ran.lines[0] == "Step 0 of engine host.2.0"

    ran = show(two_engines, "--request", "a", "--engine", engine)
    assert "engine         host.2.0" in ran.lines

    data = show(two_engines, "--summary", "--engine", engine, "--format", "json").json
    assert (data["steps"], data["requests"]) == (1, 1)


def test_each_engine_has_its_pool(show: Show, two_engines: Path) -> None:
    lines = show(two_engines, "--summary").lines

    assert lines[1] == "engines                  2"
    assert lines[lines.index("Pool in use") + 1 :][:3] == [
        "engine       blocks  mean    peak    in step  in the last step",
        "0, host.1.0      63  36.5 %  36.5 %        0  36.5 %",
        "1, host.2.0      63  36.5 %  36.5 %        0  36.5 %",
    ]


def test_a_violation_names_its_engine_where_there_are_several(
    show: Show, two_engines: Path
) -> None:
    recording = Recording(engine="host.2.0")
    number = recording.arrive("a", 20)
    recording.step({number: 20}, admit={number: Admit([[1, 2]])})
    recording.change_group(0, slot_mapping=[0, 20])
    recording.write(two_engines, name="host.2")

    ran = show(two_engines, "--check")

    assert (
        "1: slots follow the block table: engine host.2.0, step 0, rank 0, group 0, request a, "
        "row 0" in ran.lines
    )
    assert ran.err == "next: omnicache show run --step 0 --engine 1\n"


def test_several_engines_want_a_choice(show: Show, two_engines: Path) -> None:
    assert show(two_engines, "--step", 0) == Ran(
        3,
        "",
        "omnicache: 2 engines have a step 0; pass --engine: 0 (host.1.0), 1 (host.2.0)\n",
    )
    assert show(two_engines, "--request", "a").code == 3
    assert show(two_engines, "--engine", 2) == Ran(
        3, "", "omnicache: run has no engine 2; choose: 0 (host.1.0), 1 (host.2.0)\n"
    )


def test_modes_exclude_each_other(show: Show, rounds: Path) -> None:
    assert show(rounds, "--check", "--step", 1) == Ran(
        2, "", "omnicache: --step and --check cannot be combined; give one of them\n"
    )


def test_a_file_is_written_and_not_overwritten(show: Show, rounds: Path) -> None:
    assert show(rounds, "--summary", "-o", "s.json", "-q") == Ran(0, "", "")
    assert json.loads(Path("s.json").read_text())["steps"] == 5
    assert show(rounds, "-o", "s.json").code == 3
    assert show(rounds, "-o", "s.json", "--force", "-q").code == 0


def test_a_page_is_a_file_like_every_other(show: Show, rounds: Path) -> None:
    assert show(rounds, "--summary", "-o", "s.html") == Ran(
        0, "", "wrote s.html\nnext: omnicache show run --check\n"
    )
    page = Path("s.html").read_text(encoding="ascii")
    assert page.startswith("<!DOCTYPE html>\n")
    assert Path("s.html").stat().st_mode & 0o777 == 0o600
    assert show(rounds, "-o", "s.html") == Ran(
        3, "", "omnicache: s.html exists; pass --force to replace it\n"
    )
    assert Path("s.html").read_text(encoding="ascii") == page
    assert show(rounds, "--summary", "--format", "html", "-q") == Ran(0, page, "")


def test_a_file_of_another_format_is_refused_unless_the_format_is_named(
    show: Show, rounds: Path
) -> None:
    assert show(rounds, "-o", "s.csv") == Ran(
        2,
        "",
        "omnicache: s.csv names a format that is not there; formats: text, json, html; choose one "
        "with --format, or name a .txt, .json or .html file\n",
    )
    assert not Path("s.csv").exists()
    assert show(rounds, "-o", "s.csv", "--format", "text", "-q").code == 0


def test_a_damaged_run_is_bad_input(show: Show, rounds: Path) -> None:
    path = rounds / "host.1.trace.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"schedule"', b'"shedule"', 1))

    ran = show(rounds)

    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("omnicache: run/host.1.trace.jsonl:5: not a trace record")


def test_a_damaged_vector_is_bad_input(show: Show, rounds: Path) -> None:
    recording = two_rounds()
    recording.change_group(3, slot_mapping=[64, 1 << 40])
    recording.write(rounds)

    assert show(rounds, "--step", 3).code == 3
    assert show(rounds, "--check").code == 3


@pytest.mark.parametrize(
    "mode",
    [
        *([], ["--step", 0], ["--request", "a"], ["--check"], ["--summary"]),
        *(["--requests"], ["--blocks"], ["--block", 1], ["--evictions"], ["run"]),
    ],
)
def test_text_fits_100_columns(
    mode: list[object], show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(num_blocks=1 << 20)
    number = recording.arrive("a", 100_000)
    recording.next_step = 123_456
    table = [7 * index + 100_000 for index in range(6250)]
    recording.step({number: 100_000}, admit={number: Admit([table])})
    recording.next_step = 0
    other = recording.arrive("b", 16)
    recording.step({number: 1, other: 16}, admit={other: Admit([[1]])}, grow={number: [[2]]})
    monkeypatch.chdir(tmp_path)

    ran = show(recording.write(tmp_path / "run"), *mode)

    assert ran.out != ""
    assert max(map(len, ran.lines)) <= 100


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "empty"),
        ([5], "5"),
        ([-1], "-1 x 1"),
        ([1, 2], "1, 2"),
        ([1, 2, 3], "1 .. 3"),
        ([3, 2, 1], "3 .. 1"),
        ([7, 7], "7, 7"),
        ([7, 7, 7], "7 x 3"),
        ([*range(1, 63), 64], "1 .. 62, 64"),
        ([1024, 1025, 1026, -1, -1, -1], "1024 .. 1026, then -1 x 3"),
        ([4, -1, 5], "4, -1 x 1, 5"),
        ([0, 0, 0, 4, 5], "0 x 3, 4, 5"),
    ],
)
def test_vectors_print_as_runs(values: list[int], text: str) -> None:
    assert runs_text(values) == text


def test_a_long_list_of_runs_is_cut_only_when_asked() -> None:
    values = [10, 20, 30, 40, 50, 60]

    assert runs_text(values) == "10, 20, 30, 40, 50, 60"
    assert runs_text(values, most=4) == "10, 20, 30, 2 more runs, 60"
    assert runs_text(values, most=5) == "10, 20, 30, 40, 50, 60"


@pytest.mark.parametrize("view", [(), ("--requests",), ("--blocks",), ("--rounds",)])
def test_every_view_says_that_a_file_was_cut_short(
    show: Show, rounds: Path, view: tuple[str, ...]
) -> None:
    two_rounds().write(rounds, is_finished=False)
    cut = "run: host.1.trace.jsonl has no end record: its process was stopped, or is still running;"
    assert cut in show(rounds, *view).err
    two_rounds().write(rounds)
    assert cut not in show(rounds, *view).err
