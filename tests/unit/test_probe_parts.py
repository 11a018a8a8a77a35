"""Parts of the probe that need numpy but no engine."""

from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="the probe runs beside vLLM, which brings numpy")

from omnicache_cli.engine.probe.device import PinnedCopy  # noqa: E402
from omnicache_cli.engine.probe.live import LiveGroup, digest_of  # noqa: E402
from omnicache_cli.engine.probe.vectors import (  # noqa: E402
    FULL_COMPARE_CELLS,
    TableMirror,
    encode_slots,
    runs_of,
    starts_of,
)
from omnicache_cli.trace import digest  # noqa: E402
from omnicache_cli.trace.records import (  # noqa: E402
    ForwardStep,
    GroupForward,
    WorkerSource,
    from_runs,
)
from omnicache_cli.trace.steps import WorkerState  # noqa: E402

WORKER = WorkerSource(1, "e", "R", 0, 0, 0, "cpu", ["M"], [16], {}, "bfloat16")


@pytest.mark.parametrize("length", [0, 1, 5, 80, 81, 500])
@pytest.mark.parametrize("gap", [1, 2])
def test_runs_of_an_array_decode_to_it(length: int, gap: int) -> None:
    values = [index + index // 7 * gap for index in range(length)]
    assert from_runs(runs_of(np.array(values, dtype=np.int64))) == values


@pytest.mark.parametrize("values", [[], [0], [0, 1, 2, 3], [0, 2, 2, 3], [1, 2, 3], [0, 1, 1, 3]])
def test_starts_of_a_batch_decode_to_it(values: list[int]) -> None:
    assert from_runs(starts_of(np.array(values, dtype=np.int32))) == values


@pytest.mark.parametrize(
    ("slots", "one_each", "fields"),
    [
        (None, False, {}),
        ([16, 17, 18], False, {"slot_mapping": [16, 3], "num_slot_padding": 0}),
        ([16, 17, -1, -1, -1], False, {"slot_mapping": [16, 2], "num_slot_padding": 3}),
        ([16, -1, 18, -1], False, {"slot_mapping": [16, 1, -1, 1, 18, 1], "num_slot_padding": 1}),
        ([-1, -1], False, {"slot_mapping": [], "num_slot_padding": 2}),
        ([40, 7, -1], True, {"slots": [40, 7], "num_slot_padding": 1}),
        ([], True, {"slots": [], "num_slot_padding": 0}),
    ],
)
def test_slots_are_encoded_with_their_padding_counted(
    slots: list[int] | None, one_each: bool, fields: dict[str, Any]
) -> None:
    array = None if slots is None else np.array(slots, dtype=np.int64)
    assert encode_slots(array, one_each=one_each) == fields


def rebuilt(steps: list[list[list[int]]], width: int = 8) -> list[list[list[int]]]:
    """Tables of some steps, through the mirror's changes and the reader's state."""
    mirror, state, seen = TableMirror(), WorkerState(WORKER), []
    rows = max(len(step) for step in steps)
    table = np.full((rows, width), 99, dtype=np.int32)
    for number, step in enumerate(steps):
        for row, ids in enumerate(step):
            table[row, : len(ids)] = ids
        used = np.array([len(ids) for ids in step], dtype=np.int32)
        group = GroupForward(1, 1, 1, block_table=mirror.changes(table, used))
        names = [(row, f"r{row}") for row in range(len(step))]
        record = ForwardStep(
            1, number, 0, 0, 0, 0, len(step), [group], names, list(range(len(step)))
        )
        seen.append([list(row) for row in state.step(record).groups[0].block_table])
    return seen


def test_only_changes_are_told_and_the_reader_rebuilds_every_table() -> None:
    steps = [
        [[1, 2, 3], [4]],
        [[1, 2, 3], [4]],
        [[1, 2, 3, 5], [4, 6]],
        [[7, 8]],  # shorter, other ids, one row less
        [[7, 8], [4, 6]],  # the row that left comes back
        [[7, 9], [4, 6]],  # an id changes in place
        [[7], [4, 6], [1, 2, 3, 4, 5, 6, 7, 8]],
    ]
    assert rebuilt(steps) == steps


def test_an_unchanged_table_tells_nothing() -> None:
    mirror = TableMirror()
    table, used = np.array([[1, 2, 0]], dtype=np.int32), np.array([2], dtype=np.int32)
    assert mirror.changes(table, used) == [(0, 0, [1, 2])]
    table[0, 2] = 77  # behind the used columns: nobody reads it
    assert mirror.changes(table, used) == []


def test_a_table_may_get_wider_and_only_the_new_columns_are_told() -> None:
    mirror = TableMirror()
    assert mirror.changes(np.array([[1, 2]]), np.array([2])) == [(0, 0, [1, 2])]
    assert mirror.changes(np.array([[1, 2, 7, 8]]), np.array([3])) == [(0, 2, [7, 1])]
    assert mirror.changes(np.array([[1, 2, 7]]), np.array([3])) == []
    assert mirror.changes(np.array([[1, 5], [6, 0]]), np.array([2, 1])) == [
        (0, 1, [5, 1]),
        (1, 0, [6, 1]),
    ]


def test_a_step_whose_table_was_not_read_says_so_and_changes_nothing_for_the_next() -> None:
    mirror, state = TableMirror(), WorkerState(WORKER)
    first = mirror.changes(np.array([[1, 2], [3, 0]]), np.array([2, 1]))
    last = mirror.changes(np.array([[1, 2], [3, 4]]), np.array([2, 2]))
    seen = []
    for number, (rows, changes) in enumerate([([0, 1], first), ([0], None), ([0, 1], last)]):
        group = GroupForward(1, 1, 1, block_table=changes)
        names = [(0, "a"), (1, "b")]
        record = ForwardStep(1, number, 0, 0, 0, 0, len(rows), [group], names, rows)
        seen.append(state.step(record).groups[0].block_table)
    assert last == [(1, 1, [4, 1])]
    assert seen == [([1, 2], [3]), None, ([1, 2], [3, 4])]


def test_a_large_table_is_compared_a_part_at_a_time_and_nothing_stays_unseen() -> None:
    rows, width = 64, FULL_COMPARE_CELLS // 16
    mirror = TableMirror()
    table = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    used = np.full(rows, width, dtype=np.int32)
    assert len(mirror.changes(table, used)) == rows
    table[33, 5] = -7
    found = [change for _ in range(rows) for change in mirror.changes(table, used)]
    assert [(row, first) for row, first, _ in found] == [(33, 5)]
    used[3] -= 1  # a length that changes is seen at once
    assert mirror.changes(table, used) == [(3, width - 1, [])]


def live(**changes: Any) -> LiveGroup:
    fields: dict[str, Any] = {
        "num_actual_tokens": 3,
        "max_query_len": 2,
        "max_seq_len": 20,
        "query_start_loc": np.array([0, 2, 3], dtype=np.int32),
        "seq_lens": np.array([20, 4], dtype=np.int32),
        "slot_mapping": np.array([34, 35, 51], dtype=np.int64),
        "device_slot_mapping": None,
        "device_block_table": None,
        "block_table": np.array([[1, 2, 9], [3, 9, 9]], dtype=np.int32),
        "num_blocks": np.array([2, 1], dtype=np.int32),
        "table_shape": (2, 3),
        "causal": True,
        "use_cascade": None,
        "common_prefix_len": None,
    }
    return LiveGroup(**{**fields, **changes})


def recorded_digest(group: GroupForward) -> str:
    record = ForwardStep(1, 0, 0, 0, 0, 0, 2, [group], [(0, "a"), (1, "b")], [0, 1])
    return digest.digest_of(WorkerState(WORKER).step(record))


def test_the_digest_of_live_tensors_equals_that_of_the_record() -> None:
    group = GroupForward(
        3,
        2,
        20,
        [0, 1, 2, 2],
        [20, 4],
        [34, 2, 51, 1],
        block_table=[(0, 0, [1, 2]), (1, 0, [3, 1])],
    )
    assert digest_of(["a", "b"], [live()]) == recorded_digest(group)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_actual_tokens": 4},
        {"seq_lens": np.array([20, 5], dtype=np.int32)},
        {"slot_mapping": np.array([34, 35, 52], dtype=np.int64)},
        {"slot_mapping": None},
        {"block_table": np.array([[1, 4, 9], [3, 9, 9]], dtype=np.int32)},
        {"num_blocks": np.array([1, 2], dtype=np.int32)},
    ],
)
def test_any_difference_in_the_batch_changes_the_digest(changes: dict[str, Any]) -> None:
    assert digest_of(["a", "b"], [live(**changes)]) != digest_of(["a", "b"], [live()])
    assert digest_of(["a", "c"], [live()]) != digest_of(["a", "b"], [live()])


