"""What a partitioned or a compressed cache would hold. vLLM has neither: every result says so."""

from collections.abc import Mapping
from dataclasses import dataclass

from omnicache_cli.errors import UsageError

MODALITIES = ("text", "image", "video", "audio")
LABEL = "what-if: vLLM neither partitions nor compresses its cache by modality"


@dataclass(frozen=True, slots=True)
class Share:
    """A modality's part of the cache: tokens of room, and items of it that fit."""

    modality: str
    share: float  # of the blocks
    kept: float  # of each item's tokens, after compression
    tokens: int  # that the part holds, before compression
    items: int | None  # None where no size of an item was given


def parse_shares(text: str | None, option: str) -> dict[str, float]:
    """text=0.5,image=0.3: numbers above 0, at most 1."""
    shares: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, number = part.partition("=")
        name = name.strip()
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if name not in MODALITIES or not 0 < share <= 1 or name in shares:
            raise UsageError(
                f"{option} {part!r}: write each of {', '.join(MODALITIES)} once, as image=0.3, "
                "above 0 and up to 1"
            )
        shares[name] = share
    return shares


def partition(
    num_tokens: int,
    budget: Mapping[str, float],
    compression: Mapping[str, float],
    items: Mapping[str, int],
) -> list[Share]:
    """`items`: tokens of one item per modality. Without a budget each modality gets everything."""
    if budget and sum(budget.values()) > 1 + 1e-9:
        raise UsageError(
            f"--modal-budget adds up to {sum(budget.values()):g}; the parts of one cache are at "
            "most 1 together"
        )
    names = list(budget) or [name for name in MODALITIES if name in {*compression, *items}]
    shares = []
    for name in names:
        share, kept = budget.get(name, 1.0), compression.get(name, 1.0)
        tokens = int(num_tokens * share / kept)
        size = items.get(name)
        shares.append(Share(name, share, kept, tokens, tokens // size if size else None))
    return shares
