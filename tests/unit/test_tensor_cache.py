"""The tensor cache, step by step: the failures of real caches, and their neighbours."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the tensor cache runs beside vLLM, which brings torch")

from omnicache_cli.errors import OmnicacheError  # noqa: E402
from omnicache_cli.tensor_cache import (  # noqa: E402
    BadStepError,
    RequestRows,
    RowsMissingError,
    StepLayout,
    TensorCache,
    why_not,
)
from tests.unit.tensor_cache_kit import Share, numbered, numbers_in, step_of  # noqa: E402

B = 16
FIVE_BLOCKS = (7, 3, 9, 1, 5)


def cold(cache: TensorCache, end: int, table: tuple[int, ...], first: int = 0) -> None:
    """A request computes positions [0, end) in one step; row of position p is first + p."""
    layout = step_of(1, [Share("cold", table, 0, end, 0)], B, table)
    cache.begin_step(layout)
    cache.save({"h": numbered(first, end)})


# ---------------------------------------------------------------- V1: the last block of a prefix


@pytest.mark.parametrize("hit", [1, 15, 16, 17, 48, 63, 64, 65, 79, 80])
def test_a_hit_of_any_length_gets_exactly_its_rows(hit: int) -> None:
    cache = TensorCache(B)
    cold(cache, 80, FIVE_BLOCKS)
    table = (*FIVE_BLOCKS[: -(-hit // B)], 20, 21)
    new = (20, 21) if hit % B == 0 else ()
    end = hit + 1
    cache.begin_step(step_of(2, [Share("warm", table, hit, end, hit)], B, new))
    cache.save({"h": numbered(1000 + hit, 1)})
    got = cache.materialize("warm")

    assert (got.first_position, got.num_restored) == (0, hit)
    assert numbers_in(got.rows["h"]) == [*range(hit), 1000 + hit]


def test_rows_of_a_partial_block_are_kept_and_joined_without_a_gap() -> None:
    """vllm-omni#4624: 200 computed; rows 192..199 were lost, and the rest shifted by 8."""
    table = tuple(range(1, 15))
    cache = TensorCache(B)
    cache.begin_step(step_of(1, [Share("a", table, 0, 200, 0)], B, table))
    cache.save({"h": numbered(0, 200)})
    cache.begin_step(step_of(2, [Share("b", table, 200, 208, 200)], B))
    cache.save({"h": numbered(200, 8)})

    assert numbers_in(cache.materialize("b").rows["h"]) == list(range(208))


# ---------------------------------------------------------------- V2: what is per token

LAYOUT = step_of(1, [Share("a", (1,), 0, 5, 0)], B, (1,), padded=8)


@pytest.mark.parametrize("rows", [5, 8])
@pytest.mark.parametrize("tail", [(1,), (3,), (2, 3)])
def test_a_tensor_of_this_steps_tokens_enters(rows: int, tail: tuple[int, ...]) -> None:
    assert why_not("k", torch.zeros(rows, *tail), LAYOUT) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "k is a NoneType, not a tensor"),
        ([torch.zeros(5, 2)], "k is a list, not a tensor"),
        (torch.tensor(3.0), "a scalar tensor has no rows: k holds one value"),
        (
            torch.zeros(5),
            "a 1-D tensor has one value per token at most: k of shape (5) "
            "may as well be per request",
        ),
        (
            torch.zeros(4, 2),
            "the first dimension of k (4, 2) is not this step's tokens (5 or 8)",
        ),
        (torch.zeros(6, 2), "the first dimension of k (6, 2) is not this step's tokens (5 or 8)"),
        (torch.zeros(0, 2), "the first dimension of k (0, 2) is not this step's tokens (5 or 8)"),
        (torch.zeros(5, 0), "the rows of k (5, 0) are empty"),
        (
            torch.zeros(5, 2, device="meta"),
            "k is a meta tensor: it has a shape and no data",
        ),
        (
            torch.zeros(5, 2).to_sparse(),
            "k is a tensor without plain strided storage (torch.sparse_coo)",
        ),
    ],
)
def test_anything_else_is_refused_with_its_reason(value: Any, reason: str) -> None:
    assert why_not("k", value, LAYOUT) == reason


