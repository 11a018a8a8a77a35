"""`show RUN --evictions`: every eviction, and whether its hash was needed again."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.pool import LiveRequests, hash_of
from omnicache_cli.trace.records import (
    Admission,
    Allocated,
    AnyEvent,
    Cached,
    CacheGroup,
    CacheReset,
    EngineSource,
    Evicted,
    from_runs,
)
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Step
from omnicache_cli.trace.views.view import View, engine_title, steps_of
from omnicache_cli.trace.views.words import counted, who

TEXT_ROWS = 1000
JSON_ROWS = 20_000
"""Evictions listed; all are counted."""

MAX_FOLLOWED = 100_000
"""Evicted hashes, of each engine, that are looked for in later requests: the latest ones."""

REGRET = "needed again"


@dataclass(slots=True)
class Eviction:
    """One hash that left the prefix cache because its block was taken."""

    engine: str
    step: int
    block: int
    group: int
    hash: str
    owner: int  # request that cached it; NO_REQUEST: not known
    request: int  # that took the block; NO_REQUEST: nobody
    needed_step: int | None = None
    needed_by: int | None = None  # the first request that needed it again, and was admitted then
    needed_by_id: str | None = None
    needed_by_resumed: bool = False
    followed: bool = True  # False: forgotten before anybody needed it; later ones are not known


class EvictionFollower:
    """One engine's evictions. Memory is bounded by MAX_FOLLOWED and the live requests."""

    def __init__(self, engine: EngineSource) -> None:
        self.engine = engine
        self.new: list[Eviction] = []  # of the step that was added last
        self.num_evictions = 0
        self.num_needed = 0
        self.num_forgotten = 0
        self.blocks: set[int] = set()
        self.first_gap: int | None = None
        # Group and hash of what is not in the cache now, the oldest eviction first. A plain dict
        # would search past all that it has forgotten to find its oldest.
        self._gone: OrderedDict[tuple[int, str], Eviction] = OrderedDict()
        self._requests = LiveRequests()

    def add(self, step: Step) -> None:
        self.new = []
        if step.gap and self.first_gap is None:
            self.first_gap = step.number
        self._requests.begin(step)
        waiting = {one.request: one for one in step.record.admitted}
        self._apply(step.before, {}, step.number)
        self._apply(step.record.events, waiting, step.number)
        for admission in waiting.values():  # the cache gave it all that it needed
            self._look_up(admission, step.number)
        self._apply(step.after, {}, step.number)
        self._requests.end(step)

    def _apply(self, events: Iterable[AnyEvent], waiting: dict[int, Admission], step: int) -> None:
        """`waiting`: admissions of this step; their lookup comes before their first block."""
        for event in events:
            if isinstance(event, Allocated | Evicted | Cached) and event.request in waiting:
                self._look_up(waiting.pop(event.request), step)
            match event:
                case Evicted():
                    self._evict(event, step)
                case Cached():
                    self._cache(event)
                case CacheReset() if event.successful:
                    self._gone.clear()  # what was asked for later is missed because of the reset

    def _evict(self, event: Evicted, step: int) -> None:
        one = Eviction(
            self.engine.engine,
            step,
            event.block_id,
            event.group,
            event.hash,
            event.owner,
            event.request,
        )
        self.new.append(one)
        self.num_evictions += 1
        self.blocks.add(event.block_id)
        self._gone.pop((event.group, event.hash), None)
        self._gone[event.group, event.hash] = one
        if len(self._gone) > MAX_FOLLOWED:
            _, oldest = self._gone.popitem(last=False)
            oldest.followed = False
            self.num_forgotten += 1

    def _cache(self, event: Cached) -> None:
        """Hashes that are in the cache again are not missing any more."""
        if not self._gone:
            return
        request = self._requests.get(event.request)
        for index in from_runs(event.block_indices):
            known = hash_of(request, self.engine, event.group, index)
            if known is not None:
                self._gone.pop((event.group, known), None)

    def _look_up(self, admission: Admission, step: int) -> None:
        """Which evicted hashes did this request need? Those that a full hit would have had."""
        request = self._requests.get(admission.request)
        if request is None or not self._gone or not admission.queried_tokens:
            return
        for number, group in enumerate(self.engine.groups):
            if not group.prefix_cacheable:
                continue
            end = (admission.queried_tokens - 1) // group.block_size  # the last token is computed
            first = max(admission.hit_tokens // group.block_size, end - _blocks_needed(group, end))
            for index in range(first, end):
                known = hash_of(request, self.engine, number, index)
                if known is None:
                    break
                one = self._gone.get((number, known))
                if one is not None and one.needed_step is None:
                    one.needed_step, one.needed_by = step, request.number
                    one.needed_by_id = request.external_id
                    one.needed_by_resumed = admission.resumed
                    self.num_needed += 1


def _blocks_needed(group: CacheGroup, end: int) -> int:
    """How many blocks before `end` a hit of `end` blocks needs: all, but behind a window."""
    if group.spec.startswith("Mamba"):  # one state stands for all before it
        return 1
    if group.sliding_window is None:
        return end
    return -(-(group.sliding_window - 1) // group.block_size)


def show_evictions(run: Run, engine: str | None, *, every_eviction: bool) -> View:
    """`every_eviction`: JSON_ROWS of them (JSON), else TEXT_ROWS."""
    most = JSON_ROWS if every_eviction else TEXT_ROWS
    followers: dict[str, EvictionFollower] = {}
    kept: list[Eviction] = []
    for step in steps_of(run, engine):
        name = step.engine.engine
        if name not in followers:
            followers[name] = EvictionFollower(step.engine)
        followers[name].add(step)
        kept += followers[name].new[: most - len(kept)]
    sections: list[Section] = []
    for name, follower in followers.items():
        rows = [_cells(one, follower) for one in kept if one.engine == name]
        sections.append(Facts(engine_title(run, name), _facts(follower)))
        sections.append(Table("Evictions", _columns(follower), rows))
    total = sum(one.num_evictions for one in followers.values())
    if not followers:
        sections.append(Lines("", ["no step was recorded"]))
    elif total > len(kept):
        more = counted(total - len(kept), "more eviction")
        sections.append(Lines("", [f"… and {more}; --format json"]))
    report = Report(
        "show",
        f"Evictions of {run.folder.name or run.folder}",
        {
            "run": str(run.folder),
            "num_evictions": total,
            "listed": len(kept),
            "engines": [_engine_data(one) for one in followers.values()],
            "evictions": [_data(one) for one in kept],
        },
        tuple(sections),
        run.vllm_version,
    )
    return View(report, _next(run, kept))


def _next(run: Run, kept: list[Eviction]) -> str:
    if not kept:
        return "--blocks"
    one = next((one for one in kept if one.needed_by is not None), kept[0])
    number = list(run.engines).index(one.engine)
    return f"--block {one.block}" + (f" --engine {number}" if len(run.engines) > 1 else "")


def _facts(follower: EvictionFollower) -> dict[str, Cell]:
    needed, total = follower.num_needed, follower.num_evictions
    share = f" ({100 * needed / total:.1f} %)" if total else ""
    hashes = f"{total:,} {'hash' if total == 1 else 'hashes'}"
    facts: dict[str, Cell] = {
        "evicted": f"{hashes} from {counted(len(follower.blocks), 'block')}",
        REGRET: f"{needed:,}{share}",
    }
    if follower.num_forgotten:
        facts["not followed to the end"] = follower.num_forgotten
    if follower.first_gap is not None:
        facts["incomplete"] = f"records were lost before step {follower.first_gap}"
    return facts


def _columns(follower: EvictionFollower) -> tuple[str, ...]:
    group = ["group"] if len(follower.engine.groups) > 1 else []
    return ("step", "block", *group, "hash", "cached by", "taken by", REGRET)


def _cells(one: Eviction, follower: EvictionFollower) -> tuple[Cell, ...]:
    if one.needed_by is not None:
        name = "" if one.needed_by_id is None else f" {one.needed_by_id}"
        resumed = ", resumed" if one.needed_by_resumed else ""
        needed = f"step {one.needed_step} by #{one.needed_by}{name}{resumed}"
    else:
        needed = "no" if one.followed else "not known"
    return (
        one.step,
        one.block,
        *((one.group,) if len(follower.engine.groups) > 1 else ()),
        one.hash,
        "not known" if one.owner < 0 else who(one.owner),
        who(one.request),
        needed,
    )


def _engine_data(follower: EvictionFollower) -> dict[str, Any]:
    return {
        "engine": follower.engine.engine,
        "num_evictions": follower.num_evictions,
        "num_blocks": len(follower.blocks),
        "num_needed_again": follower.num_needed,
        "num_not_followed": follower.num_forgotten,
        "records_lost_before": follower.first_gap,
    }


def _data(one: Eviction) -> dict[str, Any]:
    needed = {
        "step": one.needed_step,
        "request": one.needed_by,
        "external_id": one.needed_by_id,
        "resumed": one.needed_by_resumed,
    }
    return {
        "engine": one.engine,
        "step": one.step,
        "block": one.block,
        "group": one.group,
        "hash": one.hash,
        "owner": one.owner,
        "request": one.request,
        "needed_again": None if one.needed_by is None else needed,
        "followed": one.followed,
    }
