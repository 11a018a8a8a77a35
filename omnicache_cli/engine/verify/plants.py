"""Puts the faults of `verify.selftest` into a live engine and its tensor cache, and takes them out.

Everything here is done to objects of one session: methods of the cache, the runner's capture, the
block pool, and for a hash vLLM's function while the fault lasts. No product code knows of it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from omnicache_cli.engine.verify.capture import Given
from omnicache_cli.tensor_cache.layout import RequestRows, StepLayout
from omnicache_cli.trace.records import external_id

PADDING_ROWS = 3

Slots = list[int]
"""Of the KV cache: block id * block size + offset."""


class CachePoints(Protocol):
    """Where a tensor cache can be damaged."""

    def read(self, key: str, slots: Sequence[int]) -> Tensor | None:
        """What the store holds there now, zeros where nothing; None: it has no such key."""
        ...

    def overwrite(self, key: str, slots: Sequence[int], rows: Tensor) -> None:
        """Other rows in the store, which takes them for those that it wrote."""
        ...

    def change_slots(self, change: Callable[[Slots], Slots]) -> None:
        """Of each request, where the rows of a step are written."""
        ...

    def change_hit_blocks(self, change: "BlockChange") -> None:
        """Where a restore reads."""
        ...


BlockChange = Callable[[Mapping[str, list[int]]], Mapping[str, list[int]]]
"""Hit blocks by request, in the order of the batch -> others."""


class Damage:
    """One fault in the making: what it may touch, and how to undo it."""

    def __init__(self, session: Any, points: Callable[["Damage"], CachePoints]) -> None:
        """`session`: an EngineSession, whose parts are open to this module."""
        self.engine = session.warm_engine
        self.capture = session.warm_capture
        self.cache = session.attached
        self.block_size: int = session.block_size
        self.key: str = session.keys[-1]
        self.keys: Sequence[str] = session.keys
        self._undo = ExitStack()
        self.points = points(self)

    def close(self) -> None:
        self._undo.close()

    def put(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value, until the fault is taken out."""
        known = vars(owner)
        if name in known:
            self._undo.callback(setattr, owner, name, known[name])
        else:  # found on the class
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    def around_step(
        self,
        before: Callable[[StepLayout, dict[str, Any]], None] | None = None,
        after: Callable[[StepLayout, dict[str, Any], Given], Given] | None = None,
    ) -> None:
        """Around a cache's write and restore of one step."""
        original = self.cache.step

        def step(layout: StepLayout, outputs: dict[str, Any]) -> Given:
            if before is not None:
                before(layout, outputs)
            given: Given = original(layout, outputs)
            return given if after is None else after(layout, outputs, given)

        self.put(self.cache, "step", step)

    def change_restored(self, change: Callable[[Tensor, int], Tensor]) -> None:
        """Rows that come back on a hit, under one key: (rows, hit tokens) -> rows."""

        def after(layout: StepLayout, outputs: dict[str, Any], given: Given) -> Given:
            for one in layout.requests:
                rows = given.rows.get(one.request_id, {})
                if one.hit_tokens and self.key in rows:
                    rows[self.key] = change(rows[self.key], one.hit_tokens)
            return given

        self.around_step(after=after)


def short_prefix(damage: Damage) -> None:
    lost = damage.block_size // 4
    damage.change_restored(lambda rows, hit: torch.cat([rows[: hit - lost], rows[hit:]]))


def shifted_slots(damage: Damage) -> None:
    def shift(slots: Slots) -> Slots:
        is_prompt = len(slots) > 2 * damage.block_size
        return [*slots[1:], slots[0]] if is_prompt else slots

    damage.points.change_slots(shift)


def swapped_blocks(damage: Damage) -> None:
    def swap(blocks: list[int]) -> list[int]:
        return [blocks[1], blocks[0], *blocks[2:]] if len(blocks) > 1 else blocks

    damage.points.change_hit_blocks(lambda hits: {name: swap(one) for name, one in hits.items()})


def first_in_batch(damage: Damage) -> None:
    def change(hits: Mapping[str, list[int]]) -> Mapping[str, list[int]]:
        first = next(iter(hits.values()), [])
        return {name: [*first, *one[len(first) :]][: len(one)] for name, one in hits.items()}

    damage.points.change_hit_blocks(change)


def lost_write(damage: Damage) -> None:
    """The first request that is served after others had its blocks writes nothing."""
    before: dict[str, tuple[Slots, Tensor]] = {}

    def remember(layout: StepLayout, outputs: dict[str, Any]) -> None:
        before.clear()
        for one in layout.requests:
            if external_id(one.request_id, randomized=True) == "hit-0":
                slots = layout.slot_mapping[one.first_row : one.first_row + one.num_rows].tolist()
                old = damage.points.read(damage.key, slots)
                if old is not None:
                    before[one.request_id] = slots, old

    def put_back(layout: StepLayout, outputs: dict[str, Any], given: Given) -> Given:
        for slots, old in before.values():
            damage.points.overwrite(damage.key, slots, old)
        return given

    damage.around_step(remember, put_back)


def zero_block(damage: Damage) -> None:
    def after(layout: StepLayout, outputs: dict[str, Any], given: Given) -> Given:
        for one in layout.requests:
            block = one.block_ids[1] if len(one.block_ids) > 1 else None
            if block is not None and not one.hit_tokens and one.num_rows > 2 * damage.block_size:
                slots = [block * damage.block_size + offset for offset in range(damage.block_size)]
                rows = outputs[damage.key][:1].cpu()
                damage.points.overwrite(
                    damage.key, slots, torch.zeros_like(rows).repeat(len(slots), 1)
                )
        return given

    damage.around_step(after=after)


def skipped_key(damage: Damage) -> None:
    damage.change_restored(lambda rows, hit: rows[hit:])