def test_payload_is_the_very_object_that_came() -> None:
    lengths, words, nothing = torch.zeros(5), ["a"], None
    cache = TensorCache(B)
    cache.begin_step(LAYOUT)
    saved = cache.save({"h": numbered(0, 8), "lengths": lengths, "words": words, "no": nothing})

    assert saved.stored == ("h",)
    assert list(saved.refused) == ["lengths"]
    assert saved.payload["lengths"] is lengths
    assert saved.payload["words"] is words
    assert saved.payload["no"] is None
    got = cache.materialize("a")
    assert got.payload["lengths"] is lengths
    assert numbers_in(got.rows["h"]) == [0, 1, 2, 3, 4]  # the 3 rows of padding are not kept


def decode(step: int, position: int, num_requests: int) -> StepLayout:
    shares = [
        Share(f"r{index}", (index + 1,), position, position + 1) for index in range(num_requests)
    ]
    return step_of(step, shares, B)


def prefill(num_requests: int, length: int) -> StepLayout:
    shares = [Share(f"r{index}", (index + 1,), 0, length, 0) for index in range(num_requests)]
    return step_of(1, shares, B, range(1, num_requests + 1))


def test_a_refused_key_stays_payload_when_its_shape_fits_by_chance() -> None:
    cache = TensorCache(B)
    cache.begin_step(prefill(3, 4))
    assert list(cache.save({"per_request": torch.zeros(3, 2)}).refused) == ["per_request"]
    cache.begin_step(decode(2, 4, 3))
    saved = cache.save({"per_request": torch.zeros(3, 2)})

    assert (saved.stored, list(saved.payload), saved.refused) == ((), ["per_request"], {})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (
            torch.zeros(4, 2),
            "the first dimension of k (4, 2) is not this step's tokens (3)",
        ),
        (torch.zeros(3, 2, dtype=torch.float64), "k changed from torch.float32 to torch.float64"),
        (torch.zeros(3, 5), "rows of k changed from (2,) to (5,)"),
        (torch.zeros(3, 1, 2), "rows of k changed from (2,) to (1, 2)"),
        (torch.zeros(3), "a 1-D tensor has one value per token at most: k of shape (3) may as "
                         "well be per request"),
    ],
)  # fmt: skip
def test_a_key_that_changes_is_demoted_and_its_rows_are_dropped(value: Any, why: str) -> None:
    cache = TensorCache(B)
    cache.begin_step(prefill(3, 4))
    cache.save({"k": torch.ones(12, 2), "h": numbered(0, 12)})
    assert cache.stats().keys["k"].rows == 12
    cache.begin_step(decode(2, 4, 3))
    saved = cache.save({"k": value, "h": numbered(12, 3)})

    assert saved.demoted == saved.refused == {"k": why}
    assert saved.payload["k"] is value
    assert list(cache.stats().keys) == ["h"]
    cache.begin_step(decode(3, 5, 3))
    assert cache.save({"k": torch.ones(3, 2)}).stored == ()


def test_a_step_without_tokens_judges_nobody() -> None:
    cache = TensorCache(B)
    cold(cache, 5, (1,))
    cache.begin_step(step_of(2, [], B))
    saved = cache.save({"h": torch.zeros(3, 2)})

    assert (saved.stored, saved.refused, list(saved.payload)) == ((), {}, ["h"])
    assert cache.stats().rows == 5


def test_a_key_that_is_no_tensor_for_a_step_is_not_demoted() -> None:
    cache = TensorCache(B)
    cache.begin_step(prefill(1, 4))
    cache.save({"k": numbered(0, 4)})
    cache.begin_step(decode(2, 4, 1))
    assert cache.save({"k": None}).refused == {}
    cache.begin_step(decode(3, 5, 1))
    assert cache.save({"k": numbered(5, 1)}).stored == ("k",)
    assert cache.stats().rows == 5


