"""The pure parts of `omnicache simulate`: who arrives when, what is read, what is counted."""

import gzip
import io
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.prefix.prompts import Adapter
from omnicache_cli.simulate.bound import Bound, RangeMaximum
from omnicache_cli.simulate.forms import Lines, Pieces, Reading
from omnicache_cli.simulate.recorded import RecordedRequests, recorded_engine
from omnicache_cli.simulate.replay import Arrivals, Replay, Replica
from omnicache_cli.simulate.request import KnownHashes, SimRequest, chained
from omnicache_cli.simulate.source import open_lines
from omnicache_cli.simulate.study import Setup, Size, run_study
from omnicache_cli.simulate.timeline import MAX_MOMENTS, PoolState, Timeline
from omnicache_cli.simulate.watch import Distribution, PoolWatch
from omnicache_cli.trace.records import Finished as FinishedEvent
from omnicache_cli.trace.records import Hashed
from omnicache_cli.trace.run import Run
from tests.unit.fake_pool import FakePool
from tests.unit.run_builder import Admit, Recording, cache_group

OPTIONS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 4,
    "prefix_caching_hash_algo": "sha256",
    "prefix_cache_retention_interval": 0,
    "num_spec_tokens": 0,
    "async_scheduling": False,
    "policy": "fcfs",
    "kv_connector": False,
}


def tokens(name: str, ids: Sequence[int], output: int = 1, **more: Any) -> SimRequest:
    return SimRequest(name, len(ids), output, list(ids), **more)


# -- arrivals ---------------------------------------------------------------------------------


def replay_of(arrivals: Arrivals, *, replicas: int = 1, **more: Any) -> Replay:
    return Replay([Replica(FakePool(100), None) for _ in range(replicas)], arrivals, **more)


def started(replay: Replay, requests: Sequence[SimRequest]) -> list[tuple[str, int]]:
    """Requests, and the step of their pool in which each starts."""
    seen: list[tuple[str, int]] = []

    def admitted(number: int, one: Any) -> None:
        step = replay.replicas[number].pool.watch.step
        seen.append((one.request.name, step))

    replay.on_admitted = admitted
    for one in requests:
        replay.feed(one)
    replay.finish()
    return seen


def test_one_by_one_the_next_comes_when_the_one_before_has_ended() -> None:
    requests = [tokens(name, range(20), 3) for name in "abc"]
    assert started(replay_of(Arrivals()), requests) == [("a", 1), ("b", 4), ("c", 7)]


def test_two_at_a_time() -> None:
    requests = [tokens(name, range(20), 3) for name in "abc"]
    seen = started(replay_of(Arrivals(concurrency=2)), requests)
    assert seen == [("a", 1), ("b", 1), ("c", 4)]


def test_by_step_a_request_arrives_before_its_step_or_when_the_engine_is_idle() -> None:
    requests = [
        tokens("a", range(20), 3, arrival_step=0),
        tokens("b", range(20), 3, arrival_step=2),
        tokens("c", range(20), 3, arrival_step=900),
        tokens("d", range(20), 1),
    ]
    seen = started(replay_of(Arrivals("step")), requests)
    assert seen == [("a", 1), ("b", 3), ("c", 6), ("d", 9)]


def test_by_clock_a_step_takes_its_time_and_an_idle_engine_waits() -> None:
    requests = [
        tokens("a", range(10), 3, arrival_seconds=100.0),
        tokens("b", range(10), 1, arrival_seconds=101.5),
        tokens("c", range(10), 1, arrival_seconds=200.0),
    ]
    replay = replay_of(Arrivals("clock", step_seconds=1.0, token_seconds=0.01))
    assert started(replay, requests) == [("a", 1), ("b", 3), ("c", 4)]
    (replica,) = replay.replicas
    assert replica.now == pytest.approx(200.0 + 1.0 + 10 * 0.01)


def test_by_clock_without_times_is_refused() -> None:
    replay = replay_of(Arrivals("clock"))
    replay.feed(tokens("a", range(10)))
    assert replay.refused == "request a has no time of arrival; leave out --arrivals clock"


