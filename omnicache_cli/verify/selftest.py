"""Plants the faults that `verify` has names for, one at a time, and asks `verify` to find them.

A verifier that has never seen a fault proves little by finding none. How a fault gets into an
engine is the Protocol `PlantingSession`; here is what is planted, and whether it was found.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from omnicache_cli.verify.faults import Fault
from omnicache_cli.verify.results import Pair, Verdict
from omnicache_cli.verify.run import Session, verify
from omnicache_cli.verify.scenarios import ModelFacts, NotRun, choose


@dataclass(frozen=True, slots=True)
class Plant:
    """One fault, and what `verify` must call it."""

    name: str
    into: str  # the part of the path that is damaged
    what: str
    scenario: str
    fault: Fault
    like: str = ""  # a published failure of this kind
    also: frozenset[Fault] = frozenset()  # what else it rightly leads to


PLANTS = (
    Plant(
        *("short-prefix", "restore", "the last rows of a restored prefix are lost", "repeat"),
        *(Fault.SHORT_PREFIX, "vllm-omni#4624"),
    ),
    Plant(
        *("shifted-slots", "slot mapping", "a prompt's slots are one off", "repeat"),
        Fault.SHIFTED,
    ),
    Plant(
        *("swapped-blocks", "block table", "the first two hit blocks are swapped", "repeat"),
        Fault.OTHER_BLOCK,
    ),
    Plant(
        *("first-in-batch", "block table", "a hit reads the blocks of the batch's first", "batch"),
        *(Fault.OTHER_REQUEST, "vllm-omni#1330"),
    ),
    Plant(
        *("lost-write", "write", "rows of refilled blocks are not written", "eviction"),
        Fault.STALE,
    ),
    Plant(
        *("zero-block", "write", "a block of one key holds zeros", "repeat"),
        *(Fault.ZERO, "vllm-omni#6039"),
    ),
    Plant(
        *("skipped-key", "restore", "a key is skipped: only this step's rows come", "repeat"),
        *(Fault.NEVER_CACHED, "vllm-omni#4317"),
    ),
    Plant(
        *("sliced-from-zero", "restore", "new rows are taken from the front", "repeat"),
        *(Fault.OFFSET, "vllm-omni#3665"),
    ),
    Plant(
        *("read-too-early", "restore", "a prefix is read before its step is saved", "same-step"),
        *(Fault.TOO_EARLY, "vllm-omni#6323"),
    ),
    Plant(
        *("padding-written", "write", "padding goes to the slots of the step before", "decode"),
        Fault.PADDING,
    ),
    Plant(
        *("unstable-row", "restore", "a restored row is another one each time", "repeat"),
        Fault.UNSTABLE,
    ),
    Plant(
        *("prefix-every-step", "restore", "each piece brings all rows so far", "chunked"),
        *(Fault.REPEATED, "vllm-omni#7119"),
    ),
    Plant(
        *("payload-as-rows", "rule", "one value per request counts as per token", "repeat"),
        *(Fault.PAYLOAD, "vllm-omni#3665"),
    ),
    Plant(
        *("other-dtype", "restore", "rows come back in another dtype", "repeat"),
        Fault.KIND,
    ),
    Plant(
        *("weak-hash", "hash", "a block's hash leaves out its last token", "last-token"),
        *(Fault.OTHER_REQUEST, "kekzl/imp#1301", frozenset({Fault.OUTPUT})),
    ),
    Plant(
        *("kept-hash", "block pool", "the hash of an evicted block stays", "eviction"),
        *(Fault.OTHER_REQUEST, "kekzl/imp#1301", frozenset({Fault.OUTPUT})),
    ),
    Plant(
        *("moved-kv", "KV cache", "keys and values move by a block before the hit", "repeat"),
        *(Fault.WRONG_KV, "", frozenset({Fault.OUTPUT})),
    ),
)


class PlantingSession(Session, Protocol):
    """A session that can be damaged."""

    def facts(self) -> ModelFacts: ...

    def why_not_planted(self, name: str) -> str | None:
        """Why this fault cannot be in this session; None: it can."""
        ...

    def planted(self, name: str) -> AbstractContextManager[None]:
        """The fault is there while it lasts."""
        ...


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault in one session."""

    plant: Plant
    session: str  # what it ran on
    not_planted: str | None = None  # why not
    hit_tokens: int = 0
    found: tuple[Pair, ...] = ()  # corrupt pairs

    @property
    def is_caught(self) -> bool:
        return bool(self.found)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Names that were given, the planted one first if it is among them."""
        names = {one.fault for one in self.found if one.fault is not None}
        return tuple(sorted(names, key=lambda name: (name is not self.plant.fault, str(name))))

    @property
    def is_named(self) -> bool:
        """The fault has its name, and nothing else is claimed that does not follow from it."""
        names = set(self.faults)
        return self.plant.fault in names and names <= {self.plant.fault, *self.plant.also}

    @property
    def diagnosis(self) -> str:
        """The sentence of the first pair that has the planted name."""
        texts = (one.diagnosis for one in self.found if one.fault is self.plant.fault)
        return next(texts, self.found[0].diagnosis if self.found else "")


@dataclass(slots=True)
class SelfTest:
    """What came out, over all sessions."""

    trials: list[Trial] = field(default_factory=list)
    num_clean_pairs: int = 0  # of undamaged runs, judged equal or rounding
    false_alarms: list[Pair] = field(default_factory=list)
    nothing_verified: list[Pair] = field(default_factory=list)  # of undamaged runs

    @property
    def planted(self) -> list[Trial]:
        return [one for one in self.trials if one.not_planted is None]

    @property
    def is_passed(self) -> bool:
        """Every fault was caught and named, nothing undamaged was accused, and something ran."""
        named = all(one.is_caught and one.is_named for one in self.planted)
        ran = bool(self.planted) and bool(self.num_clean_pairs)
        return named and ran and not self.false_alarms and not self.nothing_verified


def add_session(
    test: SelfTest,
    session: PlantingSession,
    name: str,
    on_run: Callable[[str], None] = lambda name: None,
    plants: Sequence[Plant] = PLANTS,
) -> None:
    """Run the undamaged scenarios of a session, then each fault in its own scenario."""
    facts = session.facts()
    clean = verify(session, choose(facts, (), (), max_tokens=4))
    for pair in clean.pairs:
        if pair.verdict is Verdict.CORRUPTION:
            test.false_alarms.append(pair)
        elif pair.verdict is Verdict.NOTHING:
            test.nothing_verified.append(pair)
        else:
            test.num_clean_pairs += 1
    on_run("clean")
    for plant in plants:
        test.trials.append(_trial(session, facts, plant, name))
        on_run(plant.name)


def _trial(session: PlantingSession, facts: ModelFacts, plant: Plant, name: str) -> Trial:
    why_not = session.why_not_planted(plant.name)
    (scenario,) = choose(facts, (plant.scenario,), (), max_tokens=4)
    if isinstance(scenario, NotRun):
        why_not = f"{scenario.name}: {scenario.why}"
    if why_not is not None:
        return Trial(plant, name, why_not)
    with session.planted(plant.name):
        result = verify(session, [scenario])
    found = tuple(one for one in result.pairs if one.verdict is Verdict.CORRUPTION)
    return Trial(plant, name, None, result.hit_tokens, found)
