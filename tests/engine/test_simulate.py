"""`omnicache simulate` through vLLM's own scheduler and pools, without a model."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from omnicache_cli.engine.environment import Recording
from omnicache_cli.engine.modelfree.replay import ReplayPool, SharedHashes
from omnicache_cli.engine.modelfree.scheduler import (
    GroupPlan,
    PoolPlan,
    PoolRequest,
    PoolScheduler,
)
from omnicache_cli.engine.tracing import tracing
from omnicache_cli.prefix.prompts import Adapter
from omnicache_cli.simulate.bound import Bound
from omnicache_cli.simulate.replay import Arrivals, Replay, Replica
from omnicache_cli.simulate.request import KnownHashes, SimRequest
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import summarize
from tests.engine.model_free import full, ids, sliding, states
from tests.engine.test_trace_command import omnicache

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "simulate"
SCHEMA = json.loads((ROOT / "docs" / "simulate.schema.json").read_text(encoding="utf-8"))


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    options = ("--format", "json", "--quiet")
    assert omnicache("simulate", *map(str, arguments), *options) == 0
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{\n") :])  # vLLM may log before it
    jsonschema.validate(found, SCHEMA)
    return found


def pool(num_blocks: int, *groups: GroupPlan, **more: Any) -> ReplayPool:
    plan = PoolPlan(groups or (full(16),), num_blocks=num_blocks, **more)
    return ReplayPool(plan, SharedHashes())


def request(name: str, seed: int, length: int, output: int = 1, **more: Any) -> SimRequest:
    return SimRequest(name, length, output, ids(seed, length), **more)


def replayed(made: ReplayPool, arrivals: Arrivals, *requests: SimRequest) -> Replay:
    replay = Replay([Replica(made, None)], arrivals)
    for one in requests:
        replay.feed(one)
    replay.finish()
    return replay


def test_s1_the_last_token_is_always_computed(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts A B A B A of 64 and 32 tokens: 7 hit blocks in every pool, not 10."""
    found = answer(
        capsys, EXAMPLES / "last-token.jsonl", "--blocks", "100,5,6,8", "--bound", "--requests"
    )
    points = [
        (one["num_blocks"], one["hit_blocks"], one["evictions"], one["bound_hit_tokens"])
        for one in found["points"]
    ]
    assert points == [(5, 7, 4, 112), (6, 7, 3, 112), (8, 7, 1, 112), (100, 7, 0, 112)]
    by_size = [one["hit_tokens"] for one in found["requests"] if one["num_blocks"] == 5]
    assert by_size == [0, 0, 48, 16, 48]


@pytest.mark.parametrize(("num_blocks", "preemptions"), [(7, 1), (10, 0), (11, 0)])
def test_s3_two_requests_that_outgrow_the_pool(num_blocks: int, preemptions: int) -> None:
    replay = replayed(
        pool(num_blocks), Arrivals(concurrency=2), request("a", 1, 34, 35), request("b", 2, 34, 35)
    )
    assert replay.refused is None
    assert replay.totals.preemptions == preemptions
    assert replay.totals.finished == 2


def test_s4_the_six_step_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Ids are those of vLLM's design page and one more: block 0 is the null block."""
    found = answer(
        capsys, EXAMPLES / "six-steps.jsonl", "--blocks", 10, "--block-size", 4, "--timeline"
    )
    moments = [(one["step"], one["what"], one["free_queue"]) for one in found["timeline"]]
    assert moments == [
        (0, ["request-0 starts, hit 0 tokens"], [5, 6, 7, 8, 9, 10]),
        (1, ["scheduled"], [5, 6, 7, 8, 9, 10]),
        (2, ["scheduled"], [6, 7, 8, 9, 10]),
        (3, ["request-1 starts, hit 8 tokens"], [8, 9, 10]),
        (3, ["after it request-0 ended"], [5, 8, 9, 10, 4, 3]),
        (4, ["scheduled"], [5, 8, 9, 10, 4, 3]),
        (4, ["after it request-1 ended"], [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]),
        (5, ["request-2 starts, hit 12 tokens"], [4, 6]),
        (5, ["after it request-2 ended"], [10, 4, 6, 9, 8, 5, 7, 3, 2, 1]),
    ]
    last = {one["block_id"]: one for one in found["timeline"][7]["blocks"]}
    assert [number for number, one in last.items() if one["owners"]] == [1, 2, 3, 5, 7, 8, 9, 10]
    assert last[4]["block_hash"] == found["timeline"][1]["blocks"][3]["block_hash"]
    shared = found["timeline"][3]["blocks"][0]
    assert (shared["owners"], shared["ref_cnt"]) == (["request-0", "request-1"], 2)
    assert found["points"][0]["evictions"] == 0


