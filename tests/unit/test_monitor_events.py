"""KV events: vLLM's messages, older ones, gaps in them, and what is none."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from omnicache_cli.errors import EngineFailedError, UsageError
from omnicache_cli.monitor import events
from omnicache_cli.monitor.events import END_OF_REPLAY, EventLog, EventReader


def stored(*hashes: int | bytes, **more: Any) -> dict[str, Any]:
    return {
        **{"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None},
        **{"token_ids": [1, 2, 3], "block_size": 32, "lora_id": None, "medium": "GPU"},
        **more,
    }


def removed(*hashes: int | bytes, medium: str | None = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


def message(number: int, *happened: Any, rank: int | None = 0, topic: bytes = b"") -> list[bytes]:
    batch = [1234.5, list(happened), rank]
    return [topic, number.to_bytes(8, "big"), msgspec.msgpack.encode(batch)]


def log_of(*messages: list[bytes]) -> EventLog:
    log = EventLog("tcp://a:1")
    for one in messages:
        log.add(one)
    return log


def test_the_messages_of_vllm_0_30_are_counted() -> None:
    counts = log_of(
        message(0, stored(1, 2), stored(), topic=b"kv-events"),
        message(1, removed(1), removed(b"\x01" * 32, 3), stored(4, a_field_of_tomorrow=1)),
        message(2, {"type": "AllBlocksCleared"}, removed(9, medium="CPU")),
    ).counts

    assert (counts.batches, counts.stored_hashes, counts.evicted_hashes) == (3, 3, 3)
    assert (counts.other_removed_hashes, counts.clears) == (1, 1)
    assert counts.is_complete


def test_the_arrays_of_an_older_vllm_are_counted() -> None:
    counts = log_of(
        message(
            0,
            ["BlockStored", [1, 2], None, [5] * 32, 16, None],
            ["BlockRemoved", [1]],
            ["BlockRemoved", [2], "CPU"],
            ["AllBlocksCleared"],
            rank=None,
        )
    ).counts

    assert (counts.stored_hashes, counts.evicted_hashes) == (2, 1)
    assert (counts.other_removed_hashes, counts.clears) == (1, 1)
    assert counts.is_complete


def test_a_gap_is_noticed_and_said() -> None:
    log = EventLog("tcp://a:1")
    assert log.add(message(5)) is None  # what came before is before the watch
    assert log.add(message(6)) is None
    assert log.add(message(10, removed(1))) == (7, 9)

    assert log.counts.missed_batches == 3
    assert log.notes() == [
        "tcp://a:1: 3 batches of KV events never came, so evictions are at least these; "
        "--events-replay asks for them again"
    ]
    for number in (7, 8, 9):
        log.add_replayed(message(number, removed(number)))
    assert (log.counts.missed_batches, log.counts.evicted_hashes) == (0, 4)
    assert log.notes() == []


def test_each_rank_numbers_its_own() -> None:
    log = log_of(message(0, rank=0), message(0, rank=1), message(1, rank=0), message(1, rank=1))

    assert log.counts.missed_batches == 0
    assert log.counts.restarts == 0


def test_a_publisher_that_starts_again_is_no_gap() -> None:
    log = log_of(message(7), message(0, removed(1)), message(1))

    assert (log.counts.restarts, log.counts.missed_batches) == (1, 0)
    assert log.notes() == ["tcp://a:1: the publisher has started again 1x"]
    late = log_of(message(7), message(2))
    assert (late.counts.restarts, late.counts.missed_batches) == (1, 2)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"one"],
        [b"", b"\x00" * 8],
        [b"", b"\x00" * 7, msgspec.msgpack.encode([1.0, []])],
        [b"", b"\x00" * 8, b"\xc1 no msgpack"],
        [b"", b"\x00" * 8, msgspec.msgpack.encode({"a": 1})],
        message(0, {"type": "BlockStored", "block_hashes": "x"}),
        message(0, {"type": "SomethingNew"}),
        message(0, {"no": "type"}),
        message(0, []),
        message(0, ["BlockRemoved"]),
        message(0, 5),
    ],
)
def test_what_is_no_event_is_counted_and_said(frames: list[bytes]) -> None:
    log = log_of(frames)

    assert log.counts.unreadable == 1
    assert not log.counts.is_complete
    assert log.notes() == [
        "tcp://a:1: 1 messages or events cannot be read as vLLM's KV events; is it the right "
        "endpoint?"
    ]


# -- sockets ------------------------------------------------------------------------------------


@contextmanager
def publisher() -> Iterator[tuple[Any, str, Any, str]]:
    """As vLLM's: a PUB socket, and a ROUTER for what was missed."""
    import zmq

    context = zmq.Context()
    publish, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    try:
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (publish, replay)]
        yield publish, f"tcp://127.0.0.1:{ports[0]}", replay, f"tcp://127.0.0.1:{ports[1]}"
    finally:
        publish.close(linger=0)
        replay.close(linger=0)
        context.term()