def test_what_lies_behind_the_used_columns_does_not_change_the_digest() -> None:
    other = np.array([[1, 2, 7], [3, 8, 7]], dtype=np.int32)
    assert digest_of(["a"], [live(block_table=other)]) == digest_of(["a"], [live()])


class FakeTorch:
    """A device that copies when it is told to; no real device is here to test with."""

    def __init__(self) -> None:
        self.cuda = self
        self.done = False
        self.waited = 0

    def empty(self, capacity: int, dtype: Any, pin_memory: bool) -> "FakeBuffer":
        assert pin_memory
        return FakeBuffer(np.zeros(capacity, dtype=dtype))

    def Event(self) -> "FakeTorch":
        return self

    def record(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class FakeBuffer:
    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> "FakeBuffer":
        return FakeBuffer(self.values[part])

    def view(self, shape: tuple[int, ...]) -> "FakeBuffer":
        return FakeBuffer(self.values.reshape(shape))

    def copy_(self, other: Any, non_blocking: bool) -> None:
        assert non_blocking
        self.values[:] = other

    def numpy(self) -> Any:
        return self.values


def test_a_copy_from_a_device_is_read_once_and_only_when_it_has_arrived() -> None:
    torch = FakeTorch()
    copy = PinnedCopy(torch, 8, np.int64)
    assert copy.take() is None
    assert copy.start(np.array([5, 6, -1]))
    torch.done = True
    assert copy.take().tolist() == [5, 6, -1]
    assert copy.take() is None
    assert copy.start(np.array([[1, 2], [3, 4]]))
    torch.done = True
    assert copy.take().tolist() == [[1, 2], [3, 4]]
    assert not copy.start(np.arange(9))  # longer than any batch of this engine
    assert copy.take() is None


def test_a_step_never_gets_the_slots_of_the_step_before() -> None:
    torch = FakeTorch()
    copy = PinnedCopy(torch, 8, np.int64)
    assert copy.start(np.array([5, 6, -1]))
    assert copy.take() is None  # on its way: given up, not waited for
    assert not copy.start(np.array([1]))  # and its buffer is not written over
    torch.done = True
    assert copy.take() is None
    assert copy.start(np.array([2]))
    torch.done = True
    assert copy.take().tolist() == [2]
