"""Named situations in which a prefix cache must give back the right rows.

Lengths are in blocks, so that a scenario hits whatever the model and the block size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omnicache_cli.errors import UsageError
from omnicache_cli.trace.workload import Lora, Prompt
from omnicache_cli.verify.runs import ONE_BY_ONE, How

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
    max_images: int = 1  # in one prompt
    max_num_seqs: int = 2  # requests that may run at once
    pictures: tuple[Path, Path] | None = None  # two that differ, of one size
    loras: tuple[Lora, ...] = ()  # adapters to send requests with
    audio_placeholder: str | None = None  # in a prompt's text; None: the model takes no audio
    sounds: tuple[Path, Path] | None = None  # two that differ, of one length


@dataclass(frozen=True, slots=True)
class Scenario:
    """`donors` fill the cache, one after the other; `hitters` are then served from it."""

    name: str
    what: str
    donors: tuple[Prompt, ...]
    hitters: tuple[Prompt, ...]
    max_tokens: int = 4
    others: tuple[Prompt, ...] = ()  # sent with the hitters, and need not hit
    how: How = ONE_BY_ONE  # the hitters and the others
    with_donors: bool = False  # the donors are sent with them too
    pool_blocks: int | None = None  # blocks that it may use; None: the whole pool
    preempts: bool = False  # it shows something only where a request is preempted

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Each prompt once."""
        distinct: list[Prompt] = []
        for prompt in (*self.donors, *self.hitters, *self.others):
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
    """The scenarios of these names, SCENARIOS for none, and in any case the user's own prompts.

    UsageError: there is no scenario of that name.
    """
    check_names(names)
    wanted = names or SCENARIOS
    chosen = [build(facts) for name, build in _BUILDERS.items() if name in wanted]
    if own:
        chosen.append(own_prompts(own, max_tokens))
    return chosen


def check_names(names: Sequence[str]) -> None:
    """UsageError: there is no scenario of that name."""
    for name in names:
        if name not in _BUILDERS and name != OWN:
            raise UsageError(f"no scenario {name!r}; choose: {', '.join((*_BUILDERS, OWN))}")


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


