"""The cache of one engine stage: saves each step's rows by slot and gives a request its rows back.

Call order, on one thread: `begin_step`, the forward pass, `save`, then `materialize` of any request
of the step, any number of times. `finish`, `abort`, `drop_blocks` and `commit` between steps.

Who owns what: tensors given to `save` stay the caller's, who may overwrite them as soon as it
returns; rows that enter are copied before that. Rows from `materialize` are the receiver's own.
Payload is handed through, not copied: it is the caller's object, with whatever becomes of it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from omnicache_cli.errors import OmnicacheError
from omnicache_cli.tensor_cache.deferred import DeferredWrites
from omnicache_cli.tensor_cache.device import CudaCopies, DeviceCopies
from omnicache_cli.tensor_cache.layout import BadStepError, Ints, RequestRows, StepLayout, slots_of
from omnicache_cli.tensor_cache.missing import Reason, RowsMissingError
from omnicache_cli.tensor_cache.rule import why_changed, why_not
from omnicache_cli.tensor_cache.store import Places, RowStore, Span

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save` did with each output."""

    step: int
    stored: tuple[str, ...]  # keys whose rows entered, in the order of the outputs
    payload: Mapping[str, Any]  # the others: the very objects
    refused: Mapping[str, str]  # keys that are payload for good from this step on: why
    demoted: Mapping[str, str]  # those of them that had rows before; the rows are gone


@dataclass(frozen=True, slots=True, eq=False)
class Materialized:
    """One request's rows of a step.

    In the step of its admission from position 0: the restored prefix, then the step's rows. In
    later steps the step's rows only; concatenate them over the steps for the whole prompt.
    """

    request_id: str
    step: int
    first_position: int  # of the rows of every key
    num_restored: int  # rows at the front that were read for a prefix hit
    rows: Mapping[str, Tensor]  # by key: on the CPU, (positions, *row shape)
    payload: Mapping[str, Any]  # of the whole step