# ---------------------------------------------------------------- V3, V7: which positions


def test_rows_of_a_hit_belong_to_the_positions_behind_it() -> None:
    """vllm-omni#3665: hit 32, rows 32..39 scheduled."""
    cache = TensorCache(B)
    cold(cache, 40, (1, 2, 3))
    cache.begin_step(step_of(2, [Share("b", (1, 2, 4), 32, 40, 32)], B, (4,)))
    cache.save({"h": numbered(132, 8)})
    got = cache.materialize("b")

    assert got.first_position == 0
    assert numbers_in(got.rows["h"]) == [*range(32), *range(132, 140)]


def test_a_chunked_prompt_comes_in_pieces_that_make_the_whole() -> None:
    """vllm-omni#7119: prompt 70, hit 32, 16 tokens a step: 48, 16 and 6 rows."""
    cache = TensorCache(B)
    cold(cache, 40, (1, 2, 3))
    table = (1, 2, 4, 5, 6)
    pieces = []
    for step, (start, end, new) in enumerate([(32, 48, (4,)), (48, 64, (5,)), (64, 70, (6,))]):
        hit = 32 if step == 0 else None
        layout = step_of(2 + step, [Share("b", table[: 3 + step], start, end, hit)], B, new)
        cache.begin_step(layout)
        cache.save({"h": numbered(start, end - start)})
        pieces.append(cache.materialize("b"))

    assert [(one.first_position, len(one.rows["h"])) for one in pieces] == [
        (0, 48),
        (48, 16),
        (64, 6),
    ]
    assert [one.num_restored for one in pieces] == [32, 0, 0]
    assert numbers_in(torch.cat([one.rows["h"] for one in pieces])) == list(range(70))


# ---------------------------------------------------------------- V4, V6: rows that are not there


def error_of(call: Callable[[], object]) -> RowsMissingError:
    with pytest.raises(RowsMissingError) as raised:
        call()
    return raised.value


def test_a_key_that_was_never_cached_is_named_with_the_count() -> None:
    """vllm-omni#4317: 40-token prompt, hit 32, key over a size cap: 8 rows only."""
    cache = TensorCache(B)
    cold(cache, 40, (1, 2, 3))
    cache.begin_step(step_of(2, [Share("b", (1, 2, 4), 32, 40, 32)], B, (4,)))
    cache.save({"h": numbered(32, 8), "K": numbered(32, 8)})
    error = error_of(lambda: cache.materialize("b"))

    assert isinstance(error, OmnicacheError)
    assert str(error) == (
        "key K has no cached rows: 8 rows instead of 40; request b, position 0: slot 16 of block 1 "
        "has no row, it was never written; compute this prompt again without a prefix hit"
    )
    assert (error.key, error.request_id, error.position) == ("K", "b", 0)
    assert (error.slot, error.block, error.reason) == (16, 1, "never-written")
    assert (error.hit_tokens, error.num_missing, error.num_wanted) == (32, 32, 40)
    assert numbers_in(cache.materialize("b", ["h"]).rows["h"]) == list(range(40))


def test_a_key_that_missed_one_step_is_an_error_and_not_zeros() -> None:
    """vllm-omni#6039: an all-zero row inside the hit span."""
    cache = TensorCache(B)
    table = (4, 2)
    for step, (start, end) in enumerate([(0, 20), (20, 21), (21, 32)]):
        hit = 0 if step == 0 else None
        layout = step_of(step, [Share("a", table, start, end, hit)], B, table if not step else ())
        cache.begin_step(layout)
        cache.save({"h": numbered(start, end - start)} if step != 1 else {"other": [1]})
    cache.begin_step(step_of(3, [Share("b", (*table, 9), 32, 33, 32)], B, (9,)))
    cache.save({"h": numbered(32, 1)})
    error = error_of(lambda: cache.materialize("b"))

    assert (error.position, error.slot, error.block) == (20, 36, 2)
    assert error.what == "key h lacks cached rows: 32 rows instead of 33"


