"""Every reason of `omnicache explain` on vLLM's real scheduler and block pool.

X1 to X9 are failures that people reported; each with its neighbours. The hits are vLLM's own.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from omnicache_cli.engine.modelfree.scheduler import (
    GroupPlan,
    Media,
    PoolPlan,
    PoolRequest,
    PoolScheduler,
)
from omnicache_cli.errors import BadInputError
from omnicache_cli.prefix.explain import Explanation
from omnicache_cli.prefix.reasons import REASONS
from tests.engine.model_free import explained, full, ids, one_by_one, sliding, states

Found = dict[str, Explanation]


def told(found: Found, name: str) -> tuple[int | None, str, str | None]:
    one = found[name]
    return one.hit_tokens, one.reason.name, one.following.name if one.following else None


def shares(length: int, total: int, seed: int = 99) -> list[int]:
    """The first `length` tokens of ids(1, ...), then others."""
    return ids(1, length) + [seed] * (total - length)


# -- X1, X2: blocks, and the last token -------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "hit", "reason"),
    [
        (240, 0, "shared-shorter-than-block"),
        (783, 0, "shared-shorter-than-block"),
        (784, 784, "tokens-differ"),
        (785, 784, "tokens-differ"),
    ],
)
def test_x1_a_shared_prefix_shorter_than_one_block(
    tmp_path: Path, shared: int, hit: int, reason: str
) -> None:
    requests = PoolRequest("a", ids(1, 1600)), PoolRequest("b", shares(shared, 1600))
    found = explained(tmp_path / "run", PoolPlan((full(784),)), one_by_one(*requests))

    assert told(found, "b")[:2] == (hit, reason)
    assert found["b"].reason.data["agreed_tokens"] == shared


def test_x1_without_token_ids_it_is_a_block_that_differs(tmp_path: Path) -> None:
    requests = PoolRequest("a", ids(1, 1000)), PoolRequest("b", shares(240, 1000))
    plan = PoolPlan((full(784),))
    found = explained(tmp_path / "run", plan, one_by_one(*requests), token_ids=False)

    assert told(found, "b")[:2] == (0, "nothing-shared")
    assert found["b"].reason.evidence == (
        "how many tokens it shares is not recorded; trace with --with-token-ids",
    )


@pytest.mark.parametrize(
    ("tokens", "hit", "reason"),
    [
        (64, 48, "last-token"),
        (63, 48, "full-blocks"),
        (65, 64, "full-blocks"),
        (16, 0, "last-token"),
        (15, 0, "prompt-shorter-than-block"),
        (17, 16, "full-blocks"),
    ],
)
def test_x2_the_last_token_is_always_computed(
    tmp_path: Path, tokens: int, hit: int, reason: str
) -> None:
    requests = [PoolRequest(name, ids(1, tokens)) for name in ("a", "b")]
    found = explained(tmp_path / "run", PoolPlan((full(16),)), one_by_one(*requests))

    assert told(found, "b") == (hit, reason, None)


# -- X3, X4: units ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2144, 2145, 3784, 4288, 4289, 7542, 11292])
def test_x3_speculative_decoding_drops_one_unit(tmp_path: Path, tokens: int) -> None:
    unit = 2144
    requests = [PoolRequest(name, ids(1, tokens)) for name in ("a", "b")]
    plan = PoolPlan((full(unit),), drops_unit=True)
    found = explained(tmp_path / "run", plan, one_by_one(*requests))

    assert found["b"].hit_tokens == max(0, (tokens - 1) // unit - 1) * unit
    if tokens > unit:
        assert found["b"].reason.name == "speculative-drop"
        without = (tokens - 1) // unit * unit
        assert found["b"].reason.evidence == (f"without it {without} tokens would be hit",)


@pytest.mark.parametrize(
    ("tokens", "hit", "reason"),
    [
        (2048, 0, "alignment"),
        (4095, 0, "alignment"),
        (4096, 0, "alignment"),
        (4097, 4096, "full-blocks"),
        (8193, 8192, "full-blocks"),
    ],
)
def test_x4_a_unit_of_the_least_common_multiple(
    tmp_path: Path, tokens: int, hit: int, reason: str
) -> None:
    groups = (full(128), full(4096), full(32), sliding(32, 64))
    requests = [PoolRequest(name, ids(1, tokens)) for name in ("a", "b")]
    found = explained(tmp_path / "run", PoolPlan(groups), one_by_one(*requests))

    assert told(found, "b")[:2] == (hit, reason)


def test_x4_what_full_attention_has_beyond_the_unit_is_said(tmp_path: Path) -> None:
    requests = PoolRequest("a", ids(1, 9000)), PoolRequest("b", shares(5000, 9000))
    plan = PoolPlan((full(128), sliding(384, 400)), retention_interval=None)
    found = explained(tmp_path / "run", plan, one_by_one(*requests))

    assert told(found, "b") == (4992, "tokens-differ", None)
    requests = PoolRequest("a", ids(1, 9000)), PoolRequest("b", shares(4990, 9000))
    found = explained(tmp_path / "run2", plan, one_by_one(*requests))
    assert told(found, "b") == (4608, "alignment", "tokens-differ")
    assert found["b"].reason.detail == (
        "hits are multiples of 384 tokens, the least common multiple of block sizes 128, 384, and "
        "the cache has 4864 tokens of this prefix"
    )


# -- X5, X6, X7: keys -------------------------------------------------------------------------


def test_x5_an_adapter_and_a_salt_of_one_name_collide_in_the_first_block(tmp_path: Path) -> None:
    requests = (
        PoolRequest("a", ids(1, 40), lora_name="X"),
        PoolRequest("b", ids(1, 40), cache_salt="X"),
    )
    found = explained(tmp_path / "run", PoolPlan((full(16),)), one_by_one(*requests))

    assert told(found, "b") == (16, "lora-differs", None)
    assert found["b"].warnings == (
        "false hit, another LoRA adapter or cache salt of the same text: #0 a has adapter X, and "
        "it has a salt",
    )


def test_x5_other_names_do_not_collide(tmp_path: Path) -> None:
    requests = (
        PoolRequest("a", ids(1, 40), lora_name="X"),
        PoolRequest("b", ids(1, 40), cache_salt="Y"),
    )
    found = explained(tmp_path / "run", PoolPlan((full(16),)), one_by_one(*requests))

    assert told(found, "b")[:2] == (0, "lora-differs")
    assert found["b"].warnings == ()


def test_x6_two_adapters_of_one_name(tmp_path: Path) -> None:
    requests = (
        PoolRequest("a", ids(1, 40), lora_name="X", lora_id=1),
        PoolRequest("b", ids(1, 40), lora_name="X", lora_id=2),
        PoolRequest("c", ids(1, 40), lora_name="Y", lora_id=2),
        PoolRequest("d", ids(1, 40)),
    )
    found = explained(tmp_path / "run", PoolPlan((full(16),)), one_by_one(*requests))

    assert told(found, "b")[:2] == (32, "full-blocks")
    assert found["b"].warnings == (
        "false hit, same name, different adapter: LoRA X is id 2 here and 1 in #0 a",
    )
    assert told(found, "c")[:2] == told(found, "d")[:2] == (0, "lora-differs")


def test_x7_images_at_other_places_and_other_images(tmp_path: Path) -> None:
    def images(*items: tuple[str, int, int]) -> tuple[Media, ...]:
        return tuple(Media("image", one, at, count) for one, at, count in items)

    tokens = [7] * 17
    requests = (
        PoolRequest("a", tokens, media=images(("A", 0, 3), ("B", 3, 13))),
        PoolRequest("b", tokens, media=images(("A", 0, 5), ("B", 5, 11))),
        PoolRequest("c", tokens, media=images(("A", 0, 5), ("C", 5, 11))),
        PoolRequest("d", tokens, media=images(("A", 0, 3), ("B", 3, 13))),
    )
    found = explained(tmp_path / "run", PoolPlan((full(16),)), one_by_one(*requests))

    assert told(found, "b")[:2] == (0, "media-offset-differs")
    assert found["b"].reason.detail == (
        "image 1 (tokens 5 .. 15, hash B) in block 0 (tokens 0 .. 15) begins at token 3 in #0 a"
    )
    assert told(found, "c")[:2] == (0, "media-differs")
    assert told(found, "d")[:2] == (16, "full-blocks")


def test_another_salt(tmp_path: Path) -> None:
    requests = (
        PoolRequest("a", ids(1, 70), cache_salt="s"),
        PoolRequest("b", ids(1, 70), cache_salt="t"),
        PoolRequest("c", ids(1, 70)),
        PoolRequest("d", ids(1, 70), cache_salt="t"),
    )
    found = explained(tmp_path / "run", PoolPlan((full(16),)), one_by_one(*requests))

    assert told(found, "b")[:2] == told(found, "c")[:2] == (0, "salt-differs")
    assert told(found, "d")[:2] == (64, "full-blocks")


# -- X8: checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batched", "shared", "hits"),
    [
        (2048, 1600, (1584, 1584)),
        (2048, 1584, (1584, 1584)),
        (2048, 1583, (0, 1056)),
        (2048, 1500, (0, 1056)),
        (8192, 1600, (0, 1584)),
        (8192, 1500, (0, 1056)),
    ],
)
def test_x8_a_hit_needs_a_checkpoint_inside_the_shared_part(
    tmp_path: Path, batched: int, shared: int, hits: tuple[int, int]
) -> None:
    """The third request hits where the first two parted: vLLM 0.30 pins that place."""
    plan = PoolPlan(
        (full(528), states(528)), max_num_batched_tokens=batched, retention_interval=None
    )
    requests = (
        PoolRequest("a", ids(1, 2200)),
        PoolRequest("b", shares(shared, 2200, seed=8)),
        PoolRequest("c", shares(shared, 2200, seed=9)),
    )
    found = explained(tmp_path / "run", plan, one_by_one(*requests))

    assert (found["b"].hit_tokens, found["c"].hit_tokens) == hits
    reached = shared // 528 * 528
    if hits[0] < reached:
        assert told(found, "b")[1:] == ("group-said-less", "tokens-differ")
        kept = "states at 1584, 2112" if batched == 2048 else "states at 2112"
        assert found["b"].reason.evidence == (
            f"group 0 (FullAttentionSpec, blocks of 528): {reached}",
            "group 1 (MambaSpec, blocks of 528): 0; a hit there needs the state at token "
            f"{reached}; kept of this prefix: nothing; of #0 a: {kept}",
        )
    assert found["c"].reason.name == "tokens-differ"


def test_a_window_that_was_not_kept(tmp_path: Path) -> None:
    requests = (
        PoolRequest("a", ids(1, 600)),
        PoolRequest("b", shares(330, 430, seed=8)),
        PoolRequest("c", shares(330, 430, seed=9)),
    )
    plan = PoolPlan((sliding(32, 64), full(32)))
    found = explained(tmp_path / "run", plan, one_by_one(*requests))

    assert told(found, "b") == (0, "group-said-less", "tokens-differ")
    assert found["b"].group_hit_tokens == (0, 320)
    assert told(found, "c")[:2] == (320, "tokens-differ")


# -- X9: what became of a block ---------------------------------------------------------------


def test_x9_cached_at_a_step_and_evicted_at_another(tmp_path: Path) -> None:
    requests = [PoolRequest(name, ids(seed, 100)) for name, seed in (("a", 1), ("b", 2), ("c", 1))]
    plan = PoolPlan((full(16),), num_blocks=8)
    found = explained(tmp_path / "run", plan, one_by_one(*requests))

    assert told(found, "c") == (16, "evicted", None)
    assert found["c"].reason.detail == (
        "block 1 (tokens 16 .. 31) was cached at step 0 by #0 a and evicted at step 1 to make room "
        "for #1 b"
    )


def test_a_reset(tmp_path: Path) -> None:
    def drive(scheduler: PoolScheduler) -> None:
        one_by_one(PoolRequest("a", ids(1, 100)))(scheduler)
        assert scheduler.reset_prefix_cache()
        one_by_one(PoolRequest("b", ids(1, 100)))(scheduler)

    found = explained(tmp_path / "run", PoolPlan((full(16),)), drive)
    assert told(found, "b")[:2] == (0, "reset")


def in_chunks(scheduler: PoolScheduler) -> None:
    scheduler.add(PoolRequest("a", ids(1, 300)))
    scheduler.step()


CHUNKS = PoolPlan((full(16),), max_num_batched_tokens=256, long_prefill_token_threshold=100)


def test_a_donor_that_is_still_being_computed(tmp_path: Path) -> None:
    def drive(scheduler: PoolScheduler) -> None:
        in_chunks(scheduler)
        scheduler.add(PoolRequest("b", ids(1, 300)))
        scheduler.run()

    found = explained(tmp_path / "run", CHUNKS, drive)
    assert told(found, "b")[:2] == (192, "not-computed-yet")
    assert found["b"].reason.evidence == ("#0 a had computed 200 tokens",)


def test_a_donor_that_was_aborted(tmp_path: Path) -> None:
    def drive(scheduler: PoolScheduler) -> None:
        in_chunks(scheduler)
        scheduler.abort("a")
        scheduler.add(PoolRequest("b", ids(1, 300)))
        scheduler.add(PoolRequest("c", ids(3, 300)))
        scheduler.abort("c")
        scheduler.run()

    found = explained(tmp_path / "run", CHUNKS, drive)
    assert told(found, "b")[:2] == (96, "never-cached")
    assert told(found, "c") == (None, "never-admitted", None)


def test_a_donor_that_has_no_further_block(tmp_path: Path) -> None:
    requests = PoolRequest("a", ids(1, 70)), PoolRequest("b", ids(1, 200))
    found = explained(tmp_path / "run", PoolPlan((full(16),)), one_by_one(*requests))
    assert told(found, "b")[:2] == (64, "donor-ends")


def test_a_cache_that_is_off_and_a_request_that_does_not_read_it(tmp_path: Path) -> None:
    off = PoolPlan((full(16),), enable_prefix_caching=False)
    found = explained(tmp_path / "off", off, one_by_one(PoolRequest("a", ids(1, 70))))
    assert told(found, "a") == (None, "caching-off", None)

    skips = PoolRequest("a", ids(1, 70), skip_reading_prefix_cache=True)
    found = explained(tmp_path / "on", PoolPlan((full(16),)), one_by_one(skips))
    assert told(found, "a") == (None, "skips-cache", None)


# -- everything at once -----------------------------------------------------------------------

LAYOUTS: list[tuple[tuple[GroupPlan, ...], dict[str, object]]] = [
    ((full(16),), {}),
    ((full(16),), {"drops_unit": True}),
    ((sliding(16, 40),), {"retention_interval": None}),
    ((full(16), sliding(16, 40)), {}),
    ((full(16), sliding(16, 40)), {"retention_interval": 64}),
    ((full(16), sliding(16, 40)), {"drops_unit": True}),
    ((full(16), full(48), sliding(32, 64)), {"retention_interval": None}),
    ((full(16), states(16)), {}),
    ((full(16), states(64)), {"retention_interval": None}),
    ((full(64), states(64)), {"match_unit": 16}),
    ((states(32), states(32), full(32)), {}),
]


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_the_rule_gives_vllms_own_hit_for_any_workload(tmp_path: Path, number: int) -> None:
    """Batches, chunks, evictions, preemptions, aborts, resets, images, salts, adapters."""
    groups, changes = LAYOUTS[number]
    chance = random.Random(number)
    reasons: Counter[str] = Counter()
    for run in range(5):
        plan = PoolPlan(
            groups,
            num_blocks=chance.choice([60, 100, 400]),
            max_num_batched_tokens=chance.choice([96, 160, 512]),
            max_num_seqs=chance.choice([1, 2, 4]),
            long_prefill_token_threshold=chance.choice([0, 70]),
            **changes,  # type: ignore[arg-type]
        )

        def drive(scheduler: PoolScheduler, run: int = run) -> None:
            random_workload(scheduler, random.Random(100 * number + run))

        found = explained(tmp_path / str(run), plan, drive, token_ids=run % 2 == 0)
        reasons.update(one.reason.name for one in found.values())
    assert reasons.keys() <= REASONS.keys()
    assert len(reasons) >= 5


def random_workload(scheduler: PoolScheduler, chance: random.Random) -> None:
    prompts = [[chance.randrange(4) for _ in range(400)] for _ in range(3)]
    names = []
    for number in range(chance.randrange(8, 20)):
        shared = chance.randrange(1, 400)
        prompt = chance.choice(prompts)[:shared] + [chance.randrange(4) for _ in range(60)]
        length = chance.choice([shared, chance.randrange(1, min(400, shared + 60) + 1)])
        media: tuple[Media, ...] = ()
        if length > 30 and chance.random() < 0.2:
            media = (Media("image", chance.choice("AB"), chance.randrange(length - 10), 8),)
        names.append(f"r{number}")
        scheduler.add(
            PoolRequest(
                names[-1],
                prompt[:length],
                max_tokens=chance.choice([1, 3, 40]),
                media=media,
                cache_salt=chance.choice([None, None, None, "s", "t"]),
                lora_name=chance.choice([None, None, None, "s", "u"]),
                lora_id=chance.choice([1, 2]),
            )
        )
        for _ in range(chance.randrange(6)):
            scheduler.step()
        if chance.random() < 0.05:
            scheduler.abort(chance.choice(names))
        if chance.random() < 0.05:
            scheduler.reset_prefix_cache()
    scheduler.run()


def test_a_request_that_no_pool_of_this_size_can_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="give a larger --num-gpu-blocks"):
        explained(
            tmp_path / "run",
            PoolPlan((full(16),), num_blocks=4),
            one_by_one(PoolRequest("a", ids(1, 64))),
        )
