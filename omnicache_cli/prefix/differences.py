"""Where a request parts from those before it: the nearest one, and what differs in the block.

Without token ids in the run a difference is known to the block; extra keys (image, LoRA, salt) are
always there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from omnicache_cli.prefix.ledger import Ledger
from omnicache_cli.prefix.reasons import Reason
from omnicache_cli.trace.records import MultiModalSpan
from omnicache_cli.trace.steps import Request
from omnicache_cli.trace.views.words import counted

MAX_CANDIDATES = 1024
"""Earlier requests that one is compared with: the latest of those that share most blocks."""

MAX_EQUALS = 64
"""Of those that agree in as many tokens, the latest whose block is looked at."""

NO_TOKEN_IDS = "which token differs is not recorded; trace with --with-token-ids"
NO_SHARED_TOKENS = "how many tokens it shares is not recorded; trace with --with-token-ids"
TOKENS_TOO = "whether tokens differ too is not recorded; trace with --with-token-ids"


@dataclass(frozen=True, slots=True)
class Nearest:
    """An earlier request, and how far it agrees."""

    request: Request
    num_tokens: int  # agreed; whole hash blocks where token ids are not recorded
    to_the_token: bool  # the prompts of both are recorded


@dataclass(frozen=True, slots=True)
class Place:
    """The first hash block that no request before had."""

    request: Request
    entry: int
    size: int  # tokens of a hash block
    limit: int  # longest hit that ends before it

    @property
    def words(self) -> str:
        first = self.entry * self.size
        return f"block {self.entry} (tokens {first} .. {first + self.size - 1})"


def parting(ledger: Ledger, request: Request, entry: int, limit: int) -> Reason:
    """Why hash block `entry` of a request is unlike those of all requests before it."""
    place = Place(request, entry, ledger.engine.hash_block_size, limit)
    others = _candidates(ledger, request, entry)
    if not others:
        if entry == 0:
            return Reason("nothing-shared", 0, "no request ran before it")
        detail = f"no request before it has {place.words}; who shares the rest is forgotten"
        return Reason("tokens-differ", limit, detail)
    near = _nearest(place, others)
    data: dict[str, Any] = {
        "block": entry,
        "first_token": entry * place.size,
        "donor": near.request.number,
        "donor_id": near.request.external_id,
        "agreed_tokens": near.num_tokens,
        "to_the_token": near.to_the_token,
    }
    if not near.to_the_token or near.num_tokens >= (entry + 1) * place.size:
        apart = (
            _identity(place, near, others, data)
            or _media(place, near, data)
            or _embeds(place, near, data)
        )
        if apart is not None:
            return apart
    return _tokens(place, near, data)


def who(request: Request) -> str:
    return f"#{request.number} {request.external_id}"


def _candidates(ledger: Ledger, request: Request, entry: int) -> list[Request]:
    found = ledger.sharers(request.block_hashes[entry - 1]) if entry else ledger.ran()
    latest = list(islice((one for one in found if one is not request), MAX_CANDIDATES))
    return latest[::-1]


def _nearest(place: Place, others: Sequence[Request]) -> Nearest:
    """Most tokens in common, then the same adapter and salt, then the most alike block."""

    def rank(near: Nearest) -> tuple[bool, bool, bool, int]:
        other = near.request
        goes_on = len(other.block_hashes) > place.entry
        alike = media_keys(other, place.entry) == media_keys(place.request, place.entry)
        same = _identity_of(other) == _identity_of(place.request)
        return same, goes_on, goes_on and alike, other.number

    counts = [_agreed_tokens(place, other) for other in others]
    most = max(counts)
    equals = [other for other, count in zip(others, counts, strict=True) if count == most]
    mine = place.request.record.token_ids
    return max(
        (
            Nearest(other, most, bool(mine) and bool(other.record.token_ids))
            for other in equals[-MAX_EQUALS:]
        ),
        key=rank,
    )


def _agreed_tokens(place: Place, other: Request) -> int:
    mine, theirs = place.request.record.token_ids, other.record.token_ids
    agreed = place.entry * place.size
    return common(mine, theirs, start=agreed) if mine and theirs else agreed


def common(one: Sequence[int], other: Sequence[int], *, start: int = 0) -> int:
    """How many tokens two prompts begin with alike; the first `start` are known to be."""
    end = min(len(one), len(other))
    for index in range(start, end):
        if one[index] != other[index]:
            return index
    return max(start, end)


# -- tokens -----------------------------------------------------------------------------------


def _tokens(place: Place, near: Nearest, data: dict[str, Any]) -> Reason:
    other = near.request
    goes_on = len(other.block_hashes) > place.entry
    theirs = other.record.token_ids
    ended = not goes_on
    if near.to_the_token and theirs is not None:
        ended = near.num_tokens >= len(theirs) and not goes_on
    evidence = [f"{who(other)} agrees in {counted(near.num_tokens, 'token')}"]
    if place.entry == 0 and not near.to_the_token:
        evidence = [NO_SHARED_TOKENS]
    elif near.to_the_token:
        evidence += _first_token(place, near)
    elif goes_on and place.entry:
        evidence.append(NO_TOKEN_IDS)
    proof = tuple(evidence)
    if place.entry == 0 and near.to_the_token and near.num_tokens:
        detail = (
            f"the {counted(near.num_tokens, 'token')} that it shares with {who(other)} "
            f"fill no block of {place.size}"
        )
        return Reason("shared-shorter-than-block", 0, detail, proof, data)
    if place.entry == 0:
        detail = f"no request before it begins with the same {place.words}"
        return Reason("nothing-shared", 0, detail, proof, data)
    if ended:
        detail = f"{who(other)}, which shares most, has no full {place.words}"
        return Reason("donor-ends", place.limit, detail, proof, data)
    detail = f"{place.words} differs from that of every request before it"
    return Reason("tokens-differ", place.limit, detail, proof, data)


def _first_token(place: Place, near: Nearest) -> list[str]:
    mine, theirs = place.request.record.token_ids, near.request.record.token_ids
    at = near.num_tokens
    if mine is None or theirs is None or at >= len(mine):
        return []
    if at >= len(theirs):
        return [f"its prompt ends there, and token {at} of this one is {mine[at]}"]
    return [f"token {at} is {mine[at]} here and {theirs[at]} there"]


# -- adapter and salt -------------------------------------------------------------------------


def _identity_of(request: Request) -> tuple[str | None, str | None]:
    return request.record.lora_name, request.record.cache_salt


def _identity(
    place: Place, near: Nearest, others: Sequence[Request], data: dict[str, Any]
) -> Reason | None:
    """Adapter and salt are in the hash: who has others shares nothing, whatever its tokens."""
    mine = place.request.record
    if not near.to_the_token and any(
        _identity_of(one) == _identity_of(place.request) for one in others
    ):
        return None
    other = near.request
    told = TOKENS_TOO
    if near.to_the_token:
        told = f"{who(other)} agrees in {counted(near.num_tokens, 'token')}"
    elif any(one.record.lora_name == mine.lora_name for one in others):
        other = next(one for one in reversed(others) if one.record.lora_name == mine.lora_name)
        data = {**data, "donor": other.number, "donor_id": other.external_id}
    if other.record.lora_name != mine.lora_name:
        detail = f"it has {_adapter(mine.lora_name)}, and {who(other)} has "
        detail += _adapter(other.record.lora_name)
        return Reason("lora-differs", 0, detail, (told,), data)
    if other.record.cache_salt != mine.cache_salt:
        theirs = "no cache salt" if other.record.cache_salt is None else "a cache salt"
        both = None not in (mine.cache_salt, other.record.cache_salt)
        has = "a cache salt" if mine.cache_salt is not None else "no cache salt"
        detail = f"it has {has}, and {who(other)} has {'another one' if both else theirs}"
        return Reason("salt-differs", 0, detail, (told,), data)
    return None


def _adapter(name: str | None) -> str:
    return "no LoRA adapter" if name is None else f"LoRA adapter {name}"


# -- images, audio, embeddings ----------------------------------------------------------------


def keys_of(request: Request, entry: int) -> list[str]:
    """Extra keys of one hash block of the prompt."""
    return next((keys for index, keys in request.record.extra_keys if index == entry), [])


def media_keys(request: Request, entry: int) -> list[tuple[str, int]]:
    """Hash of each multimodal item in a hash block, and its first token, counted from the block."""
    found = []
    for key in keys_of(request, entry):
        kind, _, rest = key.partition(":")
        name, _, offset = rest.rpartition("@")
        if kind == "mm" and offset.removeprefix("-").isdecimal():
            found.append((name, int(offset)))
    return found


def _media(place: Place, near: Nearest, data: dict[str, Any]) -> Reason | None:
    mine, theirs = media_keys(place.request, place.entry), media_keys(near.request, place.entry)
    if mine == theirs or len(near.request.block_hashes) <= place.entry:
        return None
    first = next((key for key in mine if key not in theirs), None)
    gone = next((key for key in theirs if key not in mine), None)
    told = (f"{who(near.request)} agrees in {counted(near.num_tokens, 'token')}",)
    if first is None:
        item = _item(near.request, gone, place)
        detail = f"{who(near.request)} has {item} in {place.words}, and it has not"
        return Reason("media-differs", place.limit, detail, told, {**data, "item": item})
    item = _item(place.request, first, place)
    moved = next((key for key in theirs if key[0] == first[0]), None)
    if moved is not None:
        there = place.entry * place.size + moved[1]
        detail = f"{item} in {place.words} begins at token {there} in {who(near.request)}"
        return Reason("media-offset-differs", place.limit, detail, told, {**data, "item": item})
    if gone is None:
        detail = f"{item} stands in {place.words}, and {who(near.request)} has none there"
    else:
        detail = f"{item} stands in {place.words}, and {who(near.request)} has another there: "
        detail += _item(near.request, gone, place)
    return Reason("media-differs", place.limit, detail, told, {**data, "item": item})


def _item(request: Request, key: tuple[str, int] | None, place: Place) -> str:
    """`image 1 (tokens 64 .. 127, hash 5d0c...)`: items are counted from 0."""
    if key is None:
        return "an item"
    first = place.entry * place.size + key[1]
    for number, span in enumerate(request.record.multimodal):
        if span.hash == key[0] and span.offset == first:
            return f"{span.modality} {number} ({_span(span)}, hash {_short(span.hash)})"
    return f"an item (from token {first}, hash {_short(key[0])})"


def _span(span: MultiModalSpan) -> str:
    return f"tokens {span.offset} .. {span.offset + span.length - 1}"


def _short(one: str) -> str:
    return one if len(one) <= 12 else f"{one[:12]}…"


def _embeds(place: Place, near: Nearest, data: dict[str, Any]) -> Reason | None:
    def embeds(request: Request) -> list[str]:
        return [key for key in keys_of(request, place.entry) if key.startswith("embeds:")]

    if embeds(place.request) == embeds(near.request):
        return None
    detail = f"the prompt embeddings of {place.words} differ from those of {who(near.request)}"
    return Reason("embeds-differ", place.limit, detail, (), data)