def test_zero_rows_that_the_model_wrote_are_rows() -> None:
    cache = TensorCache(B)
    cache.begin_step(step_of(1, [Share("a", (1,), 0, 16, 0)], B, (1,)))
    cache.save({"h": torch.zeros(16, 2)})
    cache.begin_step(step_of(2, [Share("b", (1, 2), 16, 17, 16)], B, (2,)))
    cache.save({"h": torch.ones(1, 2)})

    assert cache.materialize("b").rows["h"].tolist() == [[0.0, 0.0]] * 16 + [[1.0, 1.0]]


@pytest.mark.parametrize("how", ["new block", "drop_blocks"])
def test_rows_of_a_block_that_was_given_away_are_never_served(how: str) -> None:
    cache = TensorCache(B)
    cold(cache, 32, (1, 2))
    if how == "drop_blocks":
        cache.drop_blocks([2])
        new: tuple[int, ...] = ()
    else:
        new = (2,)
    cache.begin_step(step_of(2, [Share("c", (2,), 0, 3, 0)], B, new))
    cache.save({"h": numbered(500, 3)})
    cache.begin_step(step_of(3, [Share("b", (1, 2, 5), 32, 33, 32)], B, (5,)))
    cache.save({"h": numbered(32, 1)})
    error = error_of(lambda: cache.materialize("b"))

    assert (error.position, error.slot, error.block, error.reason) == (19, 35, 2, "evicted")
    assert error.num_missing == 13
    assert "given to somebody else" in str(error)


def test_a_step_that_was_not_saved_leaves_no_rows_behind() -> None:
    cache = TensorCache(B)
    cold(cache, 20, (1, 2))
    cache.begin_step(step_of(2, [Share("cold", (1, 2), 18, 22)], B))  # computes 18 and 19 again
    cache.begin_step(step_of(3, [Share("b", (1, 2, 3), 20, 22, 20)], B, (3,)))
    cache.save({"h": numbered(20, 2)})
    error = error_of(lambda: cache.materialize("b"))

    assert (error.position, error.num_missing) == (18, 2)


def test_a_slot_that_is_computed_again_without_a_key_loses_its_row() -> None:
    cache = TensorCache(B)
    cold(cache, 20, (1, 2))
    cache.begin_step(step_of(2, [Share("cold", (1, 2), 19, 20)], B))
    cache.save({})
    cache.begin_step(step_of(3, [Share("b", (1, 2), 20, 21, 20)], B))
    cache.save({"h": numbered(20, 1)})

    assert error_of(lambda: cache.materialize("b")).position == 19


# ---------------------------------------------------------------- V5: one step


def two_equal_prompts(order: str) -> StepLayout:
    """vllm-omni#6323: two equal 48-token prompts at once; the second hits 32 of the first's."""
    shares = {
        "a": Share("a", (1, 2, 3), 0, 48, 0),
        "b": Share("b", (1, 2, 4), 32, 48, 32),
    }
    return step_of(2, [shares[name] for name in order], B, (1, 2, 3, 4))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_hit_on_blocks_of_the_same_step_is_whole_once_it_is_saved(order: str) -> None:
    cache = TensorCache(B)
    cold(cache, 48, (1, 2, 3), first=900)  # what these blocks held before
    cache.begin_step(two_equal_prompts(order))
    rows = {"a": numbered(0, 48), "b": numbered(132, 16)}
    cache.save({"h": torch.cat([rows[name] for name in order])})

    assert numbers_in(cache.materialize("a").rows["h"]) == list(range(48))
    assert numbers_in(cache.materialize("b").rows["h"]) == [*range(32), *range(132, 148)]


