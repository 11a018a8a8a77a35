"""Why a request computed what it computed, where plain arithmetic says it.

Owns one rule of vLLM: what is reused are full blocks, and the last token is always computed, since
its logits are needed. Everything else that makes a prefix miss is not known here.
"""

from omnicache_cli.trace.records import Admission, EngineSource

FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")


def why_computed(engine: EngineSource, admission: Admission) -> str | None:
    """Why not all tokens were hit, in one line. None: the rule does not explain just this hit."""
    size = _block_size(engine)
    num_tokens, hit = admission.queried_tokens, admission.hit_tokens
    if (
        size is None
        or admission.resumed
        or admission.num_computed_tokens != hit  # a KV connector brought more
        or num_tokens == 0  # the cache was not asked
        or hit != (num_tokens - 1) // size * size
    ):
        return None
    computed = num_tokens - hit
    text = f"{computed} token{'' if computed == 1 else 's'} computed: "
    if num_tokens % size == 0:
        return f"{text}the last token is always computed, so the last full block is not reused"
    if num_tokens < size:
        return f"{text}the prompt fills no block of {size}"
    return f"{text}vLLM reuses full blocks of {size} and always computes the last token"


def _block_size(engine: EngineSource) -> int | None:
    """Of an engine with one group of full attention and a cache that is on."""
    if len(engine.groups) != 1 or not engine.enable_prefix_caching:
        return None
    (group,) = engine.groups
    if group.spec not in FULL_ATTENTION or not group.prefix_cacheable:
        return None
    return group.block_size if group.block_size == engine.block_size else None
