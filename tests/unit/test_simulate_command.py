"""`omnicache simulate` as a user types it, with a pool that needs no vLLM."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.engine.modelfree import replay
from omnicache_cli.simulate.plot import Bar, plot
from omnicache_cli.simulate.report import Subject, study_report
from omnicache_cli.simulate.study import Setup, Size, run_study
from tests.unit.fake_pool import FakePool
from tests.unit.run_builder import Recording, two_rounds
from tests.unit.showing import Ran
from tests.unit.test_simulate import OPTIONS, recording, tokens

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "simulate.schema.json").read_text(encoding="utf-8")
)
Simulate = Callable[..., Ran]
PLANS: list[Any] = []
HEADER = "  ".join(
    [
        *("blocks", "mean in use, %", "peak, %", "steps", "life p50, steps", "life p90"),
        *("reuse p50, blocks", "reuse p90"),
    ]
)


class PlannedPool(FakePool):
    def __init__(self, plan: Any, _: object) -> None:
        PLANS.append(plan)
        super().__init__(plan.num_blocks)


@pytest.fixture
def simulate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Simulate:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay, "ReplayPool", PlannedPool)
    PLANS.clear()

    def simulate(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["omnicache", "simulate", *map(str, arguments)])
        code = exit_code_of_run()
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return simulate


def write_log(path: Path, count: int = 2) -> Path:
    lines = [json.dumps({"prompt_token_ids": list(range(40))})] * count
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_whole_report(simulate: Simulate, tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl")
    ran = simulate("log.jsonl", "--blocks", "2,8,4", "--current", 4, "--quiet")

    assert ran.err == ""
    assert ran.out.splitlines() == [
        "40 % hit with 4 blocks of 16 tokens",
        "workload              log.jsonl",
        "form                  prompts",
        "requests              2",
        "prompt tokens         80",
        "output tokens         2",
        "arrivals              1 at a time",
        "KV cache groups       full:16",
        "current size, blocks  4",
        "",
        "Pool sizes",
        "blocks  hit rate, %  hit tokens  hit blocks  queried tokens  evictions  preemptions",
        "     2            -           -           -               -          -            -",
        "     4           40          32           2              80          0            0",
        "     8           40          32           2              80          0            0",
        "",
        "Hit rate by pool size",
        *(f"{percent:>2} %          ████████ ▓▓▓▓▓▓▓▓" for percent in range(40, 0, -4)),
        "     2 blocks                  8",
        "▓ hit rate   █ hit rate, current size",
        "",
        "Blocks: in use; life until eviction; reuse, blocks taken between two uses",
        HEADER,
        "     2               -        -      0  -                -         -                  -",
        "     4              25       25      2  -                -         -                  -",
        "     8            12.5     12.5      2  -                -         -                  -",
        "",
        "Notes",
        "2 blocks: request p0 needs 3 blocks, and the pool has 2",
    ]
    assert ran.code == 0


def test_json_is_as_the_schema_says(simulate: Simulate, tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl")
    options = ("--replicas", 2, "--bound", "--requests", "--format", "json", "--quiet")
    found = json.loads(simulate("log.jsonl", "--blocks", "4,8", *options).out)
    jsonschema.validate(found, SCHEMA)
    assert [one["num_blocks"] for one in found["points"]] == [4, 8]
    assert found["points"][0]["hit_rate"] == 0.0  # each at a replica of its own
    assert found["num_admissions"] == 4


def test_html_has_the_picture(simulate: Simulate, tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl")
    assert simulate("log.jsonl", "--blocks", "4,8", "-o", "r.html", "--quiet").code == 0
    page = (tmp_path / "r.html").read_text()
    assert "Hit rate by pool size" in page
    assert page.count("<svg ") == 1
    assert "//" not in page.partition("</style>")[0]


def test_a_run_brings_its_engine_and_sizes_around_its_own(
    simulate: Simulate, tmp_path: Path
) -> None:
    recording().write(tmp_path / "run")
    found = json.loads(simulate("run", "--format", "json", "--quiet").out)
    jsonschema.validate(found, SCHEMA)
    assert (found["form"], found["arrivals"], found["current_blocks"]) == ("run", "step", 10)
    assert [(one["num_blocks"], one["is_current"]) for one in found["points"]] == [
        (5, False),
        (10, True),
        (20, False),
        (40, False),
    ]
    assert PLANS[0].max_num_batched_tokens == 512
    assert PLANS[0].max_model_len == 1024
    assert found["notes"] == ["1 requests had not ended with the run: left out"]


def test_a_block_of_a_run_tells_what_memory_holds(simulate: Simulate, tmp_path: Path) -> None:
    tensors = [{"size": 11 << 20}]
    found = Recording(options=OPTIONS, num_blocks=11, kv_cache_tensors=tensors)
    found.records += recording().records[len(found.records) :]
    found.write(tmp_path / "run")
    ran = simulate("run", "--kv-memory", "8MiB,64MiB", "--format", "json", "--quiet")
    points = json.loads(ran.out)["points"]
    assert [(one["num_blocks"], one["kv_memory"]) for one in points] == [(7, "8MiB"), (63, "64MiB")]


def test_what_is_typed_wins_over_the_run(simulate: Simulate, tmp_path: Path) -> None:
    recording().write(tmp_path / "run")
    typed = ("--max-num-seqs", 7, "--retention-interval", "null", "--block-size", 32)
    assert simulate("run", "--blocks", 9, *typed, "--quiet").code == 0
    (plan,) = PLANS
    assert (plan.max_num_seqs, plan.retention_interval, plan.groups[0].block_size) == (7, None, 32)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["log"], 2, "no pool size; give --blocks N,N,... or --kv-memory GIB,... --model MODEL"),
        (["log", "--blocks", "0"], 2, "--blocks '0': write numbers of blocks from 1, such as"),
        (["log", "--blocks", "x"], 2, "--blocks 'x': write numbers of blocks from 1, such as"),
        (["log", "--blocks", "9", "--kv-memory", "1GiB"], 2, "--blocks and --kv-memory both say"),
        (["log", "--kv-memory", "1GiB"], 2, "--kv-memory needs to know the model; name it with"),
        (["log", "--blocks", "9", "--model", "m"], 2, "--model goes with --kv-memory; leave it"),
        (["log", "--blocks", "9", "--engine", "0"], 2, "--engine is about a recorded run; leave"),
        (["run", "--tokenizer", "t"], 2, "--tokenizer is about JSON lines, and run is a run"),
        (["run", "--engine", "x"], 3, "run has no engine x; choose: host.1.0"),
        (["log", "--blocks", "9,8", "--timeline"], 2, "--timeline is for one pool of at most 64"),
        (["log", "--blocks", "65", "--timeline"], 2, "--timeline is for one pool of at most 64"),
        (["log", "--blocks", "9", "--timeline", "--replicas", "2"], 2, "--timeline is about one"),
        (["log", "--blocks", "9", "--concurrency", "2", "--arrivals", "clock"], 2, "--concurrency"),
        (["log", "--blocks", "9", "--group", "full:8", "--block-size", "8"], 2, "--group and --b"),
        (["log", "--blocks", "9", "--group", "odd:8"], 2, "--group 'odd:8' is no KV cache group"),
        (["log", "--blocks", "9", "--arrivals", "clock"], 3, "request p0 has no time of arrival"),
        (["log", "--blocks", "9", "--arrivals", "step"], 3, "request p0 has no arrival_step"),
        (["log", "--blocks", "9", "--step-ms", "9", "--arrivals", "step"], 2, "--step-ms is about"),
        (["log", "--blocks", "9", "--token-us", "0", "--concurrency", "2"], 2, "--token-us is a"),
        (["log", "--blocks", "9", "--route", "prefix-hash"], 2, "--route is about several replica"),
        (["run", "--max-tokens", "3"], 2, "--max-tokens is about JSON lines, and run is a run"),
        (
            ["log", "--blocks", "9", "--hash-tokens", "16", "--input-format", "openai"],
            2,
            "--hash-tokens is about --input-format hashes; leave it out",
        ),
        (["log", "--blocks", "9", "--tokenizer", "./nope"], 3, "no tokenizer in ./nope: there is"),
        (["log", "--blocks", "2"], 3, "request p0 needs 3 blocks, and the pool has 2"),
        (["missing", "--blocks", "2"], 3, "cannot read missing: No such file or directory; name"),
    ],
)
def test_what_is_refused(
    arguments: list[str], code: int, message: str, simulate: Simulate, tmp_path: Path
) -> None:
    write_log(tmp_path / "log")
    recording().write(tmp_path / "run")
    ran = simulate(*arguments, "--quiet")
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith(f"omnicache: {message}")
    assert ran.err.count("\n") == 1


def test_a_run_without_the_engines_options_is_refused(simulate: Simulate, tmp_path: Path) -> None:
    two_rounds().write(tmp_path / "run")
    ran = simulate("run")
    assert ran.code == 3
    assert "the run does not tell" in ran.err


def test_without_vllm_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    path = write_log(tmp_path / "log")
    monkeypatch.setattr(sys, "argv", ["omnicache", "simulate", str(path), "--blocks", "9"])
    assert exit_code_of_run() == 4
    assert "vLLM is not installed, and the hasher and block pool are vLLM's" in (
        capsys.readouterr().err
    )


def test_the_scale_of_the_picture_ends_above_the_highest_bar() -> None:
    picture = plot([Bar(200, 0.31, 0.38, is_current=True), Bar(100, 0.12), Bar(50, None)])
    assert [label for label, _ in picture.rows] == [f"{4 * row} %" for row in range(10, 0, -1)]
    assert (picture.first_column, picture.last_column) == ("50 blocks", "200")
    assert [mark.name for mark in picture.marks] == [
        "upper bound",
        "hit rate",
        "hit rate, current size",
    ]
    heights = [sum(cells[column] is not None for _, cells in picture.rows) for column in (0, 9, 18)]
    assert heights == [0, 3, 10]


def test_names_of_requests_cannot_steer_a_terminal() -> None:
    setup = Setup((Size(9),), lists_requests=True)
    study = run_study([tokens("\x1b[31mred", range(9))], setup, FakePool)
    subject = Subject("log\x1b[2J", "prompts", 16, ("full:16",))
    from omnicache_cli.report.text import as_text

    assert "\x1b" not in as_text(study_report(study, setup, subject))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--blocks", "999999999999999"),
            "999999999999999 blocks are more than the 10000000 that are simulated; give fewer, or "
            "larger ones with --block-size",
        ),
        (
            ("--blocks", "100000", "--replicas", 200),
            "100000 blocks in each of 200 replicas are more than the 10000000 that are simulated; "
            "give fewer, or larger ones with --block-size",
        ),
        (
            ("--blocks", "5,,6"),
            "--blocks '': write numbers of blocks from 1, such as 1000,2000",
        ),
        (
            ("--blocks", 6, "--max-num-seqs", 300, "--max-num-batched-tokens", 8),
            "--max-num-seqs 300 is more than 8 batched tokens a step; lower it, or raise "
            "--max-num-batched-tokens",
        ),
        (
            ("--blocks", 6, "--hash-algo", "nope"),
            "--hash-algo 'nope': choose sha256, sha256_cbor, xxhash, xxhash_cbor",
        ),
        (
            ("--kv-memory", "-1GiB", "--model", "nowhere"),
            "--kv-memory '-1GiB' is no amount of memory; write it like 16.87GiB",
        ),
    ],
)
def test_what_cannot_be_simulated_is_said_before_anything_is_imported(
    options: tuple[object, ...], said: str, simulate: Simulate, tmp_path: Path
) -> None:
    write_log(tmp_path / "log.jsonl")
    ran = simulate("log.jsonl", *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"omnicache: {said}\n"


def test_a_small_budget_of_a_step_has_room_for_as_many_requests(
    simulate: Simulate, tmp_path: Path
) -> None:
    """As vLLM wants it: it refuses a budget below max_num_seqs."""
    write_log(tmp_path / "log.jsonl")
    ran = simulate("log.jsonl", "--blocks", 8, "--max-num-batched-tokens", 128, "--quiet")
    assert (ran.code, ran.err) == (0, "")
    assert {(one.max_num_batched_tokens, one.max_num_seqs) for one in PLANS} == {(128, 128)}