def test_rows_that_are_in_flight_are_an_error_and_not_zeros() -> None:
    cache = TensorCache(B)
    cold(cache, 48, (7, 8, 9))
    cache.begin_step(two_equal_prompts("ab"))
    error = error_of(lambda: cache.materialize("b"))

    assert (error.key, error.request_id, error.reason) == ("h", "b", "in-flight")
    assert (error.position, error.slot, error.block) == (0, 16, 1)
    assert error.what == "48 of 48 rows of key h have not come"


def test_only_the_steps_own_rows_are_in_flight_behind_an_older_hit() -> None:
    cache = TensorCache(B)
    cold(cache, 48, (7, 8, 9))
    cache.begin_step(step_of(2, [Share("b", (7, 8, 4), 32, 40, 32)], B, (4,)))
    error = error_of(lambda: cache.materialize("b"))

    assert (error.position, error.slot, error.num_missing) == (32, 64, 8)


# ---------------------------------------------------------------- V8: two requests in a batch


def test_each_request_gets_its_own_rows_of_the_batch() -> None:
    cache = TensorCache(B)
    cold(cache, 40, (1, 2, 3))
    layout = step_of(
        2,
        [Share("x", (6,), 3, 4), Share("b", (1, 2, 4), 32, 40, 32), Share("y", (5,), 0, 2, 0)],
        B,
        (4, 5, 6),
        padded=16,
    )
    cache.begin_step(layout)
    cache.save({"h": torch.cat([numbered(600, 1), numbered(132, 8), numbered(700, 7)])})

    assert numbers_in(cache.materialize("x").rows["h"]) == [600]
    assert cache.materialize("x").first_position == 3
    assert numbers_in(cache.materialize("y").rows["h"]) == [700, 701]
    assert numbers_in(cache.materialize("b").rows["h"]) == [*range(32), *range(132, 140)]


def test_a_resumed_request_gets_its_whole_prompt_again() -> None:
    cache = TensorCache(B)
    cache.begin_step(step_of(1, [Share("a", (1, 2), 0, 20, 0)], B, (1, 2)))
    cache.save({"h": numbered(0, 20)})
    cache.begin_step(step_of(2, [Share("a", (1, 9), 16, 21, 16)], B, (9,)))
    cache.save({"h": numbered(116, 5)})
    got = cache.materialize("a")

    assert (got.first_position, got.num_restored) == (0, 16)
    assert numbers_in(got.rows["h"]) == [*range(16), *range(116, 121)]


# ---------------------------------------------------------------- who owns what


def test_the_callers_buffers_and_the_receivers_rows_are_their_own() -> None:
    cache = TensorCache(B)
    buffer = numbered(0, 20)
    cache.begin_step(step_of(1, [Share("a", (1, 2), 0, 20, 0)], B, (1, 2)))
    cache.save({"h": buffer})
    buffer.fill_(-1)
    first = cache.materialize("a").rows["h"]
    assert numbers_in(first) == list(range(20))
    first.fill_(-2)
    assert numbers_in(cache.materialize("a").rows["h"]) == list(range(20))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("tail", [(1,), (3,), (8,), (2, 3)])
def test_rows_of_every_dtype_and_shape_come_back_bit_for_bit(
    dtype: Any, tail: tuple[int, ...]
) -> None:
    bits = torch.arange(40 * 16 * torch.Size(tail).numel(), dtype=torch.int64) % 2
    rows = bits.to(torch.uint8).view(40, -1)[:, : torch.Size(tail).numel() * dtype.itemsize]
    rows = rows.contiguous().view(dtype).view(40, *tail)
    cache = TensorCache(4)
    table = tuple(range(9, -1, -1))
    cache.begin_step(step_of(1, [Share("a", table, 0, 40, 0)], 4, table))
    cache.save({"k": rows})
    got = cache.materialize("a").rows["k"]

    assert (got.dtype, got.shape) == (dtype, rows.shape)
    assert got.view(torch.uint8).tolist() == rows.view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows.t().contiguous().t(),
        lambda rows: torch.cat([rows[:1], rows])[1:],
        lambda rows: torch.cat([rows, rows], dim=1)[:, :3],
        lambda rows: rows.clone().requires_grad_(),
        lambda rows: (-rows).to(torch.complex64).imag * 0 + rows,
    ],
)
def test_views_are_stored_by_value(view: Callable[[Any], Any]) -> None:
    rows = numbered(0, 6, width=3)
    cache = TensorCache(4)
    cache.begin_step(step_of(1, [Share("a", (5, 2), 0, 6, 0)], 4, (5, 2)))
    cache.save({"k": view(rows)})

    assert torch.equal(cache.materialize("a").rows["k"], rows)