@pytest.mark.parametrize(
    ("num_blocks", "length", "output", "refused"),
    [
        (5, 34, 47, None),
        (5, 34, 48, "request a needs 6 blocks, and the pool has 5; give a larger pool"),
        (5, 80, 1, None),
        (5, 81, 1, "request a needs 6 blocks, and the pool has 5; give a larger pool"),
    ],
)
def test_a_request_is_refused_exactly_where_it_can_never_run(
    num_blocks: int, length: int, output: int, refused: str | None
) -> None:
    replay = replayed(pool(num_blocks), Arrivals(), request("a", 1, length, output))
    assert (replay.refused, replay.totals.finished) == (refused, 0 if refused else 1)


def test_a_window_that_outgrows_the_pool_by_itself_is_refused_before_it_loops() -> None:
    """Its blocks are not known beforehand: what a window holds hangs on the chunks."""
    made = pool(8, full(16), sliding(16, 96))
    replay = replayed(made, Arrivals(), request("a", 1, 30, 90))
    assert replay.refused is not None
    assert "give a larger pool" in replay.refused


def test_hashes_of_text_are_those_of_vllms_own_hasher() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    for algorithm in ("sha256", "sha256_cbor"):
        made = pool(10, hash_algo=algorithm)
        for length in (1, 16, 17, 100):
            prompt = ids(3, length)
            real = Request(
                "x", prompt, SamplingParams(max_tokens=3), None, block_hasher=made._hasher
            )
            assert made._hashes_of_text(prompt) == real.block_hashes


def test_keys_beside_the_tokens_keep_requests_apart() -> None:
    requests = [
        request("plain", 1, 40),
        request("salted", 1, 40, cache_salt="s"),
        request("adapted", 1, 40, adapter=Adapter("sql")),
        request("plain again", 1, 40),
        request("salted again", 1, 40, cache_salt="s"),
    ]
    hits: list[int] = []
    replay = Replay([Replica(pool(100), None)], Arrivals())
    replay.on_admitted = lambda _, one: hits.append(one.hit_tokens)
    for one in requests:
        replay.feed(one)
    replay.finish()
    assert hits == [0, 0, 0, 32, 32]


def test_equal_prompts_get_equal_answers_and_others_do_not() -> None:
    """A resumed request may hit what a like one has computed; a made-up answer hits no prompt."""
    made = pool(100)
    replay = Replay([Replica(made, None)], Arrivals(concurrency=2))
    ended: list[list[bytes]] = []
    replay.on_step = lambda _, stepped: ended.extend(
        list(one.block_hashes) for one in stepped.finished
    )
    for one in (request("a", 1, 20, 40), request("b", 1, 20, 40), request("c", 2, 20, 40)):
        replay.feed(one)
    replay.finish()
    first, same, other = ended
    assert len(first) == 3
    assert first == same
    assert not set(first) & set(other)


def test_an_answer_that_is_known_is_hit_by_the_next_turn() -> None:
    prompt, reply = ids(1, 40), ids(2, 40)
    turn = [*prompt, *reply, *ids(3, 10)]
    replay = replayed(
        pool(100),
        Arrivals(),
        SimRequest("one", 40, 40, prompt, output_token_ids=reply),
        SimRequest("two", 90, 1, turn),
    )
    assert replay.totals.hit_tokens == 64  # of 79 computed ones


@pytest.mark.parametrize(("shared", "hits"), [(1600, [0, 1584, 1584]), (1500, [0, 0, 1056])])
def test_states_hit_at_their_checkpoints_only(shared: int, hits: list[int]) -> None:
    """X8 of explain's examples: the third hits where the first two parted."""
    made = pool(400, full(528), states(528), max_num_batched_tokens=2048, retention_interval=None)
    found: list[int] = []
    replay = Replay([Replica(made, None)], Arrivals())
    replay.on_admitted = lambda _, one: found.append(one.hit_tokens)
    first = ids(1, 2200)
    for seed in (1, 8, 9):
        prompt = first if seed == 1 else first[:shared] + ids(seed, 2200 - shared)
        replay.feed(SimRequest(str(seed), 2200, 1, prompt))
    replay.finish()
    assert found == hits


def test_no_better_policy_beats_the_bound_and_lru_does_not_either() -> None:
    import random

    chance = random.Random(5)
    for num_blocks in (12, 20, 40):
        replay = Replay([Replica(pool(num_blocks), Bound(num_blocks, 16))], Arrivals())
        for number in range(200):
            shared = ids(chance.randrange(12), 64)
            own = ids(100 + number, chance.randint(1, 60))
            tokens = shared[: chance.choice([16, 40, 64])] + own
            replay.feed(SimRequest(str(number), len(tokens), chance.randint(1, 30), tokens))
        replay.finish()
        (replica,) = replay.replicas
        assert replica.bound is not None
        assert 0 < replay.totals.hit_blocks < replica.bound.hit_blocks