def _last_token(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    prompt = _ids(facts, (21, 2 * size + 7))
    twin = [*prompt[: size - 1], *_ids(facts, (22, 1)), *prompt[size:]]
    what = "the same prompt again, and one in which the last token of the first block is another"
    made = _fitting(facts, "last-token", what, [prompt], [prompt])
    return made if isinstance(made, NotRun) else replace(made, others=(Prompt(None, twin),))


def _decode(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    prompt = _ids(facts, (8, 2 * size + 3))
    what = "output over more than a block after a hit"
    return _fitting(facts, "decode", what, [prompt], [prompt], max_tokens=size + 8)


def _batch(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    one, other = _ids(facts, (10, 2 * size + 7)), _ids(facts, (11, 3 * size + 3))
    what = "two hits and a miss in one batch"
    return _together(facts, "batch", what, [one, other], [one, other], [(12, size + 11)])


def _same_step(facts: ModelFacts) -> Scenario | NotRun:
    prompt = _ids(facts, (13, 2 * facts.block_size + 5))
    what = "a hit on blocks that are written in the same step"
    return _together(facts, "same-step", what, [prompt], [prompt], [], with_donors=True)


def _chunked(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    donor = _ids(facts, (14, 2 * size + 1))
    hitter = _ids(facts, (14, 2 * size), (15, 3 * size + 5))
    what = "a hit, and the rest of the prompt in pieces of a block"
    made = _fitting(facts, "chunked", what, [donor], [hitter])
    return made if isinstance(made, NotRun) else replace(made, how=How(pieces=size))


def _eviction(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    one, other = _ids(facts, (16, 4 * size + 2)), _ids(facts, (17, 5 * size - 3))
    what = "blocks that were evicted and filled again, in a pool of six"
    made = _fitting(facts, "eviction", what, [one, other], [one, one])
    return made if isinstance(made, NotRun) else replace(made, pool_blocks=6)


def _preemption(facts: ModelFacts) -> Scenario | NotRun:
    size = facts.block_size
    one = _ids(facts, (18, size + 2))
    what = "a request loses its blocks and resumes, in a pool of five"
    tokens = size + 3
    made = _together(facts, "preemption", what, [one], [one], [(19, size + 2)], max_tokens=tokens)
    if isinstance(made, NotRun):
        return made
    return replace(made, pool_blocks=5, preempts=True)


def _salt(facts: ModelFacts) -> Scenario | NotRun:
    prompt = _ids(facts, (20, 2 * facts.block_size + 9))
    made = _fitting(facts, "salt", "a salt, the same again, and another", [prompt], [prompt])
    if isinstance(made, NotRun):
        return made
    mine, theirs = (Prompt(None, prompt, cache_salt=salt) for salt in ("mine", "theirs"))
    return replace(made, donors=(mine,), hitters=(mine,), others=(theirs,))


def _together(
    facts: ModelFacts,
    name: str,
    what: str,
    donors: list[list[int]],
    hitters: list[list[int]],
    others: list[tuple[int, int]],
    *,
    with_donors: bool = False,
    max_tokens: int = 4,
) -> Scenario | NotRun:
    if facts.max_num_seqs < 2:
        return NotRun(name, "the engine runs one request at a time: raise --max-num-seqs")
    made = _fitting(facts, name, what, donors, hitters, max_tokens)
    if isinstance(made, NotRun):
        return made
    misses = tuple(Prompt(None, _ids(facts, other)) for other in others)
    return replace(made, others=misses, how=How(together=True), with_donors=with_donors)


def _lora(facts: ModelFacts) -> Scenario | NotRun:
    ids = _ids(facts, (23, 2 * facts.block_size + 9))
    what = "an adapter, the same again, then the same tokens without one or with another"
    return _with_adapters(facts, ids, _fitting(facts, "lora", what, [ids], [ids]))


def _lora_mixed(facts: ModelFacts) -> Scenario | NotRun:
    ids = _ids(facts, (24, 2 * facts.block_size + 9))
    what = "a hit with an adapter, in one batch with the same tokens without one or with another"
    return _with_adapters(facts, ids, _together(facts, "lora-mixed", what, [ids], [ids], []))


def _with_adapters(facts: ModelFacts, ids: list[int], made: Scenario | NotRun) -> Scenario | NotRun:
    """The first adapter fills and hits; the others, and none, are sent beside it."""
    if isinstance(made, NotRun):
        return made
    if not facts.loras:
        return NotRun(made.name, "no adapter: name its folder with --lora")
    first, *others = (Prompt(None, ids, lora=lora) for lora in (*facts.loras, None))
    return replace(made, donors=(first,), hitters=(first,), others=tuple(others))


def _two_images(facts: ModelFacts) -> Scenario | NotRun:
    if facts.image_placeholder is None or facts.pictures is None:
        return NotRun("two-images", "the model takes no images")
    if facts.max_images < 2:
        option = """--engine 'limit_mm_per_prompt={"image": 2}'"""
        return NotRun("two-images", f"the engine takes one image in a prompt: {option}")
    text = f"{_around_image(facts)}And this? {facts.image_placeholder}"
    one, other = facts.pictures
    first, turned = Prompt(text, None, (one, other)), Prompt(text, None, (other, one))
    what = "two pictures, the same again, and the two changed round"
    return Scenario("two-images", what, (first,), (first,), others=(turned,))


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


_NO_AUDIO = "no audio: the model takes none, or it is not run as a stage (--stage)"


def _audio(facts: ModelFacts) -> Scenario | NotRun:
    if facts.audio_placeholder is None or facts.sounds is None:
        return NotRun("audio", _NO_AUDIO)
    text = f"{_more_than_a_block(facts)}{facts.audio_placeholder}What is it?"
    one, other = (Prompt(text, None, audio=(sound,)) for sound in facts.sounds)
    what = "a sound, the same again, and another"
    return Scenario("audio", what, (one,), (one,), others=(other,))


def _image_audio(facts: ModelFacts) -> Scenario | NotRun:
    if facts.pictures is None or facts.audio_placeholder is None or facts.sounds is None:
        return NotRun("image-audio", _NO_AUDIO)
    text = f"{_around_image(facts)}And this? {facts.audio_placeholder}"
    picture, (one, other) = facts.pictures[0], facts.sounds
    first, second = (Prompt(text, None, (picture,), audio=(sound,)) for sound in (one, other))
    what = "a picture and a sound, the same again, and with another sound"
    return Scenario("image-audio", what, (first,), (first,), others=(second,))


_BUILDERS: dict[str, Callable[[ModelFacts], Scenario | NotRun]] = {
    "repeat": _repeat,
    "shared-prefix": _shared,
    "inside-block": _inside,
    "one-token": _one_token,
    "last-token": _last_token,
    "decode": _decode,
    "batch": _batch,
    "same-step": _same_step,
    "chunked": _chunked,
    "eviction": _eviction,
    "preemption": _preemption,
    "salt": _salt,
    "image": _image,
    "other-image": _other_image,
    "two-images": _two_images,
    "lora": _lora,
    "lora-mixed": _lora_mixed,
    "audio": _audio,
    "image-audio": _image_audio,
}
SCENARIOS = tuple(name for name in _BUILDERS if name != "lora-mixed")
"""Those that run when none is named. vLLM 0.30 on a CPU fails `lora-mixed`: see docs/verify.md."""


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
    return f"{_more_than_a_block(facts)}{facts.image_placeholder}What does it show?"


def _more_than_a_block(facts: ModelFacts) -> str:
    words = "The picture below is one of a series; look at it closely. "
    text = words
    while facts.count_tokens(text) < facts.block_size + 8:
        text += words
    return text