def test_rows_saved_in_inference_mode_are_plain_tensors_later() -> None:
    cache = TensorCache(4)
    with torch.inference_mode():
        cache.begin_step(step_of(1, [Share("a", (1, 2), 0, 6, 0)], 4, (1, 2)))
        cache.save({"k": numbered(0, 6)})
        inside = cache.materialize("a").rows["k"]
    cache.begin_step(step_of(2, [Share("a", (1, 2), 6, 7)], 4))
    with torch.inference_mode():
        row = numbered(6, 1)
    cache.save({"k": row})

    inside.add_(1)
    assert numbers_in(inside) == [1, 2, 3, 4, 5, 6]
    assert numbers_in(cache.materialize("a").rows["k"]) == [6]


# ---------------------------------------------------------------- memory


def test_memory_grows_with_the_blocks_in_use_and_frames_are_used_again() -> None:
    cache = TensorCache(B)
    far = 100_000  # a block id of a large pool
    cold(cache, B, (far,))
    row_bytes = 2 * 4
    stats = cache.stats()
    assert (stats.rows, stats.blocks, stats.deferred_bytes) == (16, 1, 0)
    tables = (far + 2) * (8 + 1)  # frame and mark of each block id
    frames = 16 * B * (row_bytes + 8) + 16 * 8
    assert stats.bytes == stats.keys["h"].bytes == tables + frames

    for step in range(100):
        table = tuple(range(10 * step, 10 * step + 10))
        cache.begin_step(step_of(step, [Share("a", table, 0, 10 * B, 0)], B, table))
        cache.save({"h": numbered(0, 10 * B)})
        assert numbers_in(cache.materialize("a").rows["h"]) == list(range(10 * B))
        cache.drop_blocks(table)
    assert (cache.stats().rows, cache.stats().blocks) == (16, 1)
    assert cache.stats().bytes == stats.bytes


