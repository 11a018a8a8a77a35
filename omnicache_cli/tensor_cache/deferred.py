"""Writes that are held back on a device, and the copies of them that are under way.

A held write costs device memory and nothing else. It is started (copied to the CPU) in a batch with
others, and lands in its store when the copy has come. Since a store knows which write owns a row,
the order in which writes land does not matter.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from omnicache_cli.tensor_cache.device import DeviceCopies, HostCopy
from omnicache_cli.tensor_cache.layout import Ints
from omnicache_cli.tensor_cache.store import Places, RowStore


@dataclass(frozen=True, slots=True, eq=False)
class HeldWrite:
    """One key's rows of one step."""

    key: str
    store: RowStore
    write: int
    places: Places
    kept: Any  # what DeviceCopies.keep returned
    num_bytes: int
    request_ids: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    writes: tuple[HeldWrite, ...]
    copy: HostCopy

    def land(self) -> None:
        """Waits for the copy, then writes what is still owned."""
        for held, rows in zip(self.writes, self.copy.wait(), strict=True):
            held.store.put_if_owned(held.places, rows, held.write)


class DeferredWrites:
    """Held writes within a budget of device memory."""

    def __init__(self, copies: DeviceCopies, budget_bytes: int) -> None:
        self._copies = copies
        self._budget_bytes = budget_bytes
        self._held: list[HeldWrite] = []
        self._batches: list[Batch] = []

    def keeps(self, rows: Tensor) -> bool:
        return self._copies.keeps(rows)

    def fetch(self, rows: Tensor) -> Tensor:
        """Rows that are not kept: on the CPU, at once. Waits for the copy, where one is needed."""
        return rows.cpu()

    def hold(
        self,
        key: str,
        store: RowStore,
        write: int,
        places: Places,
        rows: Tensor,
        request_ids: frozenset[str],
    ) -> None:
        """Keeps these rows; over the budget, starts the copy of all that is held."""
        num_bytes = rows.numel() * rows.element_size()
        kept = self._copies.keep(rows)
        self._held.append(HeldWrite(key, store, write, places, kept, num_bytes, request_ids))
        if sum(held.num_bytes for held in self._held) > self._budget_bytes:
            self.start_all()

    def start_all(self) -> None:
        self._start(lambda held: True)

    def start_of(self, request_ids: Iterable[str]) -> None:
        """Starts the writes that have rows of these requests."""
        wanted = frozenset(request_ids)
        self._start(lambda held: not wanted.isdisjoint(held.request_ids))

    def land_ready(self) -> None:
        """Writes what has come, and waits for nothing."""
        ready = [batch for batch in self._batches if batch.copy.done()]
        self._land(ready)

    def land_all(self) -> None:
        self.start_all()
        self._land(self._batches)

    def land(self, needed: Iterable[tuple[RowStore, Ints]]) -> None:
        """Waits for the writes that own rows about to be read: write numbers (rows,) by store."""
        if not self._held and not self._batches:
            return
        wanted = {
            (id(store), write) for store, writes in needed for write in np.unique(writes).tolist()
        }

        def is_wanted(held: HeldWrite) -> bool:
            return (id(held.store), held.write) in wanted

        self._start(is_wanted)
        self._land([batch for batch in self._batches if any(map(is_wanted, batch.writes))])

    def forget(self, store: RowStore) -> None:
        """Lets go of what was held for this store. What is under way comes and is thrown away."""
        self._held = [held for held in self._held if held.store is not store]

    def bytes_of(self, store: RowStore) -> int:
        """Bytes that have not landed yet."""
        under_way = [held for batch in self._batches for held in batch.writes]
        return sum(held.num_bytes for held in [*self._held, *under_way] if held.store is store)

    @property
    def num_bytes(self) -> int:
        under_way = [held for batch in self._batches for held in batch.writes]
        return sum(held.num_bytes for held in [*self._held, *under_way])

    def _start(self, chosen: Callable[[HeldWrite], bool]) -> None:
        batch = [held for held in self._held if chosen(held)]
        if not batch:
            return
        copy = self._copies.start([held.kept for held in batch])
        self._batches.append(Batch(tuple(batch), copy))
        self._held = [held for held in self._held if not chosen(held)]

    def _land(self, batches: list[Batch]) -> None:
        for batch in batches:
            batch.land()
        self._batches = [batch for batch in self._batches if batch not in batches]