@dataclass(frozen=True, slots=True)
class KeyStats:
    rows: int  # that can be restored
    blocks: int  # with rows
    bytes: int  # CPU memory, room for growth included
    deferred_bytes: int  # rows that are still on a device


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Sums over the keys; two keys with rows in one block count it twice."""

    rows: int
    blocks: int
    bytes: int
    deferred_bytes: int
    keys: Mapping[str, KeyStats]


@dataclass(slots=True)
class _Step:
    layout: StepLayout
    places: Places
    requests: Mapping[str, RequestRows]
    hits: Mapping[str, Span]  # by request: what it reads; the block tables are copied here
    saved: Saved | None = None


class TensorCache:
    """Rows of per-token tensors by slot, restored on a prefix hit.

    `deferred_bytes`: rows that may wait on a device for their copy to the CPU. `device_copies`: how
    they wait and are copied; None: CUDA tensors wait, CPU tensors are copied at once.
    """

    def __init__(
        self,
        block_size: int,
        *,
        deferred_bytes: int = 64 * MIB,
        device_copies: DeviceCopies | None = None,
    ) -> None:
        if block_size < 1:
            raise BadStepError(f"block size {block_size} is not positive; give the engine's")
        self._block_size = block_size
        self._deferred = DeferredWrites(device_copies or CudaCopies(), deferred_bytes)
        self._stores: dict[str, RowStore] = {}
        self._refused: dict[str, str] = {}  # keys that are payload for good: why
        self._last_write = 0
        self._step: _Step | None = None

    # ------------------------------------------------------------------ a step

    def begin_step(self, layout: StepLayout) -> None:
        """Before the forward pass: forgets the rows of new blocks, and of an unsaved step.

        Raises BadStepError for a layout that contradicts itself.
        """
        if problems := layout.problems(self._block_size):
            raise BadStepError(
                f"step {layout.step} has no sound layout: {problems[0]}; nothing was changed"
            )
        self._forget_unsaved_rows()
        self._deferred.land_ready()
        self.drop_blocks(layout.new_block_ids)
        self._step = _Step(
            layout,
            Places(*layout.blocks_and_offsets(self._block_size)),
            {request.request_id: request for request in layout.requests},
            {one.request_id: self._span_of(one) for one in layout.requests if one.hit_tokens},
        )

    def save(self, outputs: Mapping[str, Any]) -> Saved:
        """After the forward pass, once: rows of per-token keys enter, the others are payload.

        A tensor that breaks the rule makes its key payload for good, whatever it looks like later:
        in a decode step any per-request tensor has as many rows as there are tokens.
        """
        step = self._current()
        if step.saved is not None:
            raise BadStepError(f"step {step.layout.step} was saved before; begin the next one")
        self._deferred.land_ready()
        self._last_write += 1
        stored: list[str] = []
        payload: dict[str, Any] = {}
        refused: dict[str, str] = {}
        demoted: dict[str, str] = {}
        for key, value in outputs.items():
            if not self._judge(key, value, step.layout, refused, demoted):
                payload[key] = value
                continue
            stored.append(key)
            self._write(key, value[: step.layout.num_tokens], step)
        for key in self._stores.keys() - stored:  # the slots have new tokens, without rows of it
            self._stores[key].void(step.places)
        step.saved = Saved(step.layout.step, tuple(stored), payload, refused, demoted)
        return step.saved

    def materialize(self, request_id: str, keys: Collection[str] | None = None) -> Materialized:
        """This request's rows of the current step, of every key saved in it or of `keys` only.

        Raises RowsMissingError where a prefix hit counts on rows that are not there, or the step is
        not saved yet.
        """
        step = self._current()
        request = step.requests.get(request_id)
        if request is None:
            raise BadStepError(
                f"request {request_id} has no rows in step {step.layout.step}; "
                "materialize it in a step that schedules it"
            )
        if step.saved is None:
            raise self._not_saved(step, request)
        wanted = step.saved.stored if keys is None else tuple(keys)
        if unknown := [key for key in wanted if key not in step.saved.stored]:
            raise BadStepError(
                f"key {unknown[0]} has no rows in step {step.layout.step}; "
                f"it has those of {', '.join(step.saved.stored) or 'no key'}"
            )
        span = step.hits.get(request_id) or self._span_of(request)
        found = {key: self._stores[key].find_span(span) for key in wanted}
        for key, (_, writes) in found.items():
            if not writes.all():
                raise self._missing(key, request, span, np.flatnonzero(writes == 0))
        self._deferred.land((self._stores[key], writes) for key, (_, writes) in found.items())
        return Materialized(
            request_id=request_id,
            step=step.layout.step,
            first_position=first_position_of(request),
            num_restored=request.hit_tokens or 0,
            rows={
                key: self._stores[key].take_span(span, frames) for key, (frames, _) in found.items()
            },
            payload=step.saved.payload,
        )

    # ------------------------------------------------------------------ between steps

    def finish(self, request_ids: Iterable[str]) -> None:
        """Starts the copies of their rows on a device. The rows stay, as the blocks do."""
        self._deferred.start_of(request_ids)

    def abort(self, request_ids: Iterable[str]) -> None:
        """As `finish`: an aborted request's blocks can be hit all the same."""
        self._deferred.start_of(request_ids)

    def drop_blocks(self, block_ids: Iterable[int]) -> None:
        """Forgets the rows of these blocks: they were evicted. Their memory is used again."""
        blocks = np.array(list(block_ids), np.int64)
        if len(blocks) == 0:
            return
        if blocks.min() < 0:
            raise BadStepError(f"block {blocks.min()} has a negative id; drop ids of the pool")
        for store in self._stores.values():
            store.drop(blocks)

    def commit(self) -> None:
        """Brings all deferred rows to the CPU, and waits for them."""
        self._deferred.land_all()

    def stats(self) -> CacheStats:
        keys = {
            key: KeyStats(
                rows=store.num_rows,
                blocks=store.num_blocks,
                bytes=store.num_bytes,
                deferred_bytes=self._deferred.bytes_of(store),
            )
            for key, store in self._stores.items()
        }
        return CacheStats(
            rows=sum(one.rows for one in keys.values()),
            blocks=sum(one.blocks for one in keys.values()),
            bytes=sum(one.bytes for one in keys.values()),
            deferred_bytes=self._deferred.num_bytes,
            keys=keys,
        )

    # ------------------------------------------------------------------ inside

    def _current(self) -> _Step:
        if self._step is None:
            raise BadStepError("no step has begun; call begin_step first")
        return self._step

    def _forget_unsaved_rows(self) -> None:
        """The forward pass of an unsaved step may have run: its slots hold other tokens now."""
        if self._step is None or self._step.saved is not None:
            return
        for store in self._stores.values():
            store.void(self._step.places)

    def _judge(
        self,
        key: str,
        value: Any,
        layout: StepLayout,
        refused: dict[str, str],
        demoted: dict[str, str],
    ) -> bool:
        """Whether this value's rows enter. Notes a key that becomes payload for good."""
        if key in self._refused or not isinstance(value, Tensor) or layout.num_tokens == 0:
            return False
        store = self._stores.get(key)
        reason = why_not(key, value, layout)
        if reason is None and store is not None:
            reason = why_changed(key, value, store.row_shape, store.dtype)
        if reason is None:
            return True
        self._refused[key] = refused[key] = reason
        if store is not None:
            demoted[key] = reason
            self._deferred.forget(store)
            del self._stores[key]
        return False

    def _write(self, key: str, rows: Tensor, step: _Step) -> None:
        store = self._stores.get(key)
        if store is None:
            store = RowStore(self._block_size, tuple(rows.shape[1:]), rows.dtype)
            self._stores[key] = store
        index = store.claim(step.places, self._last_write)
        if self._deferred.keeps(rows):
            request_ids = frozenset(step.requests)
            self._deferred.hold(key, store, self._last_write, step.places, rows, request_ids)
        else:
            store.put(index, self._deferred.fetch(rows))

    def _span_of(self, request: RequestRows) -> Span:
        """Where the rows of `materialize` are; `begin_step` saw that the slot mapping agrees."""
        first = first_position_of(request)
        column = first // self._block_size
        table = request.block_ids[column : -(-request.end // self._block_size)]
        skipped = first - column * self._block_size
        return Span(np.array(table, np.int64), skipped, request.end - first)

    def _missing(
        self, key: str, request: RequestRows, span: Span, missing: Ints
    ) -> RowsMissingError:
        block, _ = span.place_of(int(missing[0]), self._block_size)
        reason: Reason = "evicted" if self._stores[key].was_dropped(block) else "never-written"
        return self._error(key, request, span, missing, reason)

    def _not_saved(self, step: _Step, request: RequestRows) -> OmnicacheError:
        """Names the first row that the request needs and that this step has yet to write."""
        span = self._span_of(request)
        slots = slots_of(span.blocks, self._block_size)[span.skipped :][: span.num_rows]
        missing = np.flatnonzero(np.isin(slots, step.layout.slots))
        if not len(missing):
            return BadStepError(f"step {step.layout.step} is not saved; materialize after save")
        return self._error(next(iter(self._stores), ""), request, span, missing, "in-flight")

    def _error(
        self, key: str, request: RequestRows, span: Span, missing: Ints, reason: Reason
    ) -> RowsMissingError:
        row = int(missing[0])
        block, offset = span.place_of(row, self._block_size)
        return RowsMissingError(
            key=key,
            request_id=request.request_id,
            position=first_position_of(request) + row,
            slot=block * self._block_size + offset,
            block=block,
            reason=reason,
            hit_tokens=request.hit_tokens or 0,
            num_missing=len(missing),
            num_wanted=span.num_rows,
        )


def first_position_of(request: RequestRows) -> int:
    """The position of the first row of `materialize`: 0 in the step of the admission."""
    return request.num_computed_tokens if request.hit_tokens is None else 0
