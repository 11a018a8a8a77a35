"""Rows that stay on a device for a while: what is copied when, who waits, whose rows they are."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the tensor cache runs beside vLLM, which brings torch")

from omnicache_cli.tensor_cache import CudaCopies, PlainCopies, TensorCache  # noqa: E402
from tests.unit.tensor_cache_kit import (  # noqa: E402
    LateCopies,
    Share,
    numbered,
    numbers_in,
    step_of,
)

ROW_BYTES = 8


def late(deferred_bytes: int = 10**6) -> tuple[TensorCache, LateCopies]:
    copies = LateCopies()
    return TensorCache(4, deferred_bytes=deferred_bytes, device_copies=copies), copies


def cold(cache: TensorCache, name: str, table: tuple[int, ...], end: int, first: int = 0) -> None:
    cache.begin_step(step_of(1, [Share(name, table, 0, end, 0)], 4, table))
    cache.save({"h": numbered(first, end)})


def decode(cache: TensorCache, name: str, table: tuple[int, ...], position: int) -> None:
    cache.begin_step(step_of(2, [Share(name, table, position, position + 1)], 4))
    cache.save({"h": numbered(position, 1)})


def hit(cache: TensorCache, name: str, table: tuple[int, ...], hit_tokens: int) -> list[int]:
    shares = [Share(name, table, hit_tokens, hit_tokens + 1, hit_tokens)]
    cache.begin_step(step_of(3, shares, 4, table[-1:]))
    cache.save({"h": numbered(hit_tokens, 1)})
    return numbers_in(cache.materialize(name).rows["h"])


def test_rows_wait_until_a_read_needs_them() -> None:
    cache, copies = late()
    cold(cache, "a", (1, 2), 8)
    decode(cache, "b", (5,), 0)
    assert copies.log == ["keep 8", "keep 1"]
    assert cache.stats().deferred_bytes == 9 * ROW_BYTES

    assert hit(cache, "c", (1, 2, 3), 8) == list(range(9))
    assert copies.log == ["keep 8", "keep 1", "keep 1", "start [8, 1]", "wait [8, 1]"]
    assert cache.stats().deferred_bytes == ROW_BYTES  # that of "b"


def test_the_keys_of_one_read_are_one_batch() -> None:
    cache, copies = late()
    cache.begin_step(step_of(1, [Share("a", (1,), 0, 3, 0)], 4, (1,)))
    cache.save({"h": numbered(0, 3), "k": numbered(50, 3, width=5)})
    got = cache.materialize("a")

    assert copies.log == ["keep 3", "keep 3", "start [3, 3]", "wait [3, 3]"]
    assert (numbers_in(got.rows["h"]), numbers_in(got.rows["k"])) == ([0, 1, 2], [50, 51, 52])


def test_over_the_budget_all_that_is_held_is_started_and_nobody_waits() -> None:
    cache, copies = late(deferred_bytes=10 * ROW_BYTES)
    cold(cache, "a", (1, 2), 8)
    decode(cache, "a", (1, 2, 3), 8)
    decode(cache, "a", (1, 2, 3), 9)
    assert copies.log == ["keep 8", "keep 1", "keep 1"]  # exactly the budget
    decode(cache, "a", (1, 2, 3), 10)
    assert copies.log[3:] == ["keep 1", "start [8, 1, 1, 1]"]
    assert cache.stats().deferred_bytes == 11 * ROW_BYTES  # started, not there yet

    copies.arrive()
    decode(cache, "a", (1, 2, 3), 11)  # a step takes what has come
    assert copies.log[5:] == ["keep 1"]
    assert cache.stats().keys["h"].deferred_bytes == ROW_BYTES


@pytest.mark.parametrize("how", ["finish", "abort"])
def test_the_end_of_a_request_starts_its_copies_only(how: str) -> None:
    cache, copies = late()
    cold(cache, "a", (1, 2), 8)
    cold(cache, "b", (3,), 4)
    getattr(cache, how)(["a", "unknown"])

    assert copies.log == ["keep 8", "keep 4", "start [8]"]
    assert hit(cache, "c", (1, 2, 9), 8) == list(range(9))


def test_commit_brings_everything() -> None:
    cache, copies = late()
    cold(cache, "a", (1, 2), 8)
    cold(cache, "b", (3,), 4)
    cache.finish(["a"])
    cache.commit()

    assert copies.log[2:] == ["start [8]", "start [4]", "wait [8]", "wait [4]"]
    assert cache.stats().deferred_bytes == 0
    cache.commit()
    assert copies.log[6:] == []


def test_rows_are_what_they_were_when_they_were_saved() -> None:
    cache, _ = late()
    buffer = numbered(0, 8)
    cache.begin_step(step_of(1, [Share("a", (1, 2), 0, 8, 0)], 4, (1, 2)))
    cache.save({"h": buffer})
    buffer.fill_(-1)
    cache.finish(["a"])
    buffer.fill_(-2)

    assert hit(cache, "c", (1, 2, 9), 8) == list(range(9))


def test_a_late_copy_never_lands_on_a_newer_row() -> None:
    """Block 2 is given away while its rows are under way."""
    cache, copies = late()
    cold(cache, "a", (1, 2), 8)
    cache.finish(["a"])
    cold(cache, "b", (2, 3), 5, first=200)
    cache.finish(["b"])
    first, second = copies.under_way
    second.arrived = True
    decode(cache, "x", (9,), 0)  # b's rows land before a's
    first.arrived = True
    decode(cache, "x", (9,), 1)

    assert hit(cache, "c", (2, 4), 4) == [200, 201, 202, 203, 4]
    assert cache.stats().keys["h"].rows == 4 + 5 + 2 + 1  # a's block 1, b, x, c


def test_rows_under_way_for_a_dropped_block_are_thrown_away() -> None:
    cache, copies = late()
    cold(cache, "a", (1, 2), 8)
    cache.finish(["a"])
    cache.drop_blocks([1, 2])
    copies.arrive()
    cache.commit()

    assert (cache.stats().rows, cache.stats().blocks, cache.stats().deferred_bytes) == (0, 0, 0)


def test_a_demoted_key_lets_go_of_its_deferred_rows() -> None:
    cache, copies = late()
    cold(cache, "a", (1, 2), 8)
    cache.finish(["a"])
    decode(cache, "a", (1, 2, 3), 8)
    cache.begin_step(step_of(3, [Share("a", (1, 2, 3), 9, 10)], 4))
    assert list(cache.save({"h": torch.zeros(7, 2)}).demoted) == ["h"]
    copies.arrive()
    cache.commit()

    assert copies.log == ["keep 8", "start [8]", "keep 1"]
    assert cache.stats().deferred_bytes == 0


def test_without_a_device_rows_are_on_the_cpu_at_once_or_when_asked() -> None:
    at_once = TensorCache(4)
    cold(at_once, "a", (1, 2), 8)
    assert at_once.stats().deferred_bytes == 0
    held = TensorCache(4, device_copies=PlainCopies())
    cold(held, "a", (1, 2), 8)
    assert held.stats().deferred_bytes == 8 * ROW_BYTES
    held.commit()
    assert held.stats().deferred_bytes == 0
    assert hit(at_once, "c", (1, 2, 3), 8) == hit(held, "c", (1, 2, 3), 8) == list(range(9))


# ---------------------------------------------------------------- CUDA, without CUDA


@dataclass
class FakeStream:
    cuda: "FakeCuda"
    name: str

    def wait_event(self, event: "FakeEvent") -> None:
        self.cuda.log.append(f"{self.name} waits for {event.name}")


@dataclass
class FakeEvent:
    cuda: "FakeCuda"
    name: str
    passed: bool = False

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} on {stream.name}")

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.cuda.log.append(f"CPU waits for {self.name}")
        self.passed = True


@dataclass
class FakeCuda:
    """Takes down what `torch.cuda` is told, in order."""

    log: list[str] = field(default_factory=list)
    events: list[FakeEvent] = field(default_factory=list)
    active: str = "main"

    def Stream(self, device: Any) -> FakeStream:
        self.log.append(f"new stream on {device}")
        return FakeStream(self, "side")

    def Event(self) -> FakeEvent:
        self.events.append(FakeEvent(self, f"event{len(self.events)}"))
        return self.events[-1]

    def current_stream(self, device: Any) -> FakeStream:
        return FakeStream(self, "main")

    def stream(self, stream: FakeStream) -> "FakeCuda":
        self.active = stream.name
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.active = "main"


class FakeRows:
    """Rows "on a device": says on which stream they are copied."""

    device = "cuda:0"
    is_cuda = True

    def __init__(self, cuda: FakeCuda, rows: Any) -> None:
        self.cuda = cuda
        self.rows = rows
        self.shape, self.dtype = rows.shape, rows.dtype

    def detach(self) -> "FakeRows":
        return self

    def clone(self) -> "FakeRows":
        self.cuda.log.append(f"clone on {self.cuda.active}")
        return FakeRows(self.cuda, self.rows.clone())

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"rows used by {stream.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    class Host:
        def __init__(self, shape: Any, dtype: Any, pin_memory: bool) -> None:
            fake.log.append(f"host memory{', pinned' * pin_memory}")
            self.rows = torch.zeros(shape, dtype=dtype)

        def copy_(self, source: FakeRows, non_blocking: bool) -> None:
            how = "without waiting" if non_blocking else "waiting"
            fake.log.append(f"copy on {fake.active} {how}")
            self.rows.copy_(source.rows)

    stand_in = SimpleNamespace(empty=Host)
    monkeypatch.setattr("omnicache_cli.tensor_cache.device.torch", stand_in)
    return fake


def test_cuda_rows_are_copied_on_a_side_stream_behind_their_event(cuda: FakeCuda) -> None:
    copies = CudaCopies(cuda)
    source = FakeRows(cuda, numbered(0, 3))
    kept = copies.keep(source)
    assert cuda.log == ["clone on main", "event0 on main"]
    source.rows.fill_(-1)

    copy = copies.start([kept, copies.keep(FakeRows(cuda, numbered(50, 2)))])
    assert cuda.log[4:] == [
        "new stream on cuda:0",
        "side waits for event0",
        "host memory, pinned",
        "copy on side without waiting",
        "rows used by side",
        "side waits for event1",
        "host memory, pinned",
        "copy on side without waiting",
        "rows used by side",
        "event2 on side",
    ]
    assert cuda.active == "main"
    assert copy.done() is False
    assert cuda.log[14:] == []  # asking does not wait

    first, second = copy.wait()
    assert cuda.log[14:] == ["CPU waits for event2"]
    assert (numbers_in(first.rows), numbers_in(second.rows)) == ([0, 1, 2], [50, 51])
    assert copy.done() is True


def test_the_side_stream_is_made_once(cuda: FakeCuda) -> None:
    copies = CudaCopies(cuda)
    for _ in range(3):
        copies.start([copies.keep(FakeRows(cuda, numbered(0, 3)))])

    assert cuda.log.count("new stream on cuda:0") == 1


def test_cpu_rows_never_reach_cuda() -> None:
    cuda = FakeCuda()
    cache = TensorCache(4, device_copies=CudaCopies(cuda))
    cold(cache, "a", (1, 2), 8)

    assert (cuda.log, cache.stats().deferred_bytes) == ([], 0)
