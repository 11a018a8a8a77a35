"""Each invariant on a run that keeps it, and on runs damaged as in public reports and near them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from omnicache_cli.trace.digest import digest_of
from omnicache_cli.trace.invariants import InvariantChecker, Violation
from omnicache_cli.trace.records import (
    Allocated,
    BatchDescriptor,
    Cached,
    CacheGroup,
    EngineSource,
    ForwardStep,
    Freed,
    Gap,
    GroupForward,
    RankStep,
    SchedulerStep,
    WorkerSource,
    WrongHash,
    to_runs,
)
from omnicache_cli.trace.run import Run
from tests.unit.run_builder import Admit, Recording, cache_group, two_rounds


def checked(recording: Recording, folder: Path) -> tuple[InvariantChecker, list[Violation]]:
    """The run written, read back and checked."""
    checker = InvariantChecker()
    run = Run(recording.write(folder))
    found = [one for step in run.steps() for one in checker.check(step)]
    return checker, found


def broken(recording: Recording, folder: Path) -> list[tuple[object, ...]]:
    """Invariant, step, group, request, row, what, expected, found."""
    return [
        (
            one.invariant,
            one.step,
            one.group,
            one.request,
            one.row,
            one.what,
            one.expected,
            one.found,
        )
        for one in checked(recording, folder)[1]
    ]


def two_in_a_batch() -> Recording:
    """Two prompts of 20 and 10 tokens, then one decode step of both."""
    recording = Recording([cache_group(block_size=4)])
    a, b = recording.arrive("a", 20), recording.arrive("b", 10)
    recording.step({a: 20, b: 10}, admit={a: Admit([[1, 2, 3, 4, 5]]), b: Admit([[6, 7, 8]])})
    recording.step({a: 1, b: 1}, grow={a: [[9]]})
    return recording


def vllm_36580() -> Recording:
    """Block table [5, 9], B=4, rows 3..6."""
    recording = Recording([cache_group(block_size=4)])
    number = recording.arrive("a", 7)
    recording.step({number: 3}, admit={number: Admit([[5]])})
    recording.step({number: 4}, grow={number: [[9]]})
    return recording


def test_a_sound_run_keeps_every_invariant(tmp_path: Path) -> None:
    checker, found = checked(two_rounds(), tmp_path)

    assert found == []
    assert {number: one.checked for number, one in checker.coverage.items()} == {
        1: 5,
        2: 5,
        3: 5,
        4: 5,
        5: 0,
        6: 2,
        7: 2,
        8: 0,
        9: 0,
        11: 0,
        12: 5,
    }
    assert checker.unchecked() == {}


def test_11_a_rank_with_another_batch_than_the_first_is_named(tmp_path: Path) -> None:
    recording = two_rounds()
    (engine,) = (one for one in recording.records if isinstance(one, EngineSource))
    (worker,) = (one for one in recording.records if isinstance(one, WorkerSource))
    position = recording.records.index(engine)
    two_ranks = replace(engine, parallel={**engine.parallel, "world_size": 2})
    recording.records[position] = two_ranks
    recording.records.insert(1, replace(worker, source=9, rank=1, tp_rank=1))
    run = Run(two_rounds().write(tmp_path / "sound"))
    digests = [digest_of(step.forwards[0]) for step in run.steps()]
    for step, right in enumerate(digests):
        digest = "00" * 8 if step == 3 else right
        recording.records.append(RankStep(9, step, 0, 1, 2, 3, digest))

    checker, found = checked(recording, tmp_path / "run")

    assert [(one.invariant, one.step, one.rank) for one in found] == [(11, 3, 1)]
    assert (found[0].expected, found[0].found) == (digests[3], "00" * 8)
    assert checker.coverage[11].checked == 5


@pytest.mark.parametrize(
    ("changes", "row", "what", "expected", "found"),
    [
        ({"slot_mapping": [16, 39, 50, 1]}, None, "slot_mapping[39]", "55", "50"),
        ({"seq_lens": [41]}, None, "seq_lens[0]", "40", "41"),
        ({"query_start_loc": [0, 1]}, None, "query_start_loc[1]", "40", "only 1 entries"),
        ({"max_seq_len": 44}, None, "max_seq_len", "40", "44"),
        ({"block_table": [(0, 0, [1, 2])]}, 0, "block_table[0][2]", "3", "only 2 entries"),
    ],
)
def test_11_what_a_rank_saw_otherwise_is_named(
    tmp_path: Path,
    changes: dict[str, Any],
    row: int | None,
    what: str,
    expected: str,
    found: str,
) -> None:
    recording = Recording(ranks=2)
    first = recording.arrive("p0", 40)
    recording.step({first: 40}, admit={first: Admit([[1, 2, 3]])})
    recording.change_group(0, rank=1, **changes)
    recording.records[-1] = replace(recording.records[-1], restated=True)

    _, violations = checked(recording, tmp_path)

    assert [
        (one.rank, one.group, one.row, one.what, one.expected, one.found)
        for one in violations
        if one.invariant == 11
    ] == [(1, 0, row, what, expected, found)]


def test_11_a_rank_that_ran_other_requests_names_the_first(tmp_path: Path) -> None:
    recording = Recording(ranks=2)
    first, second = recording.arrive("p0", 16), recording.arrive("p1", 16)
    admit = {first: Admit([[1]]), second: Admit([[2]])}
    recording.step({first: 16, second: 16}, admit=admit)
    recording.records[-1] = replace(recording.records[-1], rows=[second, first])

    _, violations = checked(recording, tmp_path)

    assert [
        (one.row, one.what, one.expected, one.found) for one in violations if one.invariant == 11
    ] == [(0, "request of the row", "p0-00000000", "p1-00000001")]


def test_a_restated_batch_stands_alone_and_is_no_witness_of_writes(tmp_path: Path) -> None:
    recording = two_rounds()
    (worker,) = (one for one in recording.records if isinstance(one, WorkerSource))
    assert isinstance(recording.records[0], EngineSource)
    recording.records[0] = replace(recording.records[0], parallel={"world_size": 2})
    recording.records.insert(1, replace(worker, source=9, rank=1, tp_rank=1))
    forwards = [one for one in recording.records if isinstance(one, ForwardStep)]
    (group,) = forwards[1].groups
    other = replace(group, slots=None, slot_mapping=[49, 1], block_table=[(0, 0, [1, 3])])
    restated = replace(forwards[1], source=9, groups=[other], restated=True)
    again = replace(restated, step=3, groups=[replace(other, block_table=[])])
    recording.records += [restated, again]

    steps = list(Run(recording.write(tmp_path)).steps())

    (table,) = steps[1].forwards[1].groups[0].block_table
    assert table == [1, 2, 3]
    assert steps[3].forwards[1].groups[0].block_table == ([],)  # nothing is left of step 1
    checker = InvariantChecker()
    found = [one for step in steps for one in checker.check(step)]
    assert {one.rank for one in found} == {1}
    assert checker.coverage[6].unchecked == Counter()


# -- 5: a common prefix -----------------------------------------------------------------------


def shared_prefix(**changes: Any) -> Recording:
    """Two requests share blocks 1 and 2; in step 1 both decode, and the scheduler says so."""
    recording = Recording()
    a, b = recording.arrive("a", 33), recording.arrive("b", 34)
    recording.step({a: 33}, admit={a: Admit([[1, 2, 3]])})
    recording.step({a: 1, b: 2}, admit={b: Admit([[1, 2, 4]], hit=32)})
    recording.change(SchedulerStep, 1, num_common_prefix_blocks=[2])
    if changes:
        recording.change_group(1, **changes)
    return recording


def test_5_a_common_prefix_that_is_common_is_counted(tmp_path: Path) -> None:
    checker, found = checked(shared_prefix(), tmp_path)
    assert found == []
    assert checker.coverage[5].checked == 1


def test_5_a_prefix_that_is_one_block_shorter_than_said(tmp_path: Path) -> None:
    recording = shared_prefix()
    recording.change(SchedulerStep, 1, num_common_prefix_blocks=[3])
    shared = "3, as in row 0: the first 3 are shared (num_common_prefix_blocks)"
    assert broken(recording, tmp_path) == [(5, 1, 0, None, 1, "block_table[1][2]", shared, "4")]


@pytest.mark.parametrize(
    ("length", "found"),
    [
        (32, []),
        (47, []),  # whole blocks only
        (48, [(5, "block_table[1][2]", "4")]),
        (64, [(5, "block_table[0]", "3 blocks")]),
    ],
)
def test_5_cascade_attention_over_more_than_the_rows_share(
    tmp_path: Path, length: int, found: list[tuple[object, ...]]
) -> None:
    recording = shared_prefix(use_cascade=True, common_prefix_len=length)
    _, violations = checked(recording, tmp_path)
    assert [(one.invariant, one.what, one.found) for one in violations] == found


def test_5_a_common_prefix_counts_in_blocks_of_the_kernel(tmp_path: Path) -> None:
    recording = Recording([cache_group(block_size=32)], kernel_block_sizes=[16])
    a, b = recording.arrive("a", 33), recording.arrive("b", 34)
    admit = {a: Admit([[1, 2]]), b: Admit([[1, 3]], hit=32)}
    recording.step({a: 33, b: 2}, admit=admit)
    recording.change(SchedulerStep, 0, num_common_prefix_blocks=[1])
    checker, found = checked(recording, tmp_path)
    assert (checker.coverage[5].checked, found) == (1, [])
    recording.change(SchedulerStep, 0, num_common_prefix_blocks=[2])
    _, found = checked(recording, tmp_path)
    assert [(one.invariant, one.what, one.found) for one in found] == [
        (5, "block_table[1][2]", "6")
    ]


# -- 7: the length of a hit -------------------------------------------------------------------


def one_hit(hit: int, prompt: int, groups: list[CacheGroup], own: list[int]) -> Recording:
    """One request hits `hit` tokens; the groups' own hits are `own`."""
    recording = Recording(groups, cache_hit_alignment_tokens=16)
    first = recording.arrive("first", prompt)
    blocks = -(-prompt // 16)
    tables = [list(range(1 + index * 20, 1 + index * 20 + blocks)) for index in range(len(groups))]
    recording.step({first: prompt}, admit={first: Admit(tables)})
    recording.finish(first)
    second = recording.arrive("second", prompt)
    recording.step({second: prompt - hit}, admit={second: Admit(tables, hit=hit)})
    (admission,) = next(
        one.admitted
        for one in recording.records
        if isinstance(one, SchedulerStep) and one.step == 1
    )
    admitted = [replace(admission, group_hit_tokens=own)]
    recording.change(SchedulerStep, 1, admitted=admitted)
    return recording


FULL = cache_group()
SLIDING = cache_group(spec="SlidingWindowSpec", sliding_window=64)
MAMBA = cache_group(spec="MambaSpec", maps_slots=False)
SCRATCH = cache_group(spec="MambaSpec", maps_slots=False, prefix_cacheable=False)
OWN = "the group's own longest hit"


@pytest.mark.parametrize(
    ("hit", "groups", "own", "findings"),
    [
        (48, [FULL], [], []),
        (40, [FULL], [], [(None, "a multiple of 16", "40")]),
        (64, [FULL], [], [(None, "fewer than the 64 asked for", "64")]),
        (48, [FULL, SLIDING], [48, 48], []),
        (32, [FULL, SLIDING], [48, 32], []),
        (48, [FULL, SLIDING], [48, 32], [(1, f"32, {OWN}", "48")]),
        (16, [FULL, SLIDING], [48, 32], [(1, f"32, {OWN}", "16")]),
        (16, [FULL, SLIDING], [32, 48], []),  # the window has no such prefix: it gives way
        (48, [FULL, SLIDING], [32, 48], [(0, f"32 or less, {OWN}", "48")]),
        (0, [FULL, MAMBA], [48, 0], []),
        (16, [FULL, MAMBA], [48, 0], [(1, f"0, {OWN}", "16")]),
        (48, [FULL, SCRATCH], [48, 0], []),
        (16, [FULL, SLIDING, MAMBA], [48, 32, 48], []),  # three kinds may agree on less
    ],
)
def test_7_the_length_of_a_hit(
    tmp_path: Path,
    hit: int,
    groups: list[CacheGroup],
    own: list[int],
    findings: list[tuple[object, ...]],
) -> None:
    _, found = checked(one_hit(hit, 64, groups, own), tmp_path)
    assert [(one.group, one.expected, one.found) for one in found if one.invariant == 7] == findings


def test_7_a_hit_of_a_request_that_asked_for_none(tmp_path: Path) -> None:
    recording = one_hit(32, 64, [FULL], [])
    (admission,) = next(
        one.admitted
        for one in recording.records
        if isinstance(one, SchedulerStep) and one.step == 1
    )
    recording.change(SchedulerStep, 1, admitted=[replace(admission, queried_tokens=0)])
    assert broken(recording, tmp_path) == [
        (7, 1, None, "second", None, "hit tokens", "0, the cache was not asked", "32")
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_connector": True}, "loaded by a KV connector"),
        ({"use_eagle": True}, "speculative decoding: groups drop a block of their own hit"),
        ({}, "the groups' own hits were not recorded"),
    ],
)
def test_7_what_the_groups_say_is_left_out_where_it_means_nothing(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    own = [48, 16] if options else []
    recording = one_hit(32, 64, [FULL, SLIDING], own)
    assert isinstance(recording.records[0], EngineSource)
    recording.records[0] = replace(recording.records[0], options=options)
    checker, found = checked(recording, tmp_path)
    assert [one for one in found if one.invariant == 7] == []
    assert checker.coverage[7].unchecked[reason] >= 1


# -- 8: hashes --------------------------------------------------------------------------------


def test_8_a_block_under_the_hash_of_other_tokens(tmp_path: Path) -> None:
    recording = Recording(checks_hashes=True)
    a = recording.arrive("a", 40)
    admit = {a: Admit([[1, 2, 3]])}
    wrong = WrongHash(a, 0, 2, 1, "11" * 8, "22" * 8)
    recording.step({a: 40}, admit=admit, events=[Cached(a, 0, [0, 2], [1, 2]), wrong])
    checker, found = checked(recording, tmp_path)
    assert checker.coverage[8].checked == 2
    assert [(one.invariant, one.group, one.request, one.what) for one in found] == [
        (8, 0, "a", "hash of block 2, entry 1 of the request")
    ]
    assert (found[0].expected, found[0].found) == (
        "11" * 8,
        "22" * 8 + ", the hash of other tokens",
    )


# -- 9: buffers -------------------------------------------------------------------------------


def test_9_two_groups_in_one_buffer(tmp_path: Path) -> None:
    recording = Recording([FULL, SLIDING])
    a = recording.arrive("a", 20)
    recording.step({a: 20}, admit={a: Admit([[1, 2], [3, 4]])})
    checker, found = checked(recording, tmp_path / "sound")
    assert (checker.coverage[9].checked, found) == (1, [])
    recording.change(ForwardStep, 0, shared_buffers=[("slot_mapping", 0, 1)])
    assert broken(recording, tmp_path / "shared") == [
        (
            *(9, 0, 1, None, None),
            *("slot_mapping buffer", "memory of its own", "shared with group 0"),
        )
    ]


# -- 12: two tables ---------------------------------------------------------------------------


def test_12_a_table_that_names_a_free_block(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change_group(1, block_table=[(0, 2, [9, 1])])
    found = [one for one in broken(recording, tmp_path) if one[0] == 12]
    assert found == [
        (12, 1, 0, "p0-r1", 0, "block_table[0][2]", "3, as the scheduler says", "9"),
    ]


def test_12_a_table_that_missed_a_block(tmp_path: Path) -> None:
    recording = Recording()
    a = recording.arrive("a", 16)
    recording.step({a: 16}, admit={a: Admit([[1]])})
    recording.step({a: 1}, grow={a: [[2]]})
    recording.change_group(1, block_table=[], slots=None, slot_mapping=[32, 1])
    found = [one[0:2] + one[5:] for one in broken(recording, tmp_path) if one[0] == 12]
    assert found == [(12, 1, "length of block_table[0]", "2 blocks", "1 blocks")]


def test_12_requests_whose_admission_was_lost_are_not_compared(tmp_path: Path) -> None:
    recording = two_rounds()
    admission = next(one for one in recording.records if isinstance(one, SchedulerStep))
    recording.change(SchedulerStep, 0, admitted=[], num_computed_tokens=[0])
    assert admission.step == 0
    checker, found = checked(recording, tmp_path)
    assert [one for one in found if one.invariant == 12] == []
    assert checker.coverage[12].unchecked["records were lost before"] == 3


@pytest.mark.parametrize("recording", [two_in_a_batch(), vllm_36580()])
def test_batches_and_chunks_keep_every_invariant(recording: Recording, tmp_path: Path) -> None:
    assert broken(recording, tmp_path) == []


# -- 1: slots follow the block table ----------------------------------------------------------


def test_1_the_example_of_vllm_36580_maps_to_these_slots(tmp_path: Path) -> None:
    run = Run(vllm_36580().write(tmp_path))

    assert [step.forwards[0].groups[0].slot_mapping for step in run.steps()] == [
        [20, 21, 22],
        [23, 36, 37, 38],
    ]


def test_1_slots_of_the_block_before_are_named_once_per_row(tmp_path: Path) -> None:
    recording = vllm_36580()
    recording.change_group(1, slot_mapping=to_runs([23, 24, 25, 26]))

    assert broken(recording, tmp_path) == [
        (
            *(1, 1, 0, "a", 0, "slot_mapping[1], position 4 and 2 more of 4"),
            *("36 = block_table[1] 9 x 4 + 0", "24"),
        ),
    ]


def test_1_one_wrong_slot_in_the_second_row(tmp_path: Path) -> None:
    recording = two_in_a_batch()
    recording.change_group(1, slot_mapping=to_runs([36, 35]))

    assert broken(recording, tmp_path) == [
        (
            *(1, 1, 0, "b", 1, "slot_mapping[1], position 10"),
            *("34 = block_table[2] 8 x 4 + 2", "35"),
        ),
    ]


def test_1_a_slot_mapping_one_entry_too_short(tmp_path: Path) -> None:
    recording = vllm_36580()
    recording.change_group(1, slot_mapping=to_runs([23, 36, 37]))

    assert broken(recording, tmp_path) == [
        (
            1,
            1,
            0,
            "a",
            0,
            "slot_mapping[3], position 6",
            "38 = block_table[1] 9 x 4 + 2",
            "no entry",
        ),
        (2, 1, 0, None, None, "length of slot_mapping", "at least num_actual_tokens 4", "3"),
    ]


def test_1_a_block_table_one_column_too_short(tmp_path: Path) -> None:
    recording = vllm_36580()
    recording.change_group(1, block_table=[(0, 0, [5, 1])])

    assert broken(recording, tmp_path) == [
        (
            *(1, 1, 0, "a", 0, "slot_mapping[1], position 4 and 2 more of 4"),
            *("a block in column 1; the row has 1", "36"),
        ),
        (12, 1, 0, "a", 0, "length of block_table[0]", "2 blocks", "1 blocks"),
    ]


def test_1_another_group_is_checked_with_its_own_block_size(tmp_path: Path) -> None:
    groups = [cache_group(), cache_group(block_size=32)]
    recording = Recording(groups, kernel_block_sizes=[16, 16])
    number = recording.arrive("a", 40)
    recording.step({number: 40}, admit={number: Admit([[1, 2, 3], [4, 5]])})
    assert broken(recording, tmp_path) == []

    slots = [*range(128, 144), *range(144, 160), *range(161, 169)]
    recording.change_group(0, 1, slot_mapping=to_runs(slots))
    assert broken(recording, tmp_path) == [
        (
            *(1, 0, 1, "a", 0, "slot_mapping[32], position 32 and 7 more of 40"),
            *("160 = block_table[2] 10 x 16 + 0", "161"),
        ),
    ]


def test_1_a_group_without_slots_is_not_checked(tmp_path: Path) -> None:
    groups = [cache_group(), cache_group(spec="MambaSpec", maps_slots=False)]
    recording = Recording(groups)
    number = recording.arrive("a", 20)
    recording.step({number: 20}, admit={number: Admit([[1, 2], [3, 4]])})

    checker, found = checked(recording, tmp_path)

    assert found == []
    assert (checker.coverage[1].checked, checker.coverage[2].checked) == (1, 1)
    assert checker.coverage[1].unchecked == {"group maps no slots": 1}


def test_1_a_slot_mapping_that_was_not_read_is_not_checked(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change_group(0, slot_mapping=None)

    checker, found = checked(recording, tmp_path)

    assert found == []
    assert checker.coverage[1].unchecked == {"slot mapping not read": 1}
    assert checker.coverage[6].checked == 0
    assert checker.coverage[6].unchecked == {"slot mapping not read": 2}


def test_1_and_3_are_not_checked_where_the_block_table_was_not_read(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change_group(0, block_table=None)

    checker, found = checked(recording, tmp_path)

    assert found == []
    for number in (1, 3, 12):
        assert checker.coverage[number].unchecked == {"block table not read": 1}
        assert checker.coverage[number].checked == 4
    assert (checker.coverage[2].checked, checker.coverage[6].checked) == (5, 2)


def test_1_a_group_that_only_the_runner_has_is_not_checked(tmp_path: Path) -> None:
    recording = Recording([cache_group(), cache_group()])
    number = recording.arrive("a", 20)
    recording.step({number: 20}, admit={number: Admit([[1, 2], [3, 4]])})
    (engine,) = (one for one in recording.records if isinstance(one, EngineSource))
    recording.records[0] = replace(engine, groups=engine.groups[:1])  # encoder-only layers

    checker, found = checked(recording, tmp_path)

    assert found == []
    assert checker.coverage[1].unchecked == {"group maps no slots": 1}


def test_1_microbatches_are_not_checked(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change(ForwardStep, 0, groups=[], num_ubatches=2)

    checker, found = checked(recording, tmp_path)

    assert found == []
    reason = "microbatches (DBO) are not recorded"
    assert checker.coverage[1].unchecked == {reason: 1}
    assert checker.coverage[6].unchecked == {reason: 2}


# -- 2: padding and the null block ------------------------------------------------------------


def padded(cudagraph_mode: str = "PIECEWISE") -> Recording:
    """5 tokens in a graph of 8: three -1 behind them."""
    recording = Recording()
    number = recording.arrive("a", 5)
    descriptor = BatchDescriptor(8)
    recording.step(
        {number: 5},
        admit={number: Admit([[1]])},
        padding=3,
        descriptor=descriptor,
        cudagraph_mode=cudagraph_mode,
    )
    return recording


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_2_padding_of_a_graph_is_minus_one(mode: str, tmp_path: Path) -> None:
    assert broken(padded(mode), tmp_path) == []


def test_2_padding_that_repeats_the_last_slot(tmp_path: Path) -> None:
    recording = padded()
    recording.change_group(0, slot_mapping=to_runs([16, 17, 18, 19, 20, 20]), num_slot_padding=2)

    assert broken(recording, tmp_path) == [
        (2, 0, 0, None, None, "slot_mapping[5]", "-1", "20"),
    ]


def test_2_padding_of_zeros_writes_the_null_block(tmp_path: Path) -> None:
    recording = padded()
    recording.change_group(0, slot_mapping=[16, 5, 0, 1, 0, 1, 0, 1], num_slot_padding=0)

    assert broken(recording, tmp_path) == [
        (2, 0, 0, None, None, "slot_mapping[5] and 2 more", "-1", "0"),
    ]


def test_2_a_real_row_of_minus_one(tmp_path: Path) -> None:
    recording = two_in_a_batch()
    recording.change_group(1, slot_mapping=to_runs([36]), num_slot_padding=1)

    assert [one[:2] + one[3:] for one in broken(recording, tmp_path)] == [
        (1, 1, "b", 1, "slot_mapping[1], position 10", "34 = block_table[2] 8 x 4 + 2", "no entry"),
        (2, 1, "b", 1, "slot_mapping[1]", "a slot", "-1"),
    ]


def test_2_num_actual_tokens_one_too_small(tmp_path: Path) -> None:
    recording = padded()
    recording.change_group(0, num_actual_tokens=4)

    assert broken(recording, tmp_path) == [
        (4, 0, 0, None, None, "num_actual_tokens", "5 scheduled tokens", "4"),
        (2, 0, 0, None, None, "slot_mapping[4]", "-1", "20"),
    ]


def test_2_a_full_graph_may_count_its_padding(tmp_path: Path) -> None:
    recording = padded("FULL")
    recording.change_group(0, num_actual_tokens=8)

    assert broken(recording, tmp_path) == []


def test_2_a_table_that_still_names_the_null_block(tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("a", 20)
    recording.step({number: 20}, admit={number: Admit([[0, 3]])})

    assert broken(recording, tmp_path) == [
        (
            *(2, 0, 0, "a", 0, "slot_mapping[0] and 15 more"),
            *("a slot from 16 on", "0, in the null block 0"),
        ),
    ]


# -- 3: one owner -----------------------------------------------------------------------------


def test_3_two_rows_write_the_same_slot(tmp_path: Path) -> None:
    recording = two_in_a_batch()
    recording.change_group(1, slot_mapping=to_runs([36, 36]), block_table=[(1, 0, [6, 2, 9, 1])])

    found = [one for one in broken(recording, tmp_path) if one[0] == 3]

    assert found[0][3:] == (
        *("b", 1, "slot 36 written in this step", "written by this row only"),
        "also written by row 0 (a)",
    )


def test_3_a_row_writes_a_block_of_a_request_outside_the_batch(tmp_path: Path) -> None:
    recording = Recording()
    a, b = recording.arrive("a", 5), recording.arrive("b", 5)
    recording.step({a: 5}, admit={a: Admit([[1]])})
    recording.step({b: 5}, admit={b: Admit([[2]])})
    recording.change_group(1, slot_mapping=[16, 5], block_table=[(0, 0, [1, 1])])

    assert broken(recording, tmp_path) == [
        (
            *(3, 1, 0, "b", 0, "block 1 written in this step", "held by this request only"),
            "also held by request #0 (a)",
        ),
        (12, 1, 0, "b", 0, "block_table[0][0]", "2, as the scheduler says", "1"),
    ]


def test_3_a_block_of_a_finished_request_may_be_written(tmp_path: Path) -> None:
    recording = Recording()
    a, b = recording.arrive("a", 5), recording.arrive("b", 5)
    recording.step({a: 5}, admit={a: Admit([[1]])})
    recording.finish(a)
    recording.step({b: 5}, admit={b: Admit([[1]])})

    assert broken(recording, tmp_path) == []


def test_3_a_shared_prefix_block_is_shared_but_not_written(tmp_path: Path) -> None:
    recording = Recording()
    a, b = recording.arrive("a", 40), recording.arrive("b", 40)
    recording.step({a: 40}, admit={a: Admit([[1, 2, 3]])})
    recording.step({a: 1, b: 8}, admit={b: Admit([[1, 2, 4]], hit=32)})
    assert broken(recording, tmp_path) == []

    # b computes from 31 on: its first token falls into the shared block 2
    recording.change(SchedulerStep, 1, num_scheduled_tokens=[1, 9], num_computed_tokens=[40, 31])
    recording.change_group(
        1,
        num_actual_tokens=10,
        max_query_len=9,
        query_start_loc=to_runs([0, 1, 10]),
        slot_mapping=to_runs([56, 47, *range(64, 72)]),
    )
    assert broken(recording, tmp_path) == [
        (
            *(3, 1, 0, "b", 1, "block 2 written in this step", "held by this request only"),
            "also held by row 0 (a)",
        ),
    ]


def test_3_a_sliding_window_leaves_old_blocks_in_the_workers_table(tmp_path: Path) -> None:
    recording = Recording([cache_group(spec="SlidingWindowSpec", sliding_window=16)])
    a, b = recording.arrive("a", 40), recording.arrive("b", 5)
    recording.step({a: 40}, admit={a: Admit([[1, 2, 3]])})
    recording.after(Freed(a, [1, 1]))  # positions 0 .. 15 left the window
    recording.step({a: 1, b: 5}, admit={b: Admit([[1]])})

    assert broken(recording, tmp_path) == []


def test_3_a_window_does_not_excuse_a_block_inside_it(tmp_path: Path) -> None:
    recording = Recording([cache_group(spec="SlidingWindowSpec", sliding_window=16)])
    a, b = recording.arrive("a", 40), recording.arrive("b", 5)
    recording.step({a: 40}, admit={a: Admit([[1, 2, 3]])})
    recording.step({a: 1, b: 5}, admit={b: Admit([[2]])})

    assert [one[0] for one in broken(recording, tmp_path)] == [3]


def test_3_preemption_gives_the_blocks_to_another(tmp_path: Path) -> None:
    recording = Recording()
    a, b = recording.arrive("a", 16), recording.arrive("b", 16)
    recording.step({a: 16, b: 16}, admit={a: Admit([[1]]), b: Admit([[2]])})
    recording.step({a: 1}, events=recording.preempt(b), grow={a: [[2]]})
    recording.finish(a)
    recording.step({b: 17}, admit={b: Admit([[3, 2]], resumed=True)})

    assert broken(recording, tmp_path) == []


def test_3_a_hit_in_the_same_step_may_read_what_the_step_writes_but_not_write_it(
    tmp_path: Path,
) -> None:
    recording = same_step("ab")
    assert broken(recording, tmp_path) == []

    recording.change_group(0, slot_mapping=to_runs([*range(16, 36), 16, 49, 50, 51]))
    assert [(one[0], one[3]) for one in broken(recording, tmp_path)] == [
        (1, "b"),
        (3, "a"),  # slot 16 is b's too
        (3, "b"),  # block 1 is a's
    ]


# -- 4: the shape of the batch ----------------------------------------------------------------


def five_requests() -> Recording:
    recording = Recording()
    numbers = [recording.arrive(f"r{index}", 4) for index in range(5)]
    admit = {number: Admit([[1 + number]]) for number in numbers}
    recording.step(dict.fromkeys(numbers, 4), admit=admit)
    return recording


def test_4_vllm_ascend_14714_six_rows_for_five_requests(tmp_path: Path) -> None:
    recording = five_requests()
    recording.change_group(0, table_shape=(6, 64))

    assert broken(recording, tmp_path) == [
        (4, 0, 0, None, None, "rows of block_table", "5 rows (num_reqs)", "6"),
    ]


def test_4_four_rows_for_five_requests(tmp_path: Path) -> None:
    recording = five_requests()
    recording.change_group(0, table_shape=(4, 64))

    assert [one[5:] for one in broken(recording, tmp_path)] == [
        ("rows of block_table", "5 rows (num_reqs)", "4"),
    ]


def test_4_a_full_graph_may_pad_the_rows(tmp_path: Path) -> None:
    recording = five_requests()
    recording.change_group(0, table_shape=(6, 64))
    recording.change(
        ForwardStep,
        0,
        batch_descriptor=BatchDescriptor(24, 6, uniform=True),
        cudagraph_mode="FULL",
    )

    assert broken(recording, tmp_path) == []


def test_4_a_piecewise_graph_may_not(tmp_path: Path) -> None:
    recording = five_requests()
    recording.change_group(0, table_shape=(6, 64))
    recording.change(
        ForwardStep, 0, batch_descriptor=BatchDescriptor(24, 6), cudagraph_mode="PIECEWISE"
    )

    assert len(broken(recording, tmp_path)) == 1


def test_4_seq_lens_without_the_hit(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change_group(3, seq_lens=[8], max_seq_len=8)

    found = broken(recording, tmp_path)

    assert [one[5:] for one in found if one[0] == 4] == [
        ("seq_lens[0]", "40 = 32 computed + 8 scheduled", "8"),
        ("max_seq_len", "40 or more", "8"),
    ]


@pytest.mark.parametrize("wrong", [19, 21])
def test_4_one_token_more_or_less_in_the_first_row(wrong: int, tmp_path: Path) -> None:
    recording = two_in_a_batch()
    recording.change_group(0, query_start_loc=to_runs([0, wrong, 30]))

    assert [one[3:] for one in broken(recording, tmp_path) if one[0] == 4] == [
        (
            *("a", 0, "query_start_loc[1] - query_start_loc[0]"),
            *("20 scheduled tokens", str(wrong)),
        ),
        (
            *("b", 1, "query_start_loc[2] - query_start_loc[1]"),
            *("10 scheduled tokens", str(30 - wrong)),
        ),
    ]


def test_4_max_seq_len_may_be_an_upper_bound_but_not_less(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change_group(0, max_seq_len=1024)
    assert broken(recording, tmp_path) == []

    recording.change_group(0, max_seq_len=39, max_query_len=39)
    assert [one[5:] for one in broken(recording, tmp_path)] == [
        ("max_query_len", "40", "39"),
        ("max_seq_len", "40 or more", "39"),
    ]


def test_4_a_request_without_a_row_and_a_row_without_a_request(tmp_path: Path) -> None:
    recording = two_in_a_batch()
    recording.change(ForwardStep, 1, new_requests=[(1, "stranger-00000000")])

    assert [one[3:] for one in broken(recording, tmp_path) if one[0] == 4] == [
        ("stranger", 1, "request of the row", "a request of this step", "stranger"),
        ("b", None, "row of request #1", "one row", "none"),
    ]


def test_4_rows_are_joined_by_request_not_by_order(tmp_path: Path) -> None:
    recording = Recording()
    a, b = recording.arrive("a", 20), recording.arrive("b", 10)
    admit = {a: Admit([[1, 2]]), b: Admit([[3]])}
    recording.step({a: 20, b: 10}, admit=admit, rows=[b, a])

    assert broken(recording, tmp_path) == []


def test_4_a_step_without_a_worker_record_is_not_checked(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.drop(ForwardStep, 1)

    checker, found = checked(recording, tmp_path)

    assert found == []
    assert checker.coverage[4].checked == 4
    assert checker.coverage[4].unchecked == {"no worker record": 1}


# -- 6: hit blocks were written before --------------------------------------------------------


def test_6_a_hit_block_that_was_never_allocated(tmp_path: Path) -> None:
    recording = Recording()
    number = recording.arrive("a", 20)
    recording.step({number: 4}, admit={number: Admit([[7, 2]], hit=16)})

    assert broken(recording, tmp_path) == [
        (
            *(6, 0, 0, "a", None, "hit block 7, block_table[0]"),
            *("slots 0 .. 15 of the block written before", "never allocated"),
        ),
    ]


def test_6_a_hit_block_whose_last_slot_was_not_written(tmp_path: Path) -> None:
    recording = Recording()
    a, b = recording.arrive("a", 15), recording.arrive("b", 20)
    recording.step({a: 15}, admit={a: Admit([[1]])})
    recording.finish(a)
    recording.step({b: 4}, admit={b: Admit([[1, 2]], hit=16)})

    assert [one[5:] for one in broken(recording, tmp_path)] == [
        (
            "hit block 1, block_table[0]",
            "slots 0 .. 15 of the block written before",
            "slot 15 of the block not written, 1 in all",
        ),
    ]


def test_6_a_block_that_was_allocated_again_must_be_written_again(tmp_path: Path) -> None:
    recording = two_rounds()
    third = recording.arrive("c", 40)
    recording.step(
        {third: 8},
        admit={third: Admit([[1, 2, 5]], hit=32)},
        events=[Allocated(-1, [2, 1])],
    )

    assert [(one[0], one[5], one[7]) for one in broken(recording, tmp_path)] == [
        (6, "hit block 2, block_table[1]", "nothing written since it was allocated"),
    ]


def same_step(order: str) -> Recording:
    """Two equal prompts admitted in one step; the second one hits the first one's block."""
    recording = Recording()
    a, b = recording.arrive("a", 20), recording.arrive("b", 20)
    admit = {a: Admit([[1, 2]]), b: Admit([[1, 3]], hit=16)}
    recording.step({a: 20, b: 4} if order == "ab" else {b: 4, a: 20}, admit=admit)
    return recording


def test_6_a_request_placed_before_may_write_the_hit_block_in_this_step(tmp_path: Path) -> None:
    assert broken(same_step("ab"), tmp_path) == []


def test_6_a_request_placed_behind_may_not(tmp_path: Path) -> None:
    assert [one[0] for one in broken(same_step("ba"), tmp_path)] == [6]


def test_6_tokens_of_a_kv_connector_are_not_known_to_be_written(tmp_path: Path) -> None:
    recording = Recording()
    a, b = recording.arrive("a", 40), recording.arrive("b", 40)
    recording.step({a: 8}, admit={a: Admit([[1, 2, 3]], external=32)})
    recording.step({b: 8}, admit={b: Admit([[1, 2, 4]], hit=32)})

    checker, found = checked(recording, tmp_path)

    assert found == []
    assert checker.coverage[6].unchecked == {"loaded by a KV connector": 2}


def test_6_blocks_from_before_lost_records_are_not_checked(tmp_path: Path) -> None:
    recording = two_rounds()
    last = next(
        index
        for index, one in enumerate(recording.records)
        if isinstance(one, SchedulerStep) and one.step == 3
    )
    recording.records.insert(last, Gap(1))

    checker, found = checked(recording, tmp_path)

    assert found == []
    assert checker.coverage[6].unchecked == {"records were lost before": 2}


def test_6_every_rank_must_have_written_the_block(tmp_path: Path) -> None:
    recording = Recording(ranks=2)
    a, b = recording.arrive("a", 20), recording.arrive("b", 20)
    recording.step({a: 20}, admit={a: Admit([[1, 2]])})
    recording.finish(a)
    recording.step({b: 4}, admit={b: Admit([[1, 3]], hit=16)})
    assert broken(recording, tmp_path) == []

    recording.change_group(0, rank=1, slot_mapping=to_runs([16, *range(16, 31), *range(32, 36)]))
    _, found = checked(recording, tmp_path)
    assert [(one.invariant, one.rank, one.found) for one in found] == [
        (1, 1, "16"),
        (3, 1, "written twice by this row"),
        (11, 1, found[2].found),
        (6, 1, "slot 15 of the block not written, 1 in all"),
    ]


def test_6_memory_is_bounded_by_the_pool(tmp_path: Path) -> None:
    recording = Recording()
    for _ in range(50):
        number = recording.arrive("a", 20)
        recording.step({number: 20}, admit={number: Admit([[1, 2]])})
        recording.finish(number)
    checker = InvariantChecker()
    for step in Run(recording.write(tmp_path)).steps():
        checker.check(step)

    (state,) = checker._engines.values()
    assert len(state.blocks._unknown) == 2
    assert [len(masks) for masks in state.blocks._masks.values()] == [2]
    assert state.scheduler._holders == {}
    assert dict(state.scheduler._held) == {}


# -- all of them, on any schedule -------------------------------------------------------------


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    block_size=st.sampled_from([2, 4, 16]),
    ratio=st.sampled_from([1, 2]),
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_sound_schedule_passes_and_any_moved_slot_does_not(
    block_size: int, ratio: int, prompts: list[int], data: st.DataObject, tmp_path: Path
) -> None:
    recording = Recording(
        [cache_group(block_size=block_size * ratio)], kernel_block_sizes=[block_size]
    )
    free = iter(range(1, 10_000))
    numbers = [recording.arrive(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    pool_block = block_size * ratio
    admit = {
        number: Admit([[next(free) for _ in range(-(-prompt // pool_block))]])
        for number, prompt in zip(numbers, prompts, strict=True)
    }
    recording.step(dict(zip(numbers, prompts, strict=True)), admit=admit)
    assert broken(recording, tmp_path) == []

    group = next(one for one in recording.records if isinstance(one, ForwardStep)).groups[0]
    slots = [slot for start, length in pairs(group) for slot in range(start, start + length)]
    moved = data.draw(st.integers(0, len(slots) - 1))
    slots[moved] += data.draw(st.sampled_from([-1, 1, block_size, 1000]))
    recording.change_group(0, slot_mapping=to_runs(slots))
    found = checked(recording, tmp_path)[1]
    assert [one.invariant for one in found].count(1) == 1
    assert f"slot_mapping[{moved}]" in next(one.what for one in found if one.invariant == 1)


def pairs(group: GroupForward) -> list[tuple[int, int]]:
    runs = group.slot_mapping or []
    return [
        (start, 1) if length < 0 else (start, length)
        for start, length in zip(runs[::2], runs[1::2], strict=True)
    ]


def test_a_damaged_run_length_is_a_damaged_trace(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change_group(0, slot_mapping=[16, 1 << 40])

    with pytest.raises(ValueError, match="a run has length"):
        checked(recording, tmp_path)
