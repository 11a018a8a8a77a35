"""One lookup, and the same with one thing after the other taken out of its way.

The first thing that makes the hit longer when it is gone is the reason that bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from omnicache_cli.prefix.differences import parting, who
from omnicache_cli.prefix.groups import group_evidence
from omnicache_cli.prefix.ledger import Entry, Ledger
from omnicache_cli.prefix.lookup import Has, Layout, Query, find_hit, group_hit, own_hits
from omnicache_cli.prefix.reasons import Reason
from omnicache_cli.trace.records import NO_REQUEST, Admission
from omnicache_cli.trace.steps import Request
from omnicache_cli.trace.views.words import counted

OBSTACLES = (
    *("speculative-drop", "alignment", "last-token", "evicted", "reset", "not-computed-yet"),
    *("group-said-less", "never-cached", "content"),
)
"""What can end a hit, in the order in which it is tried."""

MAX_SHARERS = 256
"""Requests with the same first block that are looked at for another adapter or salt."""

MAX_WARNINGS = 3

AT_ONE_PLACE = (
    *("content", "evicted", "reset", "not-computed-yet", "never-cached", "last-token"),
    *("speculative-drop", "group-said-less", "alignment"),
)
"""The order in which several are named that end a hit at one place, so that none does alone."""


@dataclass(slots=True)
class Case:
    """One lookup over what the cache held then."""

    ledger: Ledger
    layout: Layout
    request: Request
    admission: Admission
    _used: list[tuple[str, int, int]] = field(default_factory=list)
    # of the last variant: what was taken for present: obstacle, group, entry

    @property
    def num_tokens(self) -> int:
        return self.admission.queried_tokens

    def hit(self, removed: frozenset[str]) -> int:
        """Tokens hit if these obstacles were not there."""
        self._used = []
        layout = self.layout
        query = self._query(removed)
        if "alignment" in removed:
            layout = _unaligned(layout)
        return find_hit(layout, query)

    def _query(self, removed: frozenset[str]) -> Query:
        size = self.layout.hash_block_size
        hashes = min(len(self.request.block_hashes), self.num_tokens // size)
        last = 0 if "last-token" in removed else 1
        return Query(
            self._has(removed), hashes, self.num_tokens - last, "speculative-drop" not in removed
        )

    def _has(self, removed: frozenset[str]) -> Has:
        ledger, hashes, size = self.ledger, self.request.block_hashes, self.layout.hash_block_size
        sparse = {
            number
            for group in self.layout.groups
            if group.kind != "full"
            for number in group.numbers
        }

        def allowed(group: int, entry: int) -> str | None:
            one = hashes[entry]
            gone = ledger.gone((group, one))
            if gone is not None:
                name = "reset" if gone.was_reset else "evicted"
                if name in removed:
                    return name
            end = (entry + 1) * size
            if "not-computed-yet" in removed and ledger.computing(one, end) is not None:
                return "not-computed-yet"
            if group in sparse and "group-said-less" in removed and ledger.was_seen(one):
                return "group-said-less"
            if "never-cached" in removed and ledger.was_seen(one):
                return "never-cached"
            return "content" if "content" in removed else None

        def has(group: int, entry: int) -> bool:
            if ledger.has((group, hashes[entry])):
                return True
            reason = allowed(group, entry) if removed else None
            if reason is not None:
                self._used.append((reason, group, entry))
            return reason is not None

        return has

    def donor(self) -> Entry | None:
        """Who cached the last block of the hit."""
        size = self.layout.hash_block_size
        entry = self.admission.hit_tokens // size - 1
        if not 0 <= entry < len(self.request.block_hashes):
            return None
        one = self.request.block_hashes[entry]
        found = [self.ledger.entry((number, one)) for number in range(self.layout.num_groups)]
        return next((entry for entry in found if entry is not None), None)

    # -- reasons ------------------------------------------------------------------------------

    def reasons(self) -> tuple[Reason, Reason | None]:
        """The one that bound, and the next that would."""
        removed: frozenset[str] = frozenset()
        found: list[Reason] = []
        while len(found) < 2:
            hit = self.hit(removed)
            name = self._obstacle(hit, removed)
            if name is None:
                break
            found.append(self._reason(name, hit, removed))
            removed |= {name}
        if not found:
            return self._complete(), None
        return found[0], found[1] if len(found) > 1 else None

    def _obstacle(self, hit: int, removed: frozenset[str]) -> str | None:
        """What ends a hit of this length. None: the prompt does."""
        unit = self.layout.unit
        if hit >= self.num_tokens // unit * unit and "alignment" not in removed:
            return self._too_long_unit(hit)
        left = [one for one in OBSTACLES if one not in removed]
        for name in left:
            if self._is_longer(name, hit, removed):
                return name
        caps = {}
        for name in left:
            others = frozenset(OBSTACLES) - {name, "alignment"}
            caps[name] = self.hit(others)
        name = min(caps, key=lambda one: (caps[one], AT_ONE_PLACE.index(one)), default="")
        full = self.num_tokens // unit * unit
        return name if name and caps[name] < full else None

    def _is_longer(self, name: str, hit: int, removed: frozenset[str]) -> bool:
        if name == "alignment":
            return self._unrounded(removed) > hit
        return self.hit(removed | {name}) > hit

    def _unrounded(self, removed: frozenset[str]) -> int:
        """What full attention has, in its own blocks, where that is less than one unit more."""
        group = self.layout.groups[0]
        if group.kind != "full" or group.block_size >= self.layout.unit:
            return 0
        fine = replace(self.layout, unit=group.block_size)
        query = self._query(removed)
        longest = group_hit(fine, group, query, query.max_tokens, group.drops_block)
        hit = self.hit(removed)
        return longest if longest - longest % self.layout.unit == hit else 0

    def _too_long_unit(self, hit: int) -> str | None:
        smallest = min(group.block_size for group in self.layout.groups)
        short = self.num_tokens < self.layout.unit and hit == 0
        return "alignment" if short and smallest < self.layout.unit else None

    def _complete(self) -> Reason:
        unit, tokens = self.layout.unit, self.num_tokens
        hit = tokens // unit * unit
        if not hit:
            text = f"the prompt of {counted(tokens, 'token')} fills no block of {unit}"
            return Reason("prompt-shorter-than-block", 0, text)
        blocks = counted(hit // unit, "full block")
        rest = counted(tokens - hit, "token")
        text = f"its {blocks} of {unit} were hit; the last {rest} fill no block"
        return Reason("full-blocks", hit, text)

    def _reason(self, name: str, hit: int, removed: frozenset[str]) -> Reason:
        if name == "last-token":
            text = "the last token is always computed, so the last full block is not reused"
            return Reason(name, hit, text)
        if name == "speculative-drop":
            unit = counted(self.layout.unit, "token")
            without = self.hit(removed | {name})
            text = f"speculative decoding drops the last matched unit of {unit}"
            return Reason(name, hit, text, (f"without it {without} tokens would be hit",))
        if name == "alignment":
            return self._alignment(hit, removed)
        if name == "content":
            return self._content(hit)
        longer = self.hit(removed | {name})
        places = [(e, g) for used, g, e in self._used if used == name]
        if name == "group-said-less":
            return self._group(hit, longer)
        if not places:  # it holds, but something else as well: look without the others
            self.hit(frozenset(OBSTACLES) - {"content", "alignment"})
            places = [(e, g) for used, g, e in self._used if used == name]
        if not places:
            return Reason("unknown", hit, "the run does not tell which block was missing")
        entry, group = min(places)
        return self._missing(name, hit, group, entry)

    def _missing(self, name: str, hit: int, group: int, entry: int) -> Reason:
        """A block that some request had."""
        one = self.request.block_hashes[entry]
        size = self.ledger.engine.groups[group].block_size
        block = entry * self.layout.hash_block_size // size
        several = f" of group {group}" if self.layout.num_groups > 1 else ""
        place = f"block {block}{several} (tokens {block * size} .. {(block + 1) * size - 1})"
        data: dict[str, object] = {"block": block, "group": group, "hash": one}
        gone = self.ledger.gone((group, one))
        if name in ("evicted", "reset") and gone is not None:
            entered = "before records were lost"
            if gone.entry is not None:
                entered = (
                    f"at step {gone.entry.step} by {self._who(gone.entry.request, gone.entry.name)}"
                )
                data |= {
                    "block_id": gone.entry.block,
                    "cached_step": gone.entry.step,
                    "cached_by": gone.entry.request,
                }
            left = f"evicted at step {gone.step}"
            if gone.was_reset:
                left = f"lost at step {gone.step}, when the prefix cache was reset"
            elif gone.request != NO_REQUEST:
                left += f" to make room for {self._who(gone.request, gone.name)}"
            data |= {"left_step": gone.step, "taken_by": gone.request}
            return Reason(name, hit, f"{place} was cached {entered} and {left}", (), data)
        runner = self.ledger.computing(one, (entry + 1) * self.layout.hash_block_size)
        if name == "not-computed-yet" and runner is not None:
            done = self.ledger.computed.get(runner, 0)
            donor = self._who(runner, self.ledger.name(runner))
            data |= {"donor": runner, "donor_computed_tokens": done}
            text = f"{donor} has the same {place} and had not computed it yet"
            return Reason(name, hit, text, (f"{donor} had computed {done} tokens",), data)
        sharer = next(self.ledger.sharers(one), None)
        owner = "a request that is forgotten" if sharer is None else who(sharer)
        text = f"{owner} has the same {place}, and it never entered the cache"
        return Reason(name, hit, text, (self._why_never(size),), data)

    def _why_never(self, block_size: int) -> str:
        unit = self.layout.unit
        if unit > block_size:
            return f"blocks enter the cache in units of {unit} tokens, and it filled no further one"
        if unit < block_size:
            return "inside a block only the end of a prompt enters the cache"
        return "it ended before the block was cached"

    def _who(self, number: int, name: str) -> str:
        if number == NO_REQUEST:
            return "an unknown request"
        return f"#{number} {name}".rstrip()

    def _content(self, hit: int) -> Reason:
        """The first block that no request before had."""
        hashes, size = self.request.block_hashes, self.layout.hash_block_size
        end = min(len(hashes), self.num_tokens // size)
        seen = self.ledger.was_seen
        entry = next((one for one in range(end) if not seen(hashes[one])), None)
        if entry is None:
            text = "the run does not tell which block was missing"
            return Reason("unknown", hit, text)
        return parting(self.ledger, self.request, entry, hit)

    def _alignment(self, hit: int, removed: frozenset[str]) -> Reason:
        unit = self.layout.unit
        sizes = sorted({group.block_size for group in self.layout.groups})
        made = f"the least common multiple of block sizes {', '.join(map(str, sizes))}"
        told = f"hits are multiples of {unit} tokens, {made}"
        data: dict[str, object] = {"unit": unit, "block_sizes": sizes}
        if self.num_tokens < unit:
            tokens = counted(self.num_tokens, "token")
            return Reason("alignment", hit, f"{told}, and the prompt has {tokens}", (), data)
        there = self._unrounded(removed)
        text = f"{told}, and the cache has {there} tokens of this prefix"
        return Reason("alignment", hit, text, (), {**data, "unrounded_tokens": there})

    def _group(self, hit: int, longer: int) -> Reason:
        """A window or a state that was not kept where the others could go on."""
        own = own_hits(self.layout, self._query(frozenset()))
        told = self.admission.group_hit_tokens or own
        lines = group_evidence(self.ledger, self.layout, self.request, list(told), longer)
        short = min(told)
        least = [number for number, answer in enumerate(told) if answer == short]
        names = ", ".join(str(one) for one in least)
        word = "group" if len(least) == 1 else "groups"
        text = (
            f"{word} {names} did not keep this prefix up to token {longer}: alone "
            f"{'it hits' if len(least) == 1 else 'they hit'} {short}"
        )
        if max(told) > short:
            text += f", the others {max(told)}"
        data: dict[str, object] = {"groups": list(told), "least": least, "needed_at": longer}
        return Reason("group-said-less", hit, text, tuple(lines), data)

    # -- false hits ---------------------------------------------------------------------------

    def collisions(self) -> Iterator[str]:
        """Requests of another adapter or salt whose first block has the same hash."""
        if not self.request.block_hashes:
            return
        mine = self.request.record
        first = self.request.block_hashes[0]
        told: dict[str, None] = {}
        for owner in islice(self.ledger.sharers(first), MAX_SHARERS):
            theirs = owner.record
            if theirs.lora_name == mine.lora_name and theirs.lora_id != mine.lora_id:
                kind = (
                    f"same name, different adapter: LoRA {mine.lora_name} is id {mine.lora_id} "
                    f"here and {theirs.lora_id} in {who(owner)}"
                )
            elif (theirs.lora_name, theirs.cache_salt) != (mine.lora_name, mine.cache_salt):
                kind = (
                    f"another LoRA adapter or cache salt of the same text: {who(owner)} has "
                    f"{_identity(owner)}, and it has {_identity(self.request)}"
                )
            else:
                continue
            hit = self.admission.hit_tokens
            told[f"false hit, {kind}" if hit else f"its hash is that of another, {kind}"] = None
            if len(told) == MAX_WARNINGS:
                break
        yield from told


def _identity(request: Request) -> str:
    record = request.record
    parts = [f"adapter {record.lora_name}"] if record.lora_name is not None else []
    parts += ["a salt"] if record.cache_salt is not None else []
    return " and ".join(parts) or "neither"


def _unaligned(layout: Layout) -> Layout:
    """Full attention alone, in its own blocks."""
    group = layout.groups[0]
    return replace(layout, groups=(group,), unit=group.block_size, num_groups=1)
