"""`show RUN --block N`: the life of one block."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omnicache_cli.errors import BadInputError
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.pool import LiveRequests, hash_of
from omnicache_cli.trace.records import (
    Allocated,
    AnyEvent,
    Cached,
    CachedPartial,
    CacheReset,
    EngineSource,
    Evicted,
    Finished,
    Freed,
    HashesMoved,
    Preempted,
    Runs,
    from_runs,
)
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Step
from omnicache_cli.trace.views.view import View, engine_choices, of_engine, steps_of
from omnicache_cli.trace.views.words import counted, who

TEXT_ROWS = 1000
JSON_ROWS = 10_000
"""Lines of a life; all are counted."""

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened to the block."""

    step: int
    kind: str  # take, hit, cache, let_go, free, evict, reset, move
    words: str
    data: dict[str, Any] = field(default_factory=dict)


class _Life:
    """Gathers the entries of one block of one engine while steps go by."""

    def __init__(self, engine: EngineSource, block: int) -> None:
        self.engine = engine
        self.block = block
        self.entries: list[Entry] = []  # the first JSON_ROWS
        self.num_entries = 0
        self.counts: Counter[str] = Counter()  # entries by kind
        self.times_evicted = 0  # a block may lose several hashes at once
        self.group: int | None = None
        self.hash: str | None = None
        self.cached_by: int | None = None  # None: not cached
        self.in_use = False
        self.first_gap: int | None = None
        self._holders: dict[int, None] = {}  # requests that have it in their table, in order
        self._requests = LiveRequests()

    @property
    def state(self) -> str:
        cached = self.cached_by is not None
        if self.in_use:
            holders = ", ".join(who(one) for one in self._holders)
            return f"in use by {holders or 'nobody'}{', cached' if cached else ''}"
        return "free and cached" if cached else "free"

    def add(self, step: Step) -> None:
        if step.gap and self.first_gap is None:
            self.first_gap = step.number
        self._requests.begin(step)
        self._apply(step.before + step.record.events, step.number)
        for admission in step.record.admitted:
            self._see_tables(admission.request, admission.block_ids, step.number)
        for number, additions in step.record.new_block_ids:
            self._see_tables(number, additions, step.number)
        self._apply(step.after, step.number)
        self._requests.end(step)

    def _note(self, step: int, kind: str, words: str, **data: Any) -> None:
        self.num_entries += 1
        self.counts[kind] += 1
        if len(self.entries) < JSON_ROWS:
            self.entries.append(Entry(step, kind, words, data))

    def _see_tables(self, request: int, tables: Sequence[Runs], step: int) -> None:
        for group, runs in enumerate(tables):
            index = _position(runs, self.block)
            if index is None:
                continue
            self.group = group
            if request not in self._holders:
                others = self._others(request)
                self._holders[request] = None
                self.in_use = True
                words = f"{who(request)} finds it in the cache, as its block {index}{others}"
                self._note(step, "hit", words, request=request, block_index=index)

    def _others(self, request: int) -> str:
        holders = [who(one) for one in self._holders if one != request]
        if not holders:
            return ""
        return f"; {', '.join(holders)} {'holds' if len(holders) == 1 else 'hold'} it too"

    def _apply(self, events: Sequence[AnyEvent], step: int) -> None:
        for event in events:
            match event:
                case Allocated() if _position(event.block_ids, self.block) is not None:
                    self._holders = {} if event.request < 0 else {event.request: None}
                    self.in_use = True
                    self._note(
                        step, "take", f"{who(event.request)} takes it", request=event.request
                    )
                case Cached():
                    self._cache(event, step)
                case CachedPartial() if event.block_id == self.block:
                    self.group, self.cached_by = event.group, event.request
                    tokens = counted(event.num_tokens, "token")
                    words = f"{who(event.request)} caches it for a prefix of {tokens}"
                    self._note(step, "cache", words, request=event.request)
                case Evicted() if event.block_id == self.block:
                    self._evict(event, step)
                case HashesMoved() if self.block in (event.source_block_id, event.target_block_id):
                    self._move(event, step)
                case Preempted() | Finished():
                    self._let_go(event, step)
                case Freed() if _position(event.block_ids, self.block) is not None:
                    self._holders, self.in_use = {}, False
                    words = "is free" if self.cached_by is None else "is free, and can be hit"
                    self._note(step, "free", words, request=event.request)
                case Freed() if _position(event.still_held, self.block) is not None:
                    if event.request in self._holders:
                        del self._holders[event.request]
                        others = self._others(event.request).removesuffix(" too")
                        words = f"{who(event.request)} gives it back{others}"
                        self._note(step, "let_go", words, request=event.request)
                case CacheReset() if event.successful and self.cached_by is not None:
                    self.cached_by = self.hash = None
                    self._note(step, "reset", "loses its hash: the prefix cache is reset")

    def _cache(self, event: Cached, step: int) -> None:
        place = _position(event.block_ids, self.block)
        if place is None:
            return
        index = from_runs(event.block_indices)[place : place + 1]
        request = self._requests.get(event.request)
        self.group, self.cached_by = event.group, event.request
        self.hash = hash_of(request, self.engine, event.group, index[0]) if index else None
        known = "hash not known" if self.hash is None else f"hash {self.hash}"
        at = f" as its block {index[0]}" if index else ""
        words = f"{who(event.request)} caches it{at}: {known}"
        self._note(step, "cache", words, request=event.request, hash=self.hash)

    def _evict(self, event: Evicted, step: int) -> None:
        last = self.entries[-1] if self.entries else None
        self.times_evicted += last is None or (last.kind, last.step) != ("evict", step)
        owner = "" if event.owner < 0 else f", cached by {who(event.owner)}"
        words = f"is evicted for {who(event.request)}: it loses hash {event.hash}{owner}"
        self.group, self.cached_by, self.hash = event.group, None, None
        data = {"request": event.request, "owner": event.owner, "hash": event.hash}
        self._note(step, "evict", words, **data)

    def _move(self, event: HashesMoved, step: int) -> None:
        source, target = event.source_block_id, event.target_block_id
        if source == self.block:
            words = f"its content is cached in block {target} from now on"
            self.cached_by = self.hash = None
        else:
            words = f"is cached in place of block {source}"
            self.cached_by = -1 if self.cached_by is None else self.cached_by
        self._note(step, "move", words, source_block=source, target_block=target)

    def _let_go(self, event: Preempted | Finished, step: int) -> None:
        if event.request in self._holders:
            del self._holders[event.request]
            how = "is preempted" if isinstance(event, Preempted) else "finishes"
            words = f"{who(event.request)} {how}{self._others(event.request).removesuffix(' too')}"
            self._note(step, "let_go", words, request=event.request)


