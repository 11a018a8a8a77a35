"""`omnicache explain RUN`: reasons, evidence and whole outputs, from runs made by hand."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.prefix import ledger
from omnicache_cli.prefix.explain import Explanation, explain_run
from omnicache_cli.trace.records import (
    Admission,
    CacheReset,
    Evicted,
    Finished,
    MultiModalSpan,
    SchedulerStep,
)
from omnicache_cli.trace.run import Run
from tests.unit.pool_builder import PoolRecording, shared_prefix
from tests.unit.run_builder import Admit, cache_group
from tests.unit.showing import Ran

Explain = Callable[..., Ran]


@pytest.fixture
def explain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Explain:
    monkeypatch.chdir(tmp_path)

    def explain(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["omnicache", "explain", *map(str, arguments)])
        code = exit_code_of_run()
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return explain


def explained(recording: PoolRecording, tmp_path: Path) -> list[Explanation]:
    return list(explain_run(Run(recording.write(tmp_path / "run")), None))


def donor(**changes: object) -> PoolRecording:
    """a computes two blocks of 4 tokens, caches both and ends."""
    recording = PoolRecording()
    a = recording.arrive("a", 9, block_hashes=["a0", "a1"], **changes)
    recording.step({a: 9}, admit={a: Admit([[1, 2, 3]])})
    recording.caches(0, a, [1, 2])
    recording.ends(a, 3, 2, 1)
    return recording


def follower(recording: PoolRecording, tmp_path: Path, hit: int, **changes: object) -> Explanation:
    """b comes after it, with 9 tokens."""
    arrival = {"num_prompt_tokens": 9, "block_hashes": ["a0", "b1"], **changes}
    tokens = arrival.pop("num_prompt_tokens")
    assert isinstance(tokens, int)
    b = recording.arrive("b", tokens, **arrival)
    table = [1, 2][: hit // 4] + [4, 5, 6][: -(-tokens // 4) - hit // 4]
    recording.step({b: tokens - hit}, admit={b: Admit([table], hit=hit)})
    return explained(recording, tmp_path)[-1]


def test_an_evicted_block_says_when_it_came_for_whom_and_when_it_went_for_whom(
    tmp_path: Path, explain: Explain
) -> None:
    shared_prefix().write(tmp_path / "run")

    ran = explain("run", "--request", "d")

    assert ran.lines == [
        "#3 d hit 4 of 9 tokens: block 1 (tokens 4 .. 7) was cached at step 0 by #0 a and evicted "
        "at step 3",
        "to make room for #2 c",
        "reason          evicted",
        "step            4",
        "prompt tokens   9",
        "hit tokens      4",
        "last block hit  block id 1, cached at step 0 by #0 a",
        "",
        "Warnings",
        "false hit, another LoRA adapter or cache salt of the same text: #1 b has adapter sql, and "
        "it has",
        "neither",
    ]
    assert (ran.code, ran.err) == (0, "")


def test_every_lookup_in_one_line(tmp_path: Path, explain: Explain) -> None:
    shared_prefix().write(tmp_path / "run")

    ran = explain("run")

    assert ran.lines == [
        "12 of 50 queried tokens hit; of what an earlier request had, most was lost to "
        "salt-differs (1 of 4):",
        "the nearest request has another cache salt, or none",
        "",
        "Reasons",
        "reason          lookups  missed tokens  meaning",
        "nothing-shared        1              8  no earlier request begins with the same block",
        "full-blocks           1              1  "
        "every full block was hit; what is left fills no block",
        "salt-differs          1             24  "
        "the nearest request has another cache salt, or none",
        "evicted               1              5  the block was in the cache and was evicted",
        "",
        "Lookups",
        "request  id  step  prompt  hit  reason          then",
        "#0       a      0       8    0  nothing-shared  last-token",
        "#1       b      1       9    8  full-blocks     -",
        "#2       c      3      24    0  salt-differs    last-token",
        "#3       d      4       9    4  evicted         -",
        "",
        "Warnings",
        "#1 b: false hit, another LoRA adapter or cache salt of the same text: #0 a has neither, "
        "and it has",
        "adapter sql",
        "#3 d: false hit, another LoRA adapter or cache salt of the same text: #1 b has adapter "
        "sql, and it",
        "has neither",
    ]
    assert (ran.code, ran.err) == (0, 'next: omnicache explain run --request "#3"\n')


def test_json_has_the_names_that_scripts_rely_on(tmp_path: Path, explain: Explain) -> None:
    shared_prefix().write(tmp_path / "run")

    result = json.loads(explain("run", "--request", "#3", "--format", "json").out)

    (one,) = result["requests"]
    assert (one["request"], one["prompt_tokens"], one["hit_tokens"]) == ("d", 9, 4)
    assert (one["reason"], one["limit_tokens"], one["predicted_hit_tokens"]) == ("evicted", 4, 4)
    assert one["facts"] == {
        **{"block": 1, "group": 0, "hash": "a1", "block_id": 2, "cached_step": 0, "cached_by": 0},
        **{"left_step": 3, "taken_by": 2},
    }
    assert one["last_block_hit"] == {"block": 1, "step": 0, "request": 0, "name": "a"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--fail-on", "evicted"], 1),
        (["--fail-on", "reset", "--fail-on", "salt-differs"], 1),
        (["--fail-on", "reset"], 0),
        (["--request", "d", "--fail-on", "evicted"], 1),
        (["--request", "b", "--fail-on", "evicted"], 0),
    ],
)
def test_fail_on_a_reason(
    tmp_path: Path, explain: Explain, arguments: list[str], code: int
) -> None:
    shared_prefix().write(tmp_path / "run")
    assert explain("run", "--quiet", *arguments).code == code


def test_a_reason_that_is_none_is_refused_with_those_that_are(explain: Explain) -> None:
    ran = explain("run", "--fail-on", "gremlins")
    assert ran.code == 2
    assert ran.err.startswith(
        "omnicache: --fail-on gremlins: no such reason; choose of full-blocks, "
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one of RUN, --prompts FILE and --lint --model MODEL"),
        (["run", "--prompts", "p.jsonl"], "name one of RUN, --prompts FILE"),
        (["--model", "tiny"], "--model goes with --lint"),
        (["run", "--engine-arg", "seed=1"], "--engine-arg goes with --lint --model"),
        (["run", "--chain"], "--chain is about one request"),
        (["run", "--block-size", "16"], "--block-size goes with --prompts FILE"),
        (["run", "--drop-unit"], "--drop-unit goes with --prompts FILE"),
        (["--prompts", "p", "--group", "full:16", "--block-size", "16"], "--group and --block-si"),
        (["run", "--lint", "--fail-on", "evicted"], "--fail-on evicted: no such finding"),
    ],
)
def test_options_that_say_nothing_to_each_other(
    explain: Explain, arguments: list[str], message: str
) -> None:
    ran = explain(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_the_chain_of_a_request(tmp_path: Path, explain: Explain) -> None:
    recording = donor(
        token_ids=list(range(9)), lora_name="x", extra_keys=[(0, ["lora:x"]), (1, ["lora:x"])]
    )
    recording.write(tmp_path / "run")

    ran = explain("run", "--request", "a", "--chain", "--quiet")

    assert ran.lines[-4:] == [
        "Chain of block hashes",
        "block  tokens  parent hash  token ids  extra keys  hash",
        "    0  0 .. 3  root         0 .. 3     lora:x      a0",
        "    1  4 .. 7  a0           4 .. 7     lora:x      a1",
    ]
    result = explain("run", "--request", "a", "--chain", "--format", "json").json
    assert result["chain"][0] == {
        "block": 0,
        "first_token": 0,
        "end_token": 4,
        "parent_hash": None,
        "token_ids": [0, 1, 2, 3],
        "extra_keys": ["lora:x"],
        "hash": "a0",
    }


# -- one reason each --------------------------------------------------------------------------


def test_the_first_request_shares_nothing(tmp_path: Path) -> None:
    one = explained(donor(), tmp_path)[0]
    assert (one.reason.name, one.reason.detail) == ("nothing-shared", "no request ran before it")


def test_every_full_block(tmp_path: Path) -> None:
    one = follower(donor(), tmp_path, 8, block_hashes=["a0", "a1"])
    assert (one.reason.name, one.following) == ("full-blocks", None)
    assert one.reason.detail == "its 2 full blocks of 4 were hit; the last 1 token fill no block"


def test_the_last_token(tmp_path: Path) -> None:
    one = follower(donor(), tmp_path, 4, num_prompt_tokens=8, block_hashes=["a0", "a1"])
    assert (one.reason.name, one.reason.limit_tokens) == ("last-token", 4)


def test_a_prompt_shorter_than_a_block(tmp_path: Path) -> None:
    one = follower(donor(), tmp_path, 0, num_prompt_tokens=3, block_hashes=[])
    assert one.reason.detail == "the prompt of 3 tokens fills no block of 4"


@pytest.mark.parametrize(
    ("mine", "theirs", "name", "evidence"),
    [
        (None, None, "tokens-differ", ["#0 a agrees in 4 tokens"]),
        ([1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 6], "tokens-differ", ["#0 a agrees in 5 tokens"]),
    ],
)
def test_the_first_differing_block_and_token(
    tmp_path: Path, mine: list[int] | None, theirs: list[int] | None, name: str, evidence: list[str]
) -> None:
    one = follower(donor(token_ids=theirs), tmp_path, 4, token_ids=mine)
    assert (one.reason.name, one.reason.limit_tokens) == (name, 4)
    assert one.reason.detail == (
        "block 1 (tokens 4 .. 7) differs from that of every request before it"
    )
    told = (
        "token 5 is 9 here and 6 there"
        if mine
        else "which token differs is not recorded; trace with --with-token-ids"
    )
    assert list(one.reason.evidence) == [*evidence, told]


def test_a_shared_part_that_fills_no_block(tmp_path: Path) -> None:
    recording = donor(token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9])
    one = follower(
        recording, tmp_path, 0, block_hashes=["b0", "b1"], token_ids=[1, 2, 3, 9, 9, 9, 9, 9, 9]
    )
    assert (one.reason.name, one.reason.detail) == (
        "shared-shorter-than-block",
        "the 3 tokens that it shares with #0 a fill no block of 4",
    )
    assert one.reason.data["agreed_tokens"] == 3


def test_the_nearest_request_has_no_further_block(tmp_path: Path) -> None:
    one = follower(donor(), tmp_path, 8, num_prompt_tokens=13, block_hashes=["a0", "a1", "b2"])
    assert (one.reason.name, one.reason.detail) == (
        "donor-ends",
        "#0 a, which shares most, has no full block 2 (tokens 8 .. 11)",
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "name", "detail"),
    [
        ({"lora_name": "y"}, {"lora_name": "x"}, "lora-differs", "LoRA adapter y|LoRA adapter x"),
        ({}, {"lora_name": "x"}, "lora-differs", "no LoRA adapter|LoRA adapter x"),
        ({"cache_salt": "5a"}, {"cache_salt": "5b"}, "salt-differs", "a cache salt|another one"),
        ({"cache_salt": "5a"}, {}, "salt-differs", "a cache salt|no cache salt"),
    ],
)
def test_another_adapter_or_salt(
    tmp_path: Path, mine: dict[str, str], theirs: dict[str, str], name: str, detail: str
) -> None:
    one = follower(donor(**theirs), tmp_path, 0, block_hashes=["b0", "b1"], **mine)
    here, there = detail.split("|")
    assert (one.reason.name, one.reason.detail) == (name, f"it has {here}, and #0 a has {there}")


@pytest.mark.parametrize(
    ("mine", "theirs", "name", "detail"),
    [
        (
            [("B", 5, 3)],
            [("A", 5, 3)],
            "media-differs",
            "image 0 (tokens 5 .. 7, hash B) stands in block 1 (tokens 4 .. 7), and #0 a has "
            "another there: image 0 (tokens 5 .. 7, hash A)",
        ),
        (
            [("A", 6, 2)],
            [("A", 5, 3)],
            "media-offset-differs",
            "image 0 (tokens 6 .. 7, hash A) in block 1 (tokens 4 .. 7) begins at token 5 in #0 a",
        ),
        (
            [("A", 5, 3)],
            [],
            "media-differs",
            "image 0 (tokens 5 .. 7, hash A) stands in block 1 (tokens 4 .. 7), and #0 a has none "
            "there",
        ),
        (
            [],
            [("A", 5, 3)],
            "media-differs",
            "#0 a has image 0 (tokens 5 .. 7, hash A) in block 1 (tokens 4 .. 7), and it has not",
        ),
    ],
)
def test_another_image_or_the_same_at_another_place(
    tmp_path: Path,
    mine: list[tuple[str, int, int]],
    theirs: list[tuple[str, int, int]],
    name: str,
    detail: str,
) -> None:
    def media(items: list[tuple[str, int, int]]) -> dict[str, object]:
        return {
            "multimodal": [MultiModalSpan("image", at, count, one) for one, at, count in items],
            "extra_keys": [(1, [f"mm:{one}@{at - 4}" for one, at, _ in items])],
        }

    one = follower(donor(**media(theirs)), tmp_path, 4, **media(mine))
    assert (one.reason.name, one.reason.detail) == (name, detail)


def test_other_prompt_embeddings(tmp_path: Path) -> None:
    keys = [[(1, [f"embeds:{one}"])] for one in ("0a", "0b")]
    one = follower(donor(extra_keys=keys[0]), tmp_path, 4, extra_keys=keys[1])
    assert (one.reason.name, one.reason.detail) == (
        "embeds-differ",
        "the prompt embeddings of block 1 (tokens 4 .. 7) differ from those of #0 a",
    )


def test_a_reset(tmp_path: Path) -> None:
    recording = donor()
    recording.after(CacheReset(True))
    one = follower(recording, tmp_path, 0, block_hashes=["a0", "a1"])
    assert (one.reason.name, one.reason.detail) == (
        "reset",
        "block 0 (tokens 0 .. 3) was cached at step 0 by #0 a and lost at step 0, when the prefix "
        "cache was reset",
    )


def chunked() -> tuple[PoolRecording, int]:
    """a has computed one of its two blocks."""
    recording = PoolRecording()
    a = recording.arrive("a", 9, block_hashes=["a0", "a1"])
    recording.step({a: 4}, admit={a: Admit([[1]])})
    recording.caches(0, a, [1])
    return recording, a


def test_a_donor_that_is_still_being_computed(tmp_path: Path) -> None:
    recording, _ = chunked()
    one = follower(recording, tmp_path, 4, block_hashes=["a0", "a1"])
    assert (one.reason.name, one.reason.detail, one.reason.evidence) == (
        "not-computed-yet",
        "#0 a has the same block 1 (tokens 4 .. 7) and had not computed it yet",
        ("#0 a had computed 4 tokens",),
    )


def test_a_donor_that_ended_before_its_block_was_cached(tmp_path: Path) -> None:
    recording, a = chunked()
    recording.ends(a, 1)
    one = follower(recording, tmp_path, 4, block_hashes=["a0", "a1"])
    assert (one.reason.name, one.reason.detail) == (
        "never-cached",
        "#0 a has the same block 1 (tokens 4 .. 7), and it never entered the cache",
    )


def test_a_cache_that_is_off_and_a_request_that_does_not_read_it(tmp_path: Path) -> None:
    recording = PoolRecording(enable_prefix_caching=False)
    a = recording.arrive("a", 9)
    recording.step({a: 9}, admit={a: Admit([[1, 2, 3]])})
    recording.change(SchedulerStep, 0, admitted=[Admission(a, 0, 0, 0, [[1, 3]])])
    (one,) = explained(recording, tmp_path)
    assert (one.reason.name, one.hit_tokens, one.queried_tokens) == ("caching-off", None, None)

    skips = PoolRecording()
    b = skips.arrive("b", 9, skip_reading_prefix_cache=True)
    skips.step({b: 9}, admit={b: Admit([[1, 2, 3]])})
    skips.change(SchedulerStep, 0, admitted=[Admission(b, 0, 0, 0, [[1, 3]])])
    (two,) = explain_run(Run(skips.write(tmp_path / "skips")), None)
    assert two.reason.name == "skips-cache"


def test_the_next_part_of_a_session_is_not_looked_up(tmp_path: Path) -> None:
    recording = PoolRecording()
    a = recording.arrive("a", 4)
    recording.step({a: 4}, admit={a: Admit([[1]])})
    recording.step({a: 4}, admit={a: Admit([[1, 2]], session_prompt_tokens=8)})
    assert [one.reason.name for one in explained(recording, tmp_path)][1] == "session"


def test_a_request_that_never_ran(tmp_path: Path) -> None:
    recording = donor()
    b = recording.arrive("b", 9, block_hashes=["a0"])
    c = recording.arrive("c", 9, block_hashes=["a0"])
    recording.after(Finished(b, "FINISHED_ABORTED", 0))
    d = recording.arrive("d", 5, block_hashes=["a0"])
    recording.step({d: 1}, admit={d: Admit([[1, 4]], hit=4)})
    found = {one.external_id: one for one in explained(recording, tmp_path)}
    assert [found[name].reason.name for name in "bc"] == ["never-admitted"] * 2
    assert found["c"].number == c
    assert found["d"].hit_tokens == 4


def test_one_adapter_name_of_two_adapters_is_warned_of(tmp_path: Path) -> None:
    one = follower(
        donor(lora_name="x", lora_id=1),
        tmp_path,
        8,
        block_hashes=["a0", "a1"],
        lora_name="x",
        lora_id=2,
    )
    assert one.warnings == (
        "false hit, same name, different adapter: LoRA x is id 2 here and 1 in #0 a",
    )


def test_a_hit_of_another_tenants_blocks_is_warned_of(tmp_path: Path) -> None:
    one = follower(donor(lora_name="x", lora_id=1), tmp_path, 4, cache_salt="78")
    assert one.warnings == (
        "false hit, another LoRA adapter or cache salt of the same text: #0 a has adapter x, and "
        "it has a salt",
    )


def test_a_window_that_was_not_kept(tmp_path: Path) -> None:
    groups = [
        cache_group(block_size=4),
        cache_group(spec="SlidingWindowSpec", block_size=4, sliding_window=6),
    ]
    recording = PoolRecording(groups, num_blocks=20)
    hashes = ["a0", "a1", "a2"]
    a = recording.arrive("a", 13, block_hashes=hashes)
    recording.step({a: 13}, admit={a: Admit([[1, 2, 3, 4], [5, 6, 7, 8]])})
    recording.caches(0, a, [1, 2, 3])
    recording.caches(0, a, [5], group=1)
    b = recording.arrive("b", 13, block_hashes=hashes)
    recording.step({b: 9}, admit={b: Admit([[1, 9, 10, 11], [5, 12, 13, 14]], hit=4)})
    one = explained(recording, tmp_path)[-1]
    assert (one.reason.name, one.predicted_tokens) == ("group-said-less", 4)
    assert one.reason.detail == (
        "group 1 did not keep this prefix up to token 12: alone it hits 4, the others 12"
    )
    assert one.reason.evidence == (
        "group 0 (FullAttentionSpec, blocks of 4): 12",
        "group 1 (SlidingWindowSpec, blocks of 4, window 6): 4; a hit there needs 2 blocks before "
        "token 12; kept of this prefix: blocks 0; of #0 a: blocks 0",
    )


def test_a_run_whose_events_do_not_account_for_the_hit_says_so(tmp_path: Path) -> None:
    recording = donor()
    one = follower(recording, tmp_path, 4, block_hashes=["c0", "c1"])
    assert (one.hit_tokens, one.predicted_tokens, one.reason.name) == (4, 0, "unknown")
    assert one.reason.detail == "by the events of the run the hit would be 0 tokens"


def test_a_kind_of_attention_whose_lookup_is_not_known_is_said(tmp_path: Path) -> None:
    recording = PoolRecording([cache_group(spec="ChunkedLocalAttentionSpec", block_size=4)])
    a = recording.arrive("a", 9, block_hashes=["a0", "a1"])
    recording.step({a: 9}, admit={a: Admit([[1, 2, 3]])})
    (one,) = explained(recording, tmp_path)
    assert one.reason.detail == "the lookup of ChunkedLocalAttentionSpec is not known"


# -- bounds -----------------------------------------------------------------------------------


def test_ended_requests_are_forgotten_by_the_number_of_their_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_KNOWN_HASHES", 1)
    one = follower(donor(), tmp_path, 4)
    assert one.reason.detail == (
        "no request before it has block 1 (tokens 4 .. 7); who shares the rest is forgotten"
    )


def test_hashes_that_left_the_cache_are_forgotten_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_GONE", 1)
    recording = donor()
    b = recording.arrive("b", 9, block_hashes=["b0", "b1"])
    events = [Evicted(1, 0, "a0", 0, b), Evicted(2, 0, "a1", 0, b)]
    recording.step({b: 9}, admit={b: Admit([[1, 2, 3]])}, events=events)
    found = recording.arrive("c", 9, block_hashes=["a0", "a1"])
    recording.step({found: 9}, admit={found: Admit([[4, 5, 6]])})
    one = explained(recording, tmp_path)[-1]
    assert (one.reason.name, one.reason.limit_tokens) == ("never-cached", 0)


def test_a_damaged_trace_is_named(tmp_path: Path, explain: Explain) -> None:
    recording = donor()
    record = next(one for one in recording.records if isinstance(one, SchedulerStep))
    events = [replace(one, group=7) if hasattr(one, "group") else one for one in record.events]
    recording.change(SchedulerStep, 0, events=events)
    recording.write(tmp_path / "run")
    ran = explain("run")
    assert (ran.code, ran.out) == (3, "")
    assert "caches blocks of group 7, which it does not have" in ran.err