def test_hash_ids_hit_at_every_block_size_that_divides_theirs() -> None:
    one = SimRequest("a", 96, 1, known=KnownHashes(32, [b"a", b"b", b"c"], divisible=True))
    two = SimRequest("b", 90, 1, known=KnownHashes(32, [b"a", b"b", b"x"], divisible=True))
    for size, hit in ((16, 64), (32, 64), (64, 64), (96, 0)):
        assert replayed(pool(100, full(size)), Arrivals(), one, two).totals.hit_tokens == hit


def test_conversations_by_a_models_own_template(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_text_model: Path
) -> None:
    """A token of the tiny model is a character; the second turn hits the first and its answer."""
    first = {"role": "user", "content": "What is a cache, and what is it for?"}
    reply = {"role": "assistant", "content": "A store of what is wanted again."}
    log = [
        {"messages": [first], "response": {"choices": [{"message": reply}]}},
        {"messages": [first, reply, {"role": "user", "content": "Thanks."}], "max_tokens": 1},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, log)))
    arguments = ("--tokenizer", tiny_text_model, "--blocks", 200, "--block-size", 1, "--requests")
    one, two = answer(capsys, path, *arguments)["requests"]
    assert one["hit_tokens"] == 0
    assert two["hit_tokens"] >= one["prompt_tokens"] + len(reply["content"]) - 1


def test_sizes_by_memory_are_those_of_kv_size(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = ROOT / "tests" / "data" / "kv-size" / "configs" / "llama-3.1-8b"
    path = tmp_path / "log.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]}
    path.write_text("\n".join([json.dumps(line)] * 2))
    found = answer(
        capsys, path, "--kv-memory", "1GiB,2GiB", "--model", model, "--max-model-len", 8192
    )
    assert [(one["num_blocks"], one["kv_memory"]) for one in found["points"]] == [
        (511, "1GiB"),
        (1023, "2GiB"),
    ]
    assert (found["form"], found["arrivals"], found["groups"]) == ("hashes", "clock", ["full:16"])
    assert found["points"][0]["hit_tokens"] == 1008


def test_replicas_split_what_one_pool_has_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    prompts = [{"prompt_token_ids": ids(seed, 64)} for _ in range(2) for seed in (1, 2, 3)]
    path.write_text("\n".join(map(json.dumps, prompts)))
    rates = {}
    for route in ("round-robin", "prefix-hash"):
        found = answer(capsys, path, "--blocks", 50, "--replicas", 2, "--route", route)
        (point,) = found["points"]
        rates[route] = point["hit_tokens"]
        assert sum(one["requests"] for one in point["pools"]) == 6
    assert rates == {"round-robin": 0, "prefix-hash": 3 * 48}


def test_the_page_on_the_six_steps_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (str(EXAMPLES / "six-steps.jsonl"), "--blocks", "10", "--block-size", "4")
    assert omnicache("simulate", *arguments, "--timeline", "--quiet") == 0
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "six-steps.md").read_text(encoding="utf-8")
    shown = [part for part in page.split("```\n")[1::2] if part.startswith("Step")]
    assert len(shown) == 5
    for part in shown:
        for piece in part.split("...\n"):
            assert piece in printed


def test_a_recorded_run_is_replayed_at_its_own_size_and_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Recorded from vLLM's scheduler without a model, in a pool that evicts and preempts."""
    folder = tmp_path / "run"
    folder.mkdir()
    with tracing(folder, Recording()):
        scheduler = PoolScheduler(PoolPlan((full(16),), num_blocks=12))
        for name, seed in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
            scheduler.add(PoolRequest(name, ids(seed, 70), max_tokens=30))
            scheduler.step()
        scheduler.run()
    summary = summarize(Run(folder))
    assert summary.evicted_blocks
    assert summary.preemptions

    found = answer(capsys, folder, "--requests")
    sizes = [(one["num_blocks"], one["is_current"]) for one in found["points"]]
    assert sizes == [(6, False), (12, True), (24, False), (48, False)]
    assert found["points"][0]["refused"].startswith("request a needs 7 blocks, and the pool has 6")
    current, *larger = found["points"][1:]
    assert current["hit_tokens"] == summary.hit_tokens
    assert current["resumed_hit_tokens"] == summary.resumed_hit_tokens
    assert current["evictions"] == summary.evicted_blocks
    assert current["preemptions"] == summary.preemptions
    assert current["pools"][0]["steps"] == summary.num_steps
    assert [one["preemptions"] for one in larger] == [0, 0]
    assert found["form"] == "run"