def _position(runs: Runs, block: int) -> int | None:
    """Where in the vector the block stands; None: not in it."""
    before = 0
    for start, length in zip(runs[::2], runs[1::2], strict=False):
        offset = block - start if length > 0 else start - block
        if 0 <= offset < abs(length):
            return before + offset
        before += abs(length)
    return None


def show_block(run: Run, block: int, engine: str | None) -> View:
    """BadInputError: no engine has such a block, or several have."""
    if block == NULL_BLOCK:
        raise BadInputError(
            "block 0 is the null block: it fills gaps in block tables and is never handed out; "
            "name another block"
        )
    lives: dict[str, _Life] = {}
    for step in steps_of(run, engine):
        name = step.engine.engine
        if name not in lives:
            lives[name] = _Life(step.engine, block)
        lives[name].add(step)
    found = [one for one in lives.values() if 0 < block < one.engine.num_gpu_blocks]
    if not found:
        largest = max((one.engine.num_gpu_blocks for one in lives.values()), default=0) - 1
        raise BadInputError(
            f"{run.folder} has no block {block}; "
            + (f"its blocks go from 1 to {largest}" if largest > 0 else "no step was recorded")
        )
    if len(found) > 1:
        raise BadInputError(
            f"{len(found)} engines have a block {block}; pass --engine: {engine_choices(run)}"
        )
    return _view(run, found[0])


def _view(run: Run, life: _Life) -> View:
    rows: list[tuple[Cell, ...]] = [(one.step, one.words) for one in life.entries[:TEXT_ROWS]]
    sections: list[Section] = [
        Facts("", _facts(life)),
        Table("Life", ("step", "what happened"), rows),
    ]
    more = life.num_entries - TEXT_ROWS
    if more > 0:
        sections.append(Lines("", [f"… and {counted(more, 'more event')}; --format json"]))
    report = Report(
        "show",
        f"Block {life.block}",
        {
            "run": str(run.folder),
            "engine": life.engine.engine,
            "block": life.block,
            "group": life.group,
            "at_the_end": life.state,
            "hash": life.hash,
            "times_taken": life.counts["take"],
            "times_hit": life.counts["hit"],
            "times_cached": life.counts["cache"],
            "times_evicted": life.times_evicted,
            "records_lost_before": life.first_gap,
            "num_events": life.num_entries,
            "life": [
                {"step": one.step, "what": one.kind, "words": one.words, **one.data}
                for one in life.entries
            ],
        },
        tuple(sections),
        run.vllm_version,
    )
    if not life.entries:
        return View(report, "--blocks")
    return View(report, of_engine(run, f"--step {life.entries[0].step}", life.engine.engine))


def _facts(life: _Life) -> dict[str, Cell]:
    group = life.group
    facts: dict[str, Cell] = {"engine": life.engine.engine}
    if group is not None and 0 <= group < len(life.engine.groups):
        spec = life.engine.groups[group]
        facts["KV cache group"] = f"{group}, {spec.spec}, {counted(spec.block_size, 'token')}"
    facts["at the end"] = life.state
    if life.hash is not None:
        facts["hash"] = life.hash
    facts["taken"] = _times(life.counts["take"])
    facts["hit"] = _times(life.counts["hit"])
    facts["evicted"] = _times(life.times_evicted)
    if life.first_gap is not None:
        facts["incomplete"] = f"records were lost before step {life.first_gap}"
    return facts


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count:,} times")
