"""Invariant 7: how long a prefix hit may be."""

from collections.abc import Iterator

from omnicache_cli.trace.invariants import violation as why
from omnicache_cli.trace.records import Admission, EngineSource

Finding = tuple[int | None, str, str, str]
"""Group, what, expected, found."""

_FULL = "FullAttentionSpec"


def wrong_hit(engine: EngineSource, one: Admission) -> Iterator[Finding]:
    """A hit is a multiple of the matching unit, leaves a token to compute, and every group has it.

    The lookup reconciles the groups to the longest prefix that all of them have. Full attention
    has every shorter prefix of what it has; a window or a recurrent state need not. So the hit is
    the minimum over the groups where that minimum is not full attention's, else at most that.
    """
    hit = one.hit_tokens
    unit = engine.cache_hit_alignment_tokens
    if unit is not None and hit % unit:
        yield None, "hit tokens", f"a multiple of {unit}", str(hit)
    if hit and hit >= one.queried_tokens:
        asked = one.queried_tokens
        expected = f"fewer than the {asked} asked for" if asked else "0, the cache was not asked"
        yield None, "hit tokens", expected, str(hit)
    own = {
        number: tokens
        for number, tokens in enumerate(one.group_hit_tokens)
        if number < len(engine.groups) and engine.groups[number].prefix_cacheable
    }
    if not own or any(engine.options.get(name) for name in ("kv_connector", "use_eagle")):
        return
    group, least = min(own.items(), key=lambda item: item[1])
    binding = [number for number, tokens in own.items() if tokens == least]
    specs = {engine.groups[number].spec for number in own}
    closed = all(engine.groups[number].spec == _FULL for number in binding)
    exact = len(specs) == 1 or (len(specs) == 2 and _FULL in specs and not closed)
    if hit > least or (exact and hit < least):
        words = "" if exact else " or less"
        yield group, "hit tokens", f"{least}{words}, the group's own longest hit", str(hit)


def why_not(engine: EngineSource, one: Admission) -> str | None:
    """Why the groups' own answers say nothing about this hit."""
    if len(engine.groups) > 1 and one.queried_tokens:
        if engine.options.get("kv_connector"):
            return why.LOADED
        if engine.options.get("use_eagle"):
            return why.SPECULATIVE
        if not one.group_hit_tokens:
            return why.NO_GROUP_HITS
    return None