def test_memory_doubles_when_it_is_full() -> None:
    cache = TensorCache(4)
    sizes = []
    for step, num_blocks in enumerate([15, 16, 32, 100]):
        table = tuple(range(num_blocks))
        cache.begin_step(step_of(step, [Share("a", table, 0, 4 * num_blocks, 0)], 4, table))
        cache.save({"h": numbered(0, 4 * num_blocks)})
        assert numbers_in(cache.materialize("a").rows["h"]) == list(range(4 * num_blocks))
        sizes.append(cache._stores["h"]._rows.shape[0] // 4)

    assert sizes == [16, 32, 64, 128]


# ---------------------------------------------------------------- broken callers


def share(**changes: Any) -> RequestRows:
    fields = {
        "request_id": "a",
        "first_row": 0,
        "num_rows": 3,
        "num_computed_tokens": 0,
        "hit_tokens": 0,
        "block_ids": (2,),
    }
    return RequestRows(**(fields | changes))


def layout_with(requests: tuple[RequestRows, ...], slots: Any, **changes: Any) -> StepLayout:
    fields = {"num_tokens": 3, "num_tokens_padded": 3, "new_block_ids": ()}
    mapping = slots if isinstance(slots, torch.Tensor) else torch.tensor(slots, dtype=torch.int64)
    return StepLayout(1, mapping, requests=requests, **(fields | changes))


GOOD = [8, 9, 10]


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (layout_with((share(),), [8, 9]), "2 slots for 3 tokens"),
        (
            layout_with((share(),), torch.tensor(GOOD, dtype=torch.int32)),
            "slot_mapping is 1-D torch.int32 on cpu; a copy on the CPU, 1-D int64, is needed",
        ),
        (layout_with((share(),), GOOD, num_tokens_padded=2), "3 tokens are padded to 2"),
        (layout_with((share(),), GOOD, new_block_ids=(2, -1)), "new block -1 has a negative id"),
        (layout_with((share(), share()), GOOD), "request a is there twice"),
        (layout_with((share(first_row=1),), GOOD), "request a starts at row 1, not 0"),
        (layout_with((share(num_rows=2),), GOOD), "the requests have 2 rows, the step 3 tokens"),
        (layout_with((), GOOD), "the requests have 0 rows, the step 3 tokens"),
        (
            layout_with((share(num_computed_tokens=-1, hit_tokens=None),), GOOD),
            "request a has 3 rows from position -1",
        ),
        (
            layout_with((share(hit_tokens=4),), GOOD),
            "request a hit 4 tokens and starts at position 0",
        ),
        (
            layout_with((share(hit_tokens=4, num_computed_tokens=4, block_ids=(-1, 2)),), GOOD),
            "request a has block -1: a negative id",
        ),
        (layout_with((share(),), [*GOOD, -1, 4]), "a slot behind the 3 tokens is not -1"),
        (layout_with((share(),), [8, -1, 10]), "row 1 has slot -1"),
        (
            layout_with((share(num_computed_tokens=2, hit_tokens=None),), GOOD),
            "request a: 1 blocks hold 4 tokens, not 5",
        ),
        (
            layout_with((share(),), [8, 9, 11]),
            "request a: position 2 belongs to slot 10, slot_mapping says 11",
        ),
        (
            layout_with((share(num_computed_tokens=3, hit_tokens=None, block_ids=(2, 5)),), GOOD),
            "request a: position 3 belongs to slot 11, slot_mapping says 8",
        ),
        (
            layout_with(
                (
                    share(num_rows=1),
                    share(request_id="c", first_row=1, num_rows=1, block_ids=(5,)),
                    share(request_id="b", first_row=2, num_rows=1),
                ),
                [8, 20, 8],
            ),
            "two requests write to one block",
        ),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(layout: StepLayout, problem: str) -> None:
    assert layout.problems(4)[0] == problem
    cache = TensorCache(4)
    with pytest.raises(BadStepError, match="step 1 has no sound layout: ") as raised:
        cache.begin_step(layout)
    assert problem in str(raised.value)


def test_a_sound_layout_has_no_problems() -> None:
    layout = layout_with((share(),), [*GOOD, -1, -1], num_tokens_padded=5)
    assert (layout.problems(), layout.problems(4)) == ([], [])


def test_a_refused_layout_changes_nothing() -> None:
    cache = TensorCache(B)
    cold(cache, 20, (1, 2))
    with pytest.raises(BadStepError):
        cache.begin_step(layout_with((), GOOD, new_block_ids=(1, 2)))

    assert numbers_in(cache.materialize("cold").rows["h"]) == list(range(20))


def test_calls_out_of_turn_say_what_is_missing() -> None:
    cache = TensorCache(B)
    with pytest.raises(BadStepError, match="no step has begun; call begin_step first"):
        cache.save({})
    with pytest.raises(BadStepError, match="no step has begun"):
        cache.materialize("a")
    with pytest.raises(BadStepError, match="block size 0 is not positive"):
        TensorCache(0)
    with pytest.raises(BadStepError, match="block -1 has a negative id"):
        cache.drop_blocks([3, -1])
    cold(cache, 20, (1, 2))
    with pytest.raises(BadStepError, match="step 1 was saved before; begin the next one"):
        cache.save({})
    with pytest.raises(BadStepError, match="request zz has no rows in step 1"):
        cache.materialize("zz")
    with pytest.raises(BadStepError, match="key z has no rows in step 1; it has those of h"):
        cache.materialize("cold", ["z"])
