"""KV events: what vLLM publishes of its block pool over ZMQ, counted.

Each message has a topic, a sequence number and one batch in msgpack. Messages that never came
show as a gap in the numbers; where the server has a replay endpoint they are asked for again.
The structs are those of vllm/distributed/kv_events.py, with the fields that are counted.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec

from omnicache_cli import advice
from omnicache_cli.errors import EngineFailedError, EngineMissingError, UsageError

if TYPE_CHECKING:
    import zmq

MAX_MESSAGE_BYTES = 64 << 20
MAX_WAITING = 50_000
"""Messages that ZMQ keeps while nobody reads; more are lost, which shows as a gap."""

MAX_REPLAYED = 100_000
CONNECT_SECONDS = 5.0
REPLAY_SECONDS = 3.0
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
POOL_MEDIA = (None, "GPU")
"""Where the engine's own blocks lie, by vLLM's name also on a CPU; others are tiers behind it."""

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"


class Batch(msgspec.Struct, array_like=True, gc=False):
    """What happened in one step of one engine."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, gc=False):
    """The fields of any event that are counted."""

    type: str
    block_hashes: list[bytes | int] = []
    medium: str | None = None


@dataclass(slots=True)
class EventCounts:
    """Counts since the endpoint was listened to. A block may have several hashes."""

    batches: int = 0
    stored_hashes: int = 0
    evicted_hashes: int = 0  # of the engine's own pool
    other_removed_hashes: int = 0  # of tiers behind it
    clears: int = 0  # the prefix cache was reset
    missed_batches: int = 0  # that were sent and never came
    replayed_batches: int = 0
    restarts: int = 0
    unreadable: int = 0

    def copy(self) -> "EventCounts":
        from dataclasses import replace

        return replace(self)

    @property
    def is_complete(self) -> bool:
        return not self.missed_batches and not self.unreadable


@dataclass(slots=True)
class EventLog:
    """Counts the messages of one endpoint. Knows no socket.

    Each data-parallel rank numbers its own batches.
    """

    endpoint: str
    counts: EventCounts = field(default_factory=EventCounts)
    _last: dict[int, int] = field(default_factory=dict)  # sequence number by rank

    def add(self, frames: Sequence[bytes]) -> tuple[int, int] | None:
        """Count one message. The first and last sequence number of a gap before it, if there is."""
        batch = self._decoded(frames)
        if batch is None:
            return None
        number, rank = int.from_bytes(frames[1], "big"), batch.data_parallel_rank or 0
        last = self._last.get(rank)
        self._last[rank] = number
        gap = None
        if last is not None and number <= last:  # the publisher numbers from 0 again
            self.counts.restarts += 1
            self.counts.missed_batches += number
        elif last is not None and number > last + 1:
            self.counts.missed_batches += number - last - 1
            gap = (last + 1, number - 1)
        self._count(batch)
        return gap

    def add_replayed(self, frames: Sequence[bytes]) -> None:
        """Count a batch of a gap that `add` named."""
        batch = self._decoded(frames)
        if batch is not None:
            self.counts.missed_batches -= 1
            self.counts.replayed_batches += 1
            self._count(batch)

    def _decoded(self, frames: Sequence[bytes]) -> Batch | None:
        if len(frames) == 3 and len(frames[1]) == 8:
            with contextlib.suppress(msgspec.DecodeError):
                return _BATCH.decode(frames[2])
        self.counts.unreadable += 1
        return None

    def _count(self, batch: Batch) -> None:
        self.counts.batches += 1
        for raw in batch.events:
            try:
                event = _event(raw)
            except (msgspec.DecodeError, IndexError, TypeError):
                self.counts.unreadable += 1
                continue
            num_hashes = len(event.block_hashes)
            if event.type == STORED:
                self.counts.stored_hashes += num_hashes
            elif event.type == REMOVED and event.medium in POOL_MEDIA:
                self.counts.evicted_hashes += num_hashes
            elif event.type == REMOVED:
                self.counts.other_removed_hashes += num_hashes
            elif event.type == CLEARED:
                self.counts.clears += 1
            else:
                self.counts.unreadable += 1

    def notes(self) -> list[str]:
        """What a reader must know of these counts."""
        counts, lines = self.counts, []
        if counts.missed_batches:
            lines.append(
                f"{self.endpoint}: {counts.missed_batches} batches of KV events never came, so "
                "evictions are at least these; --events-replay asks for them again"
            )
        if counts.unreadable:
            lines.append(
                f"{self.endpoint}: {counts.unreadable} messages or events cannot be read as vLLM's "
                "KV events; is it the right endpoint?"
            )
        if counts.restarts:
            lines.append(f"{self.endpoint}: the publisher has started again {counts.restarts}x")
        return lines