def wait_for(reader: EventReader, batches: int) -> None:
    deadline = time.monotonic() + 10
    while reader.logs[0].counts.batches < batches and time.monotonic() < deadline:
        reader.wait_until(time.monotonic() + 0.02)


def first_message(publish: Any, reader: EventReader) -> None:
    """A subscription takes a moment: the same number is sent until it arrives."""
    deadline = time.monotonic() + 10
    while not reader.logs[0].counts.batches and time.monotonic() < deadline:
        publish.send_multipart(message(0))
        reader.wait_until(time.monotonic() + 0.02)
    reader.wait_until(time.monotonic() + 0.1)
    reader.logs[0] = EventLog(reader.logs[0].endpoint)


def test_events_are_read_from_a_socket() -> None:
    with publisher() as (publish, endpoint, _, _), EventReader([endpoint], []) as reader:
        first_message(publish, reader)
        for number in range(1, 501):
            publish.send_multipart(message(number, removed(number)))
        wait_for(reader, 500)

        (counts,) = reader.snapshot()
        assert (counts.batches, counts.evicted_hashes, counts.missed_batches) == (500, 500, 0)


def test_what_was_missed_is_asked_for_again() -> None:
    with (
        publisher() as (publish, endpoint, replay, replays),
        EventReader([endpoint], [replays]) as reader,
    ):
        first_message(publish, reader)
        asked: list[int] = []

        def answer() -> None:
            client, _, first = replay.recv_multipart()
            asked.append(int.from_bytes(first, "big"))
            for number in range(2, 6):  # vLLM sends all that it has from there
                batch = message(number, removed(number))
                replay.send_multipart([client, b"", *batch])
            replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

        server = threading.Thread(target=answer)
        server.start()
        publish.send_multipart(message(1))
        publish.send_multipart(message(5, removed(5)))
        wait_for(reader, 5)
        server.join()

        (counts,) = reader.snapshot()
        assert asked == [2]
        assert (counts.evicted_hashes, counts.replayed_batches) == (4, 3)
        assert counts.missed_batches == 0


def test_a_replay_that_never_answers_leaves_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "REPLAY_SECONDS", 0.1)
    with (
        publisher() as (publish, endpoint, _, replays),
        EventReader([endpoint], [replays]) as reader,
    ):
        first_message(publish, reader)
        publish.send_multipart(message(1))
        publish.send_multipart(message(5))
        wait_for(reader, 2)

        assert reader.snapshot()[0].missed_batches == 3


def test_nobody_at_the_endpoint_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CONNECT_SECONDS", 0.1)
    with (
        pytest.raises(EngineFailedError, match=r"nobody publishes KV events at tcp://127\.0"),
        EventReader(["tcp://127.0.0.1:1"], []),
    ):
        pass


@pytest.mark.parametrize(
    "endpoint", ["localhost:5557", "tcp://*:5557", "http://h:1", "tcp://h:1\n"]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is no endpoint to connect to"):
        EventReader([endpoint], [])


def test_a_replay_belongs_to_each_endpoint() -> None:
    with pytest.raises(UsageError, match="1 --events-replay for 2 --events"):
        EventReader(["tcp://a:1", "tcp://a:2"], ["tcp://a:3"])