def sliced_from_zero(damage: Damage) -> None:
    damage.change_restored(lambda rows, hit: torch.cat([rows[:hit], rows[: len(rows) - hit]]))


def read_too_early(damage: Damage) -> None:
    early: dict[str, Tensor] = {}

    def read(layout: StepLayout, outputs: dict[str, Any]) -> None:
        early.clear()
        written = set(layout.slot_mapping.tolist())
        for one in layout.requests:
            slots = hit_slots(one, damage.block_size)
            if slots and written.issuperset(slots):
                rows = outputs[damage.key][: len(slots)].cpu()
                early[one.request_id] = torch.zeros_like(rows)  # its new blocks hold nothing yet

    def give(layout: StepLayout, outputs: dict[str, Any], given: Given) -> Given:
        for request_id, rows in early.items():
            given.rows[request_id][damage.key][: len(rows)] = rows
        return given

    damage.around_step(read, give)


def padding_written(damage: Damage) -> None:
    """The batch is padded, and the tail of the slot mapping is not set to -1: it still has the
    slots of the step before."""
    mapping: Slots = []
    record = damage.capture.record

    def padded(scheduler_output: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs = damage.capture.outputs
        for key, rows in outputs.items():
            outputs[key] = _padded(rows)
        record(scheduler_output, _padded(hidden))

    def after(layout: StepLayout, outputs: dict[str, Any], given: Given) -> Given:
        num_tokens = layout.num_tokens
        mapping[:num_tokens] = layout.slot_mapping[:num_tokens].tolist()
        stale = mapping[num_tokens : num_tokens + PADDING_ROWS]
        if stale:
            padding = outputs[damage.key][num_tokens : num_tokens + len(stale)].cpu()
            damage.points.overwrite(damage.key, stale, padding)
        return given

    damage.put(damage.capture, "record", padded)
    damage.around_step(after=after)


def _padded(rows: Tensor) -> Tensor:
    junk = torch.arange(1, PADDING_ROWS + 1, dtype=rows.dtype, device=rows.device)
    return torch.cat([rows, junk[:, None].expand(-1, rows.shape[1])])


def unstable_row(damage: Damage) -> None:
    count = [0]

    def change(rows: Tensor, hit: int) -> Tensor:
        count[0] += 1
        rows[2] += count[0]
        return rows

    damage.change_restored(change)


def prefix_every_step(damage: Damage) -> None:
    so_far: dict[str, Tensor] = {}

    def after(layout: StepLayout, outputs: dict[str, Any], given: Given) -> Given:
        for one in layout.requests:
            rows = given.rows.get(one.request_id, {})
            if damage.key in rows:
                if one.request_id in so_far:
                    rows[damage.key] = torch.cat([so_far[one.request_id], rows[damage.key]])
                so_far[one.request_id] = rows[damage.key]
        return given

    damage.around_step(after=after)


def payload_as_rows(damage: Damage) -> None:
    from omnicache_cli.tensor_cache import cache as judging
    from omnicache_cli.tensor_cache.rule import why_not as rule

    def lax(key: str, value: Any, layout: StepLayout) -> str | None:
        fits = isinstance(value, Tensor) and len(value) == layout.num_tokens
        return None if fits else rule(key, value, layout)

    damage.put(judging, "why_not", lax)


def other_dtype(damage: Damage) -> None:
    damage.change_restored(lambda rows, hit: rows.to(torch.float16))


def weak_hash(damage: Damage) -> None:
    import vllm.v1.core.kv_cache_utils as hashing

    original = hashing.hash_block_tokens

    def weak(function: Any, parent: Any, token_ids: Sequence[int], extra_keys: Any = None) -> Any:
        return original(function, parent, list(token_ids)[:-1], extra_keys)

    damage.put(hashing, "hash_block_tokens", weak)


def kept_hash(damage: Damage) -> None:
    pool = damage.engine.block_pool

    def keep(block: Any) -> bool:
        if block.block_hash is None:
            return False
        block.reset_hash()  # the block's own, while the pool's table keeps the entry
        return True

    damage.put(pool, "_maybe_evict_cached_block", keep)


def moved_kv(damage: Damage) -> None:
    original = damage.cache.begin

    def begin(scheduler_output: Any) -> None:
        """Before the forward pass in which a request is served from the cache."""
        if any(one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs):
            for cache in damage.engine.model_runner.kv_caches:
                cache[:] = cache.roll(1, 0)
        original(scheduler_output)

    damage.put(damage.cache, "begin", begin)


def hit_slots(one: RequestRows, block_size: int) -> Slots:
    return [
        one.block_ids[position // block_size] * block_size + position % block_size
        for position in range(one.hit_tokens or 0)
    ]


FAULTS: Mapping[str, Callable[[Damage], None]] = {
    "short-prefix": short_prefix,
    "shifted-slots": shifted_slots,
    "swapped-blocks": swapped_blocks,
    "first-in-batch": first_in_batch,
    "lost-write": lost_write,
    "zero-block": zero_block,
    "skipped-key": skipped_key,
    "sliced-from-zero": sliced_from_zero,
    "read-too-early": read_too_early,
    "padding-written": padding_written,
    "unstable-row": unstable_row,
    "prefix-every-step": prefix_every_step,
    "payload-as-rows": payload_as_rows,
    "other-dtype": other_dtype,
    "weak-hash": weak_hash,
    "kept-hash": kept_hash,
    "moved-kv": moved_kv,
}
"""By the names of `verify.selftest.PLANTS`."""


def one_value_per_request(layout: StepLayout) -> Mapping[str, Any]:
    """Payload to send along: as many values as there are tokens, and none of them per token."""
    return {"per-request": torch.arange(layout.num_tokens)}
