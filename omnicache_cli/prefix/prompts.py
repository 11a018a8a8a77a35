"""The prompts of `explain --prompts`: what a cache would be asked for, without an engine.

Like the prompts file of `trace`, but with media by hash and place, and adapters that need not
exist: nothing is loaded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from omnicache_cli.errors import BadInputError


class MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One image, audio or video: its hash, and the placeholder tokens that it has in the prompt."""

    hash: str
    offset: int
    length: int
    modality: str = "image"


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter. Two may share a name: the path tells them apart."""

    name: str
    path: str = ""


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the file."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    id: str | None = None
    media: list[MediaItem] = []
    cache_salt: str | None = None
    lora: str | Adapter | None = None
    max_tokens: int | None = None  # 1, unless the reader says otherwise
    arrival_step: int | None = None  # before this step; else when all before it have ended
    abort_step: int | None = None  # its client goes away after this step
    skip_reading_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """One request. Exactly one of text and token_ids is set."""

    name: str
    text: str | None
    token_ids: list[int] | None
    media: tuple[MediaItem, ...]
    cache_salt: str | None
    adapter: Adapter | None
    max_tokens: int
    arrival_step: int | None
    abort_step: int | None
    skip_reading_prefix_cache: bool


def read_asked(lines: Iterable[bytes], *, name: str) -> Iterator[AskedPrompt]:
    """Requests named p0, p1, ... where a line has no id; blank lines are skipped.

    BadInputError names file and line, never the prompt itself.
    """
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        asked = read_line(line, where, f"p{len(seen)}")
        if asked.name in seen:
            raise BadInputError(f"{where}: a line before it has the id {asked.name}, too")
        seen.add(asked.name)
        yield asked


def read_line(line: bytes, where: str, name: str, *, max_tokens: int = 1) -> AskedPrompt:
    """One line that is not blank; `name` and `max_tokens` are the request's where it has none."""
    try:
        parsed = msgspec.json.decode(line, type=PromptLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "; without an engine images go by hash: media" if b'"images"' in line else ""
        raise BadInputError(
            f"{where}: not a prompt ({error}); see docs/explain.md for the fields{hint}"
        ) from error
    return _asked(parsed, where, name, max_tokens, may_be_negative=b"-" in line)


def _asked(
    line: PromptLine, where: str, name: str, max_tokens: int, *, may_be_negative: bool
) -> AskedPrompt:
    if (line.prompt is None) == (line.prompt_token_ids is None):
        raise BadInputError(f"{where}: give exactly one of prompt and prompt_token_ids")
    if not (line.prompt if line.prompt is not None else line.prompt_token_ids):
        raise BadInputError(f"{where}: the prompt is empty; vLLM needs at least one token")
    ids = line.prompt_token_ids
    if ids is not None and may_be_negative and min(ids) < 0:
        raise BadInputError(f"{where}: token id {min(ids)} is negative; ids start at 0")
    if line.max_tokens is not None and line.max_tokens < 1:
        raise BadInputError(f"{where}: max_tokens is {line.max_tokens}; the least is 1")
    for step in (line.arrival_step, line.abort_step):
        if step is not None and step < 0:
            raise BadInputError(f"{where}: step {step} is negative; steps start at 0")
    for item in line.media:
        if item.offset < 0 or item.length < 1 or not item.hash:
            raise BadInputError(
                f"{where}: media from token {item.offset}, {item.length} long; give a hash, an "
                "offset from 0 and a length from 1"
            )
        if ids is not None and item.offset + item.length > len(ids):
            raise BadInputError(
                f"{where}: media ends at token {item.offset + item.length}, and the prompt has "
                f"{len(ids)}"
            )
    adapter = Adapter(line.lora) if isinstance(line.lora, str) else line.lora
    return AskedPrompt(
        line.id or name,
        line.prompt,
        ids,
        tuple(line.media),
        line.cache_salt,
        adapter,
        max_tokens if line.max_tokens is None else line.max_tokens,
        line.arrival_step,
        line.abort_step,
        line.skip_reading_prefix_cache,
    )