def test_an_aborted_request_ends_after_its_step() -> None:
    replay = replay_of(Arrivals("step"))
    replay.feed(tokens("a", range(20), 50, arrival_step=0, abort_step=3))
    replay.finish()
    assert replay.replicas[0].pool.watch.step == 4
    assert replay.totals.finished == 1


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ("round-robin", [["a", "c", "e"], ["b", "d"]]),
        ("least-loaded", [["a", "e"], ["b", "c", "d"]]),
    ],
)
def test_requests_go_to_replicas(route: Any, expected: list[list[str]]) -> None:
    replay = replay_of(Arrivals("step"), replicas=2, route=route)
    seen: list[list[str]] = [[], []]
    replay.on_admitted = lambda number, one: seen[number].append(one.request.name)
    lengths = {"a": 7, "b": 1, "c": 1, "d": 1, "e": 1}
    for step, (name, length) in enumerate(lengths.items()):
        replay.feed(tokens(name, range(20), length, arrival_step=2 * step))
    replay.finish()
    assert seen == expected


def test_prefix_hash_sends_equal_first_blocks_to_one_replica() -> None:
    replay = replay_of(Arrivals(), replicas=4, route="prefix-hash")
    where: dict[str, set[int]] = {}
    replay.on_admitted = lambda number, one: where.setdefault(one.request.name, set()).add(number)
    for turn in range(3):
        for start in range(20):
            ids = [start * 100 + index for index in range(16)]
            replay.feed(tokens(str(start), [*ids, turn]))
    replay.finish()
    assert {len(one) for one in where.values()} == {1}
    assert len(set.union(*where.values())) == 4


def test_totals_leave_resumed_requests_out_as_vllm_does() -> None:
    replay = replay_of(Arrivals())
    for _ in range(2):
        replay.feed(tokens("a", range(40)))
    replay.finish()
    totals = replay.totals
    assert (totals.query_tokens, totals.hit_tokens, totals.hit_blocks) == (80, 32, 2)


# -- studies ----------------------------------------------------------------------------------


def test_sizes_run_side_by_side_over_a_workload_that_is_read_once() -> None:
    requests = iter([tokens("a", range(40)), tokens("b", range(64)), tokens("a", range(40))])
    setup = Setup((Size(3), Size(100)), lists_requests=True)
    study = run_study(requests, setup, FakePool)
    small, large = study.points
    assert small.replay.refused == "request b needs 4 blocks, and the pool has 3"
    assert small.hit_rate is None
    assert large.hit_rate == (32 + 32) / 144
    assert (study.num_requests, study.prompt_tokens, study.output_tokens) == (3, 144, 3)


def test_a_workload_that_no_size_can_run_is_refused_before_it_loops() -> None:
    requests = iter([tokens("a", range(64)), tokens("b", range(64))])
    with pytest.raises(BadInputError, match="request a needs 4 blocks, and the pool has 3"):
        run_study(requests, Setup((Size(2), Size(3))), FakePool)
    assert next(requests).name == "b"  # it was not read to its end


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(BadInputError, match="the workload holds no request"):
        run_study([], Setup((Size(3),)), FakePool)


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        ({}, "one-by-one"),
        ({"arrival_step": 0}, "step"),
        ({"arrival_seconds": 1.0}, "clock"),
        ({"arrival_step": 0, "arrival_seconds": 1.0}, "step"),
    ],
)
def test_arrivals_are_what_the_first_request_says(more: dict[str, Any], mode: str) -> None:
    assert run_study([tokens("a", range(9), **more)], Setup((Size(9),)), FakePool).mode == mode


def test_a_timeline_of_a_long_run_is_refused() -> None:
    timeline = Timeline(lambda: PoolState((), ()))
    for step in range(MAX_MOMENTS):
        timeline.add(step, [])
    with pytest.raises(BadInputError, match="--timeline is for small runs"):
        timeline.add(MAX_MOMENTS, [])


# -- what happens to the blocks ---------------------------------------------------------------


class Block:
    def __init__(self, block_id: int, block_hash: bytes | None = None) -> None:
        self.block_id, self.block_hash = block_id, block_hash


