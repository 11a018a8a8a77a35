"""Where each tensor cache can be damaged: see `plants`. Reaches into both, on purpose."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnicache_cli.engine.verify.builtin import BuiltinCache
from omnicache_cli.engine.verify.plants import BlockChange, Damage, Slots
from omnicache_cli.engine.verify.upstream import UpstreamCache, upstream_key
from omnicache_cli.tensor_cache.layout import StepLayout
from omnicache_cli.tensor_cache.store import Places, RowStore, Span, as_words, word_of


class BuiltinPoints:
    """Of `tensor_cache.TensorCache`."""

    def __init__(self, damage: Damage) -> None:
        self._damage = damage
        self._cache: Any = damage.cache.tensor_cache

    def read(self, key: str, slots: Sequence[int]) -> Tensor | None:
        store: RowStore | None = self._cache._stores.get(key)
        if store is None:
            return None
        index, writes = store.find(self._places(slots))
        held = store._rows[torch.from_numpy(index)]
        held[torch.from_numpy(writes == 0)] = 0
        return held.view(store.dtype).view(len(slots), *store.row_shape)

    def overwrite(self, key: str, slots: Sequence[int], rows: Tensor) -> None:
        store: RowStore = self._cache._stores[key]
        index, writes = store.find(self._places(slots))
        there = np.flatnonzero(writes)
        words = as_words(rows, word_of(rows[0].nbytes))
        store._rows[torch.from_numpy(index[there])] = words[torch.from_numpy(there)]

    def change_slots(self, change: Callable[[Slots], Slots]) -> None:
        def changed(layout: StepLayout) -> None:
            slots = layout.slots.copy()
            for one in layout.requests:
                slots[one.rows] = change(slots[one.rows].tolist())
            self._cache._step.places = self._places(slots.tolist())

        self._behind_begin(changed)

    def change_hit_blocks(self, change: BlockChange) -> None:
        size = self._damage.block_size

        def changed(layout: StepLayout) -> None:
            step = self._cache._step
            tables = {
                one.request_id: list(one.block_ids[: one.hit_tokens // size])
                for one in layout.requests
                if one.hit_tokens
            }
            spans = {}
            for request_id, blocks in change(tables).items():
                span: Span = step.hits[request_id]
                table = np.concatenate((np.array(blocks, np.int64), span.blocks[len(blocks) :]))
                spans[request_id] = span._replace(blocks=table)
            step.hits = spans

        self._behind_begin(changed)

    def _behind_begin(self, changed: Callable[[StepLayout], None]) -> None:
        original = self._cache.begin_step

        def begin_step(layout: StepLayout) -> None:
            original(layout)
            changed(layout)

        self._damage.put(self._cache, "begin_step", begin_step)

    def _places(self, slots: Sequence[int]) -> Places:
        known = np.array(slots, np.int64)
        return Places(known // self._damage.block_size, known % self._damage.block_size)


class UpstreamPoints:
    """Of vLLM-Omni's OmniPrefixCacheManager."""

    def __init__(self, damage: Damage) -> None:
        self._damage = damage
        self._manager: Any = damage.cache.manager

    def read(self, key: str, slots: Sequence[int]) -> Tensor | None:
        pool, name = self._manager._pool, upstream_key(key)
        if not pool.has_key(name):
            return None
        rows: Tensor = pool.rows(name, torch.tensor(slots))
        return rows

    def overwrite(self, key: str, slots: Sequence[int], rows: Tensor) -> None:
        self._manager._pool.write(upstream_key(key), torch.tensor(slots), rows)

    def change_slots(self, change: Callable[[Slots], Slots]) -> None:
        view = self._manager._view
        original = view.step_slots_cpu

        def step_slots_cpu(request_ids: list[str], num_scheduled: Mapping[str, int]) -> Tensor:
            parts = [original([one], num_scheduled).tolist() for one in request_ids]
            return torch.tensor([slot for part in parts if part for slot in change(part)])

        self._damage.put(view, "step_slots_cpu", step_slots_cpu)

    def change_hit_blocks(self, change: BlockChange) -> None:
        """Its spans are noted when a step starts, and read more than once."""
        original = self._manager._prefetch_hit_spans
        changed: set[str] = set()

        def prefetch() -> None:
            spans = self._manager._hit_spans
            if changed.isdisjoint(spans):
                blocks = change({name: list(span[1]) for name, span in spans.items()})
                for name, table in blocks.items():
                    spans[name] = (spans[name][0], table)
                changed.update(spans)
            original()

        self._damage.put(self._manager, "_prefetch_hit_spans", prefetch)


def points_of(damage: Damage) -> "BuiltinPoints | UpstreamPoints":
    if isinstance(damage.cache, BuiltinCache):
        return BuiltinPoints(damage)
    assert isinstance(damage.cache, UpstreamCache)
    return UpstreamPoints(damage)