_BATCH = msgspec.msgpack.Decoder(Batch)
_EVENT = msgspec.msgpack.Decoder(Event)
_ARRAY = msgspec.msgpack.Decoder(list[msgspec.Raw])
_HASHES = msgspec.msgpack.Decoder(list[bytes | int])
_MEDIUM_AT = {STORED: 6, REMOVED: 2}


def _event(raw: msgspec.Raw) -> Event:
    """A map of names; an older vLLM sends an array whose first item is the type."""
    first = bytes(memoryview(raw)[:1])
    if not (b"\x90" <= first <= b"\x9f" or first in (b"\xdc", b"\xdd")):
        return _EVENT.decode(raw)
    items = _ARRAY.decode(raw)
    kind = msgspec.msgpack.decode(items[0], type=str)
    if kind not in _MEDIUM_AT:
        return Event(kind)
    place = _MEDIUM_AT[kind]
    medium: Any = msgspec.msgpack.decode(items[place]) if len(items) > place else None
    return Event(kind, _HASHES.decode(items[1]), medium if isinstance(medium, str) else None)


# -- sockets ----------------------------------------------------------------------------------


class EventReader:
    """Listens to several endpoints. Use it as a context."""

    def __init__(self, endpoints: Sequence[str], replays: Sequence[str]) -> None:
        if replays and len(replays) != len(endpoints):
            raise UsageError(
                f"{len(replays)} --events-replay for {len(endpoints)} --events; "
                "give one for each, in the same order"
            )
        for one in (*endpoints, *replays):
            if not one.startswith(("tcp://", "ipc://")) or "*" in one or not one.isprintable():
                raise UsageError(
                    f"{one!r} is no endpoint to connect to; write it like tcp://localhost:5557"
                )
        self.logs = [EventLog(one) for one in endpoints]
        self._replays = list(replays)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._context: zmq.Context[Any] | None = None

    def __enter__(self) -> Self:
        """EngineFailedError: nobody publishes at an endpoint."""
        if not self.logs:
            return self
        try:
            import zmq
        except ImportError:
            raise EngineMissingError(
                "pyzmq is not installed, so no KV events can be read; "
                f"{advice.install_extra('monitor')}"
            ) from None
        self._context = zmq.Context()
        try:
            for log in self.logs:
                self._sockets.append(_connected(self._context, log.endpoint))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for one in self._sockets:
            one.close(linger=0)
        if self._context is not None:
            self._context.destroy(linger=0)

    def wait_until(self, moment: float) -> None:
        """Counts what comes until the monotonic clock says `moment`, and all that came before."""
        if not self._sockets:
            time.sleep(max(0.0, moment - time.monotonic()))
            return
        import zmq

        poller = zmq.Poller()
        for one in self._sockets:
            poller.register(one, zmq.POLLIN)
        while True:
            left = max(0.0, moment - time.monotonic())
            ready = dict(poller.poll(int(left * 1000)))
            for number, one in enumerate(self._sockets):
                if one in ready:
                    self._take(number, moment)
            if left <= 0 and not ready:
                return
            if time.monotonic() > moment + REPLAY_SECONDS:  # they come faster than they are counted
                return

    def _take(self, number: int, moment: float) -> None:
        import zmq

        for _ in range(1000):
            try:
                frames = self._sockets[number].recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            gap = self.logs[number].add(frames)
            if gap is not None and self._replays:
                self._replay(number, *gap)

    def _replay(self, number: int, first: int, last: int) -> None:
        """Ask for the batches first .. last again; what does not come stays missing."""
        import zmq

        assert self._context is not None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        deadline = time.monotonic() + REPLAY_SECONDS
        try:
            socket.connect(self._replays[number])
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            for _ in range(MAX_REPLAYED):
                if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                    return
                frames = socket.recv_multipart()
                if len(frames) < 3 or frames[-2] == END_OF_REPLAY:
                    return
                if first <= int.from_bytes(frames[-2], "big") <= last:
                    self.logs[number].add_replayed([b"", *frames[-2:]])
        finally:
            socket.close(linger=0)

    def snapshot(self) -> list[EventCounts]:
        return [log.counts.copy() for log in self.logs]


def _connected(context: "zmq.Context[Any]", endpoint: str) -> "zmq.Socket[bytes]":
    import zmq

    socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    watch = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    is_connected = False
    try:
        socket.connect(endpoint)
        is_connected = bool(watch.poll(int(CONNECT_SECONDS * 1000)))
    except zmq.ZMQError as error:
        raise UsageError(f"cannot connect to {endpoint}: {error}; check the endpoint") from None
    finally:
        socket.disable_monitor()
        watch.close(linger=0)
        if not is_connected:
            socket.close(linger=0)
    if not is_connected:
        raise EngineFailedError(
            f"nobody publishes KV events at {endpoint}; start the server with "
            "--kv-events-config, and name its endpoint: rank N of a data-parallel server "
            "publishes N ports higher"
        )
    return socket