def test_lives_and_reuse_distances() -> None:
    watch = PoolWatch(4)
    watch.on_block_evicted(Block(1))  # vLLM says it of each block that it hands out
    watch.end_step(3)
    for number in (2, 3):
        watch.on_block_evicted(Block(number))
    watch.on_block_accessed(Block(1))
    watch.end_step(1)
    watch.on_block_evicted(Block(4))
    watch.on_block_accessed(Block(1))
    watch.on_block_evicted(Block(2, b"hash"))
    watch.end_step(0)

    assert (watch.evictions, watch.lifetimes.percentile(50)) == (1, 1)
    assert [watch.reuse_distances.percentile(percent) for percent in (50, 100)] == [1, 2]
    assert (watch.usage.mean, watch.usage.peak, watch.usage.peak_step) == (2 / 3, 1.0, 2)


def test_a_distribution_counts_small_values_exactly_and_large_ones_closely() -> None:
    values = Distribution()
    assert values.percentile(50) is None
    for value in (0, 0, 7, 31, 1000, 1_000_000):
        values.add(value)
    assert values.count == 6
    assert [values.percentile(one) for one in (1, 50, 60)] == [0, 7, 31]
    assert 1000 - 1000 / 32 < (values.percentile(80) or 0) <= 1000
    assert 1_000_000 - 1_000_000 / 32 < (values.percentile(100) or 0) <= 1_000_000


# -- the bound --------------------------------------------------------------------------------


def at_most(workload: Sequence[Sequence[int]], num_blocks: int) -> int:
    """By trying: stays of single blocks between two requests, no more at a time than fit."""
    stays = []
    last: dict[int, int] = {}
    for number, prompt in enumerate(workload):
        for block in prompt:
            if block in last:
                stays.append((last[block], number))
        last.update(dict.fromkeys(prompt, number))
    for count in range(len(stays), 0, -1):
        for chosen in combinations(stays, count):
            if all(
                len(workload[number]) + sum(start < number < end for start, end in chosen)
                <= num_blocks
                for number in range(len(workload))
            ):
                return count
    return 0


def bound_of(workload: Sequence[Sequence[int]], num_blocks: int) -> int:
    """One request at a time, a block of one token each, the last token a block of its own."""
    bound = Bound(num_blocks, 1)
    for prompt in workload:
        hashes = [str(block).encode() for block in prompt]
        bound.admit(hashes, len(prompt) + 1)
        bound.release(hashes, len(prompt), len(prompt))
    return bound.hit_blocks


def test_the_bound_is_the_most_that_any_choice_reaches() -> None:
    chance = random.Random(7)
    for _ in range(60):
        workload = [chance.sample(range(6), chance.randint(1, 3)) for _ in range(6)]
        num_blocks = chance.randint(3, 5)
        assert bound_of(workload, num_blocks) == at_most(workload, num_blocks), workload


def test_the_bound_of_a_loop_that_lru_never_hits() -> None:
    """Four blocks in turn in a pool of three: LRU 0; keeping two of them hits two of three."""
    loop = [[number % 4] for number in range(40)]
    assert bound_of(loop, 3) == 24
    assert bound_of(loop, 4) == 36


def test_a_block_that_a_running_request_holds_takes_no_room() -> None:
    bound = Bound(1, 4)
    bound.admit([b"a"], 8)
    bound.admit([b"a"], 8)
    assert bound.hit_blocks == 1
    for _ in range(2):
        bound.release([b"a", b"output"], 4, 9)
    bound.admit([b"a", b"output"], 9)
    assert bound.hit_blocks == 3


def test_range_maximum_is_what_a_list_gives() -> None:
    chance = random.Random(3)
    tree, plain = RangeMaximum(), []
    for _ in range(400):
        tree.append(0)
        plain.append(0)
        first = chance.randrange(len(plain))
        end = chance.randint(first + 1, len(plain))
        tree.add(first, end, 3)
        plain[first:end] = [value + 3 for value in plain[first:end]]
        first = chance.randrange(len(plain))
        end = chance.randint(first + 1, len(plain))
        assert tree.maximum(first, end) == max(plain[first:end])


# -- forms ------------------------------------------------------------------------------------


def read(*lines: object, **reading: Any) -> list[SimRequest]:
    encoded = [json.dumps(one).encode() + b"\n" for one in lines]
    return list(Lines(iter(encoded), "log", Reading(**reading)))


