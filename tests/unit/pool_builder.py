"""Run folders whose block pool is honest: every step has as many free blocks as its events leave.

The count is kept here on its own, so that a test can compare it with what the reader rebuilds.
"""

from collections.abc import Sequence
from typing import Any

from omnicache_cli.trace.records import (
    Allocated,
    AnyEvent,
    Cached,
    CacheReset,
    Evicted,
    Finished,
    Freed,
    SchedulerStep,
    from_runs,
    to_runs,
)
from tests.unit.run_builder import Admit, Recording, cache_group


class PoolRecording(Recording):
    """Blocks of 4 tokens, 7 of them that can be handed out."""

    def __init__(self, groups: Any = None, **changes: Any) -> None:
        changes.setdefault("num_blocks", 8)
        super().__init__(groups or [cache_group(block_size=4)], **changes)
        (source,) = self.records[:1]
        self._usable = source.num_gpu_blocks - 1  # type: ignore[union-attr]
        self._in_use: set[int] = set()

    def step(self, *args: Any, **options: Any) -> None:
        super().step(*args, **options)
        number = self.next_step - 1
        (record,) = (
            one for one in self.records if isinstance(one, SchedulerStep) and one.step == number
        )
        self._count(record.events)
        for admission in record.admitted:
            for runs in admission.block_ids:
                self._in_use |= {block for block in from_runs(runs) if block}
        self.change(SchedulerStep, number, num_free_blocks=self._usable - len(self._in_use))

    def after(self, *events: AnyEvent) -> None:
        self._count(events)
        super().after(*events)

    def ends(self, number: int, *freed: int) -> None:
        """The request finishes; these blocks have no other holder."""
        self.after(Finished(number, "FINISHED_STOPPED", 1), Freed(number, to_runs(list(freed))))

    def caches(self, step: int, number: int, blocks: Sequence[int], *, group: int = 0) -> None:
        """In this step the first blocks of the request's table enter the cache."""
        (record,) = (
            one for one in self.records if isinstance(one, SchedulerStep) and one.step == step
        )
        event = Cached(number, group, [0, len(blocks)], to_runs(list(blocks)))
        self.change(SchedulerStep, step, events=[*record.events, event])

    def _count(self, events: Sequence[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, Allocated):
                self._in_use |= set(from_runs(event.block_ids))
            elif isinstance(event, Freed):
                self._in_use -= set(from_runs(event.block_ids))


def shared_prefix() -> PoolRecording:
    """a and b share two blocks; c takes one of them when both are gone; d would have needed it."""
    recording = PoolRecording()
    a = recording.arrive("a", 8, block_hashes=["a0", "a1"])
    recording.step({a: 8}, admit={a: Admit([[1, 2]])})
    recording.caches(0, a, [1, 2])
    b = recording.arrive("b", 9, block_hashes=["a0", "a1"], lora_name="sql", lora_id=1)
    recording.step({a: 1, b: 1}, grow={a: [[3]]}, admit={b: Admit([[1, 2, 4]], hit=8)})
    recording.ends(a, 3)
    recording.step({b: 1})
    recording.ends(b, 4, 2, 1)
    c = recording.arrive(
        "c", 24, cache_salt="5a17", block_hashes=[f"c{index}" for index in range(6)]
    )
    evicted = Evicted(2, 0, "a1", a, c)
    recording.step({c: 24}, admit={c: Admit([[4, 3, 5, 6, 7, 2]])}, events=[evicted])
    recording.ends(c, 2, 7, 6, 5, 3, 4)
    d = recording.arrive("d", 9, block_hashes=["a0", "a1"])
    recording.step({d: 5}, admit={d: Admit([[1, 4, 3]], hit=4)})
    recording.ends(d, 3, 4, 1)
    recording.after(CacheReset(True))
    return recording
