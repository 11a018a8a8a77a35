"""The reasons for which a prefix hit ends where it does, by name."""

from dataclasses import dataclass, field
from typing import Any

REASONS: dict[str, str] = {
    "full-blocks": "every full block was hit; what is left fills no block",
    "last-token": "the last token is always computed, so the last full block is not reused",
    "prompt-shorter-than-block": "the prompt fills no block",
    "shared-shorter-than-block": "the part shared with an earlier request fills no block",
    "nothing-shared": "no earlier request begins with the same block",
    "tokens-differ": "a block differs from that of every earlier request",
    "donor-ends": "the request that shares most has no further full block",
    "media-differs": "another image, audio or video stands in the block",
    "media-offset-differs": "the same image, audio or video begins at another place in the block",
    "embeds-differ": "the prompt embeddings of the block differ",
    "lora-differs": "the nearest request has another LoRA adapter, or none",
    "salt-differs": "the nearest request has another cache salt, or none",
    "evicted": "the block was in the cache and was evicted",
    "reset": "the block was in the cache, and the cache was reset",
    "not-computed-yet": "the request that shares the block had not computed it yet",
    "never-cached": "a request had the block, and it never entered the cache",
    "group-said-less": "one KV cache group did not keep what the others have",
    "alignment": "hits are multiples of a unit that is larger than a block",
    "speculative-drop": "speculative decoding drops the last matched unit",
    "caching-off": "prefix caching is off",
    "skips-cache": "the request asks not to read the cache",
    "session": "a part of a streaming-input session: the cache is not asked",
    "never-admitted": "the request was never admitted",
    "unknown": "the run does not tell",
}
"""Name -> what it means. `explain --fail-on` takes these names."""

COMPLETE = frozenset({"full-blocks", "last-token", "prompt-shorter-than-block"})
"""Nothing that was in reach was missed."""

NEW = frozenset({"nothing-shared", "tokens-differ", "donor-ends"})
"""The request goes on with what no request had before it."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that holds at the place where a hit ends."""

    name: str
    limit_tokens: int  # the hit cannot be longer while it holds
    detail: str  # a clause; no capital, no full stop
    evidence: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)  # the same for scripts