def test_our_prompts_file() -> None:
    first, second = read(
        {"id": "a", "prompt_token_ids": [1, 2, 3], "arrival_step": 4, "lora": "sql"},
        {"prompt_token_ids": [1], "max_tokens": 7, "cache_salt": "s"},
        max_tokens=5,
    )
    assert (first.name, first.token_ids, first.num_output_tokens) == ("a", [1, 2, 3], 5)
    assert (first.arrival_step, first.adapter) == (4, Adapter("sql"))
    assert (second.name, second.num_output_tokens, second.cache_salt) == ("p1", 7, "s")


def test_request_logs_in_their_shapes() -> None:
    messages = [{"role": "user", "content": "What is a cache?"}]
    answer = {"choices": [{"message": {"content": "A store."}}], "usage": {"completion_tokens": 3}}
    requests = read(
        {"model": "m", "messages": messages, "max_tokens": 9},
        {"custom_id": "b", "method": "POST", "body": {"messages": messages}},
        {"request": {"messages": messages}, "response": answer, "timestamp": 12.5},
        {"model": "m", "prompt": [5, 6, 7], "max_tokens": 2},
        {"model": "m", "prompt": "What is a cache?"},
        tokenizer=Pieces(),
    )
    assert [one.num_output_tokens for one in requests] == [9, 1, 3, 2, 1]
    assert requests[0].token_ids == requests[1].token_ids == requests[2].token_ids
    assert requests[1].name == "b"
    assert requests[2].output_token_ids == Pieces().text("A store.")
    assert requests[2].arrival_seconds == 12.5
    assert requests[3].token_ids == [5, 6, 7]


def test_times_of_logs_are_numbers_or_iso_8601() -> None:
    times = ["2026-01-01T00:00:00Z", "2026-01-01T01:00:01.5+01:00", 1767225603]
    requests = read(*({"model": "m", "prompt": [1], "timestamp": one} for one in times))
    assert [(one.arrival_seconds or 0) - 1767225600 for one in requests] == [0, 1.5, 3]


def test_the_next_turn_of_a_conversation_begins_with_the_turn_before() -> None:
    first = {"role": "user", "content": "What is a cache?"}
    turns = [first, {"role": "assistant", "content": "A store."}, {"role": "user", "content": "?"}]
    one, two = read({"messages": [first]}, {"messages": turns}, tokenizer=Pieces())
    assert one.token_ids is not None
    assert two.token_ids is not None
    assert two.token_ids[: len(one.token_ids)] == one.token_ids


