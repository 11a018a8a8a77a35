"""Named situations in which a prefix cache must give back the right rows.

Lengths are in blocks, so that a scenario hits whatever the model and the block size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnicache_cli.errors import UsageError
from omnicache_cli.trace.workload import Prompt

OWN = "prompts"
"""Scenario of the prompts that the user brings."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a scenario must know of the engine."""

    block_size: int
    max_model_len: int
    vocab_size: int
    count_tokens: Callable[[str], int]
    image_placeholder: str | None  # in a prompt's text; None: the model takes no images
    pictures: tuple[Path, Path] | None = None  # two that differ, of one size


@dataclass(frozen=True, slots=True)
class Scenario:
    """`donors` fill the cache, `hitters` are served from it: each alone, in this order."""

    name: str
    what: str
    donors: tuple[Prompt, ...]
    hitters: tuple[Prompt, ...]
    max_tokens: int = 4

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Each prompt once."""
        distinct: list[Prompt] = []
        for prompt in (*self.donors, *self.hitters):
            if prompt not in distinct:
                distinct.append(prompt)
        return tuple(distinct)


@dataclass(frozen=True, slots=True)
class NotRun:
    """A scenario that this model has no use for."""

    name: str
    why: str


def choose(
    facts: ModelFacts, names: Sequence[str], own: tuple[Prompt, ...], max_tokens: int
) -> list[Scenario | NotRun]:
    """The scenarios of these names, all of them for none, and the user's own prompts.

    UsageError: there is no scenario of that name.
    """
    for name in names:
        if name not in _BUILDERS:
            raise UsageError(f"no scenario {name!r}; choose: {', '.join(SCENARIOS)}")
    chosen = [build(facts) for name, build in _BUILDERS.items() if not names or name in names]
    if own:
        chosen.append(own_prompts(own, max_tokens))
    return chosen


def own_prompts(prompts: tuple[Prompt, ...], max_tokens: int) -> Scenario:
    """The user's prompts, twice."""
    return Scenario(OWN, "your prompts, each a second time", prompts, prompts, max_tokens)


def _repeat(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    prompt = _ids(facts, (0, 3 * size + size // 2))
    return _fitting(facts, "repeat", "the same prompt again", [prompt], [prompt])


def _shared(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    first = _ids(facts, (1, 2 * size), (2, size + 5))
    second = _ids(facts, (1, 2 * size), (3, size + 9))
    return _fitting(facts, "shared-prefix", "two blocks in common", [first], [second])


def _inside(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    shared = 2 * size + size // 2
    first = _ids(facts, (4, shared), (5, size))
    second = _ids(facts, (4, shared), (6, size))
    what = "what is common ends inside a block"
    whole = _ids(facts, (7, 2 * size))
    return _fitting(facts, "inside-block", what, [first, whole], [second, whole])


def _one_token(facts: ModelFacts) -> Scenario | NotRun:
    prompt = _ids(facts, (9, 3 * facts.block_size + 1))
    what = "a hit that leaves one token: no other batch shape is as far from a whole prompt"
    return _fitting(facts, "one-token", what, [prompt], [prompt])


def _decode(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    prompt = _ids(facts, (8, 2 * size + 3))
    what = "output over more than a block after a hit"
    return _fitting(facts, "decode", what, [prompt], [prompt], max_tokens=size + 8)


def _image(facts: ModelFacts) -> Scenario | NotRun:
    if facts.image_placeholder is None or facts.pictures is None:
        return NotRun("image", "the model takes no images")
    prompt = Prompt(_around_image(facts), None, (facts.pictures[0],))
    return Scenario("image", "a picture, the same again", (prompt,), (prompt,))


def _other_image(facts: ModelFacts) -> Scenario | NotRun:
    if facts.image_placeholder is None or facts.pictures is None:
        return NotRun("other-image", "the model takes no images")
    text = _around_image(facts)
    one, other = (Prompt(text, None, (picture,)) for picture in facts.pictures)
    return Scenario("other-image", "the same text with another picture", (one,), (other,))


_BUILDERS: dict[str, Callable[[ModelFacts], Scenario | NotRun]] = {
    "repeat": _repeat,
    "shared-prefix": _shared,
    "inside-block": _inside,
    "one-token": _one_token,
    "decode": _decode,
    "image": _image,
    "other-image": _other_image,
}
SCENARIOS = tuple(_BUILDERS)


def _fitting(
    facts: ModelFacts,
    name: str,
    what: str,
    donors: list[list[int]],
    hitters: list[list[int]],
    max_tokens: int = 4,
) -> Scenario | NotRun:
    longest = max(len(one) for one in (*donors, *hitters)) + max_tokens
    if longest > facts.max_model_len:
        return NotRun(
            name,
            f"it needs {longest} tokens, the engine takes {facts.max_model_len}: raise "
            "--max-model-len or lower --block-size",
        )
    made = [tuple(Prompt(None, ids) for ids in many) for many in (donors, hitters)]
    return Scenario(name, what, made[0], made[1], max_tokens)


def _ids(facts: ModelFacts, *parts: tuple[int, int]) -> list[int]:
    """Token ids made of (seed, length) parts, away from both ends of the vocabulary, where the
    special tokens are."""
    first = facts.vocab_size // 20
    many = max(1, facts.vocab_size - 2 * first)
    return [
        first + (seed * 7_919 + index * 104_729 + index * index * 31) % many
        for seed, length in parts
        for index in range(length)
    ]


def _around_image(facts: ModelFacts) -> str:
    """Text of more than a block, the picture, a question."""
    words = "The picture below is one of a series; look at it closely. "
    text = words
    while facts.count_tokens(text) < facts.block_size + 8:
        text += words
    return f"{text}{facts.image_placeholder}What does it show?"