def test_parts_that_are_no_text_are_equal_where_they_are() -> None:
    def with_image(url: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": url}]
        return {"messages": [{"role": "user", "content": parts}]}

    one, same, other = read(*map(with_image, ["u", "u", "v"]), tokenizer=Pieces())
    assert one.token_ids == same.token_ids != other.token_ids


def test_hash_ids_of_mooncake() -> None:
    one, two = read(
        {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
        {"timestamp": 3052, "input_length": 1024, "output_length": 26, "hash_ids": [46, 9]},
    )
    assert (one.num_prompt_tokens, one.num_output_tokens) == (1100, 52)
    assert two.arrival_seconds == 3.052
    small, other = one.hashes_of(16), two.hashes_of(16)
    assert small is not None
    assert other is not None
    assert (len(small), len(other)) == (1100 // 16, 64)
    assert small[:32] == other[:32]
    assert not set(small[32:]) & set(other)
    assert len(set(small)) == len(small)
    assert one.hashes_of(1024) == [chained([46, 47])[-1]]


def test_equal_ids_after_different_ones_are_different_blocks() -> None:
    one, two = read(
        {"input_length": 32, "hash_ids": [1, 5], "timestamp": 2},
        {"input_length": 32, "hash_ids": [2, 5]},
    )
    assert one.arrival_seconds == 2
    assert not set(one.hashes_of(16) or []) & set(two.hashes_of(16) or [])


def test_the_block_size_of_a_line_counts() -> None:
    (one,) = read({"input_length": 100, "hash_ids": [1, 2], "block_size": 64})
    assert len(one.hashes_of(64) or []) == 2


def test_tokens_without_a_hash_id_are_counted() -> None:
    lines = Lines(
        iter([b'{"input_length": 1000, "hash_ids": [1]}']), "log", Reading(hash_tokens=512)
    )
    list(lines)
    assert lines.notes() == ["488 prompt tokens have no hash id; they are taken to hit never"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "log:1: not a request ("),
        ({"prompt_token_ids": []}, "log:1: the prompt is empty; vLLM needs at least one token"),
        ({"hash_ids": [1, 2], "input_length": 9}, "log:1: 2 hash ids for 9 tokens are blocks of"),
        ({"hash_ids": [1], "input_length": 0}, "log:1: input_length is 0; the least is 1"),
        ({"hash_ids": [1, 2], "input_length": 9, "block_size": 16}, "log:1: 2 hash ids for 9 tok"),
        ({"messages": [{"content": "x"}]}, "log:1: a message has no role"),
        ({"messages": [{"role": "user", "content": 3}]}, "log:1: the content of a message is neit"),
        ({"model": "m", "prompt": [1], "timestamp": "noon"}, "log:1: the timestamp is neither a"),
        ({"model": "m"}, "log:1: neither messages nor a prompt"),
        ({"model": "m", "prompt": []}, "log:1: neither messages nor a prompt"),
    ],
)
def test_a_bad_line_is_named_and_never_shown(line: Any, message: str) -> None:
    encoded = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(BadInputError) as error:
        list(Lines(iter([encoded.encode()]), "log", Reading(tokenizer=Pieces())))
    assert str(error.value).startswith(message)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(UsageError, match="name a model folder with --tokenizer") as error:
        read({"messages": [{"role": "user", "content": "secret"}]})
    assert "secret" not in str(error.value)


# -- sources ----------------------------------------------------------------------------------

LINES = b'{"prompt_token_ids": [1]}\n{"prompt_token_ids": [2]}\n'


def test_plain_and_gzip_files(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(LINES)
    (tmp_path / "packed").write_bytes(gzip.compress(LINES))
    for name in ("plain", "packed"):
        with open_lines(str(tmp_path / name)) as lines:
            assert list(lines) == LINES.splitlines(keepends=True)


def test_zstd_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(UsageError, match=r"pip install .zstandard"), open_lines(str(path)):
        pass


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "log.zst"
    path.write_bytes(zstandard.compress(LINES))
    with open_lines(str(path)) as lines:
        assert list(lines) == LINES.splitlines(keepends=True)
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(BadInputError, match="is damaged"), open_lines(str(path)) as lines:
        list(lines)


def test_zstd_frames_follow_one_another_and_the_last_is_whole(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "log.zst"
    many = b"".join(b'{"prompt": %d}\n' % number for number in range(20_000))
    packed = zstandard.compress(LINES) + zstandard.compress(many)
    path.write_bytes(packed)
    with open_lines(str(path)) as lines:
        assert list(lines) == (LINES + many).splitlines(keepends=True)
    path.write_bytes(packed[:-1])
    with pytest.raises(BadInputError, match="ends in the middle"), open_lines(str(path)) as lines:
        list(lines)


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    lines = Lines(iter([b"\xef\xbb\xbf" + b'{"prompt_token_ids": [1, 2]}\n']), "log", Reading())
    assert [one.num_prompt_tokens for one in lines] == [2]


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(gzip.compress(LINES))

    monkeypatch.setattr(sys, "stdin", Stdin)
    with open_lines("-") as lines:
        assert list(lines) == LINES.splitlines(keepends=True)


def test_a_damaged_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(LINES * 1000)[:-20])
    with pytest.raises(BadInputError, match="is damaged"), open_lines(str(path)) as lines:
        list(lines)
    with pytest.raises(BadInputError, match="cannot read"), open_lines(str(tmp_path / "none")):
        pass


# -- recorded runs ----------------------------------------------------------------------------


def recording() -> Recording:
    """Two requests that end in the other order, and one that does not end."""
    found = Recording(options=OPTIONS, num_blocks=11)
    first = found.arrive("a", 40, block_hashes=["aa", "ab"], arrival_ns=5_000_000_000)
    found.step({first: 40}, admit={first: Admit([[1, 2, 3]])})
    second = found.arrive("b", 20, block_hashes=["ac"], token_ids=list(range(20)))
    third = found.arrive("c", 20)
    found.step({first: 1, second: 20}, admit={second: Admit([[4, 5]])})
    found.finish(second, 1)
    found.after(Hashed(first, 2, ["ad"]))
    found.step({first: 1, third: 20}, admit={third: Admit([[4, 5]])})
    found.finish(first, 3)
    return found


def test_requests_of_a_run_come_in_order_of_arrival_with_what_became_of_them(
    tmp_path: Path,
) -> None:
    run = Run(recording().write(tmp_path / "run"))
    requests = RecordedRequests(run, recorded_engine(run, None))
    first, second = requests
    assert (first.name, first.num_prompt_tokens, first.num_output_tokens) == ("a", 40, 3)
    assert first.hashes_of(16) == [b"\xaa", b"\xab", b"\xad"]
    assert (first.arrival_step, second.arrival_step) == (0, 1)
    assert first.arrival_seconds == 5.0
    assert requests.notes() == ["1 requests had not ended with the run: left out"]


def test_another_block_size_needs_multiples_or_tokens(tmp_path: Path) -> None:
    run = Run(recording().write(tmp_path / "run"))
    first, second = RecordedRequests(run, recorded_engine(run, None))
    assert first.hashes_of(32) == [b"\xab"]
    assert second.hashes_of(8) is None  # its tokens are recorded
    with pytest.raises(BadInputError, match="or trace --with-token-ids"):
        first.hashes_of(8)


def test_an_aborted_request_ends_at_its_last_token(tmp_path: Path) -> None:
    found = Recording(options=OPTIONS)
    number = found.arrive("a", 40)
    found.step({number: 40}, admit={number: Admit([[1, 2, 3]])})
    found.after(FinishedEvent(number, "FINISHED_ABORTED", 0))
    run = Run(found.write(tmp_path / "run"))
    requests = RecordedRequests(run, recorded_engine(run, None))
    assert [one.num_output_tokens for one in requests] == [1]
    assert requests.notes() == ["1 requests were aborted: they end at their last token"]


def test_the_engine_of_a_run_is_taken_over(tmp_path: Path) -> None:
    groups = [cache_group(), cache_group(spec="SlidingWindowSpec", sliding_window=64)]
    found = Recording(groups, options=OPTIONS, num_blocks=11, kv_cache_tensors=[{"size": 2200}])
    engine = recorded_engine(Run(found.write(tmp_path / "run")), None)
    assert engine.group_texts() == ["full:16", "sliding:16:64"]
    assert (engine.num_blocks, engine.bytes_per_block) == (10, 200)
    assert engine.settings()["match_unit"] == 16
    assert engine.notes() == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {**OPTIONS, "kv_connector": True}}, "ran with a KV connector"),
        ({"options": {}}, "the run does not tell async_scheduling, kv_connector, max_model_len"),
        ({"options": OPTIONS, "groups": [cache_group(spec="SinkSpec")]}, "group of SinkSpec"),
    ],
)
def test_an_engine_that_cannot_be_simulated(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    groups = changes.pop("groups", [cache_group()])
    run = Run(Recording(groups, **changes).write(tmp_path / "run"))
    with pytest.raises(BadInputError, match=message):
        recorded_engine(run, None).group_texts()


def test_what_is_not_simulated_is_said(tmp_path: Path) -> None:
    options = {**OPTIONS, "num_spec_tokens": 2, "async_scheduling": True, "policy": "priority"}
    run = Run(Recording(options=options).write(tmp_path / "run"))
    assert [one.split(" is not simulated")[0] for one in recorded_engine(run, None).notes()] == [
        "speculative decoding",
        "asynchronous scheduling",
        "the policy priority",
    ]


def stream(count: int) -> Iterator[SimRequest]:
    for number in range(count):
        yield SimRequest(str(number), 4, 1, known=KnownHashes(4, [b"%d" % number]))


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    setup = Setup((Size(2),), Arrivals(concurrency=2))
    pools: list[FakePool] = []

    def make(num_blocks: int) -> FakePool:
        pools.append(FakePool(num_blocks))
        return pools[-1]

    study = run_study(stream(3000), setup, make)
    assert study.num_requests == 3000
    assert (study.listed, study.moments, pools[0].running) == ([], [], [])
