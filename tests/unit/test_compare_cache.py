"""The prefix cache on and off: neighbours are compared, and the spread decides what may be said."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.cli.profile_compare import compare_cache
from omnicache_cli.errors import BadTraceError
from omnicache_cli.profile.compare import Comparison, Repetition, RunTimes, Side, compare
from omnicache_cli.profile.compare_report import compare_data, compare_report, sentence
from omnicache_cli.report.text import as_text
from omnicache_cli.trace.records import SchedulerStep
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.workload import Prompt, Workload
from tests.unit.run_builder import Admit, Recording
from tests.unit.test_phases import timed

MS = 1_000_000


def side(*wall_ms: int, first_ms: tuple[int, ...] = (), hits: int = 0) -> Side:
    runs = []
    for index, wall in enumerate(wall_ms):
        one = RunTimes(wall * MS, 100, queried_tokens=80, hit_tokens=hits)
        if first_ms:
            one.first_token_ns = [first_ms[index] * MS]
        runs.append(one)
    return Side(runs, None, None)


@pytest.mark.parametrize(
    ("on", "off", "verdict", "words"),
    [
        (
            side(50, 60, 70, first_ms=(1, 1, 1)),
            side(100, 100, 100, first_ms=(4, 4, 4)),
            "pays-off",
            "the prefix cache pays off here: a run takes 0.6 (0.5 .. 0.7) of its time without, the "
            "first token comes after 0.25 (0.25 .. 0.25) of its time without",
        ),
        (
            side(50, 130, 70, first_ms=(1, 1, 1)),
            side(100, 100, 100, first_ms=(4, 4, 4)),
            "pays-off",
            "the prefix cache pays off here: a run takes 0.7 (0.5 .. 1.3: undecided) of its time "
            "without, the first token comes after 0.25 (0.25 .. 0.25) of its time without",
        ),
        (
            side(102, 103, 101, first_ms=(9, 10, 11)),
            side(100, 100, 100, first_ms=(10, 10, 10)),
            "costs",
            "the prefix cache costs more than it gains here: a run takes 1.02 (1.01 .. 1.03) of "
            "its time without, the first token comes after 1 (0.9 .. 1.1: undecided) of its time "
            "without",
        ),
        (
            side(5000, 9999, 7000),
            side(10_000, 10_000, 10_000),
            "pays-off",
            "the prefix cache pays off here: a run takes 0.7 (0.5 .. 0.9999) of its time without",
        ),
        (
            side(90, 101, 95),
            side(100, 100, 100),
            "no-difference",
            "the spread covers the difference; more pairs, or longer runs, may tell: a run takes "
            "0.95 (0.9 .. 1.01: undecided) of its time without",
        ),
        (
            side(102, 103, 101, first_ms=(5, 5, 5)),
            side(100, 100, 100, first_ms=(10, 10, 10)),
            "mixed",
            "the prefix cache gains one thing and costs another: a run takes 1.02 (1.01 .. 1.03) "
            "of its time without, the first token comes after 0.5 (0.5 .. 0.5) of its time without",
        ),
    ],
)
def test_the_verdict_is_what_all_pairs_say(on: Side, off: Side, verdict: str, words: str) -> None:
    comparison = Comparison(on, off)
    assert (comparison.verdict, sentence(comparison)) == (verdict, words)


def test_a_machine_that_slows_down_changes_no_ratio() -> None:
    """Every pair is twice as slow as the one before: neighbours are compared, not medians."""
    comparison = Comparison(side(50, 100, 200, 400), side(100, 200, 400, 800))
    assert (comparison.wall.lowest, comparison.wall.median, comparison.wall.highest) == (0.5,) * 3


def test_of_many_pairs_a_twentieth_at_each_end_is_left_out() -> None:
    on, off = side(2, 3, *[80] * 36, 300, 400), side(*[100] * 40)
    assert (Comparison(on, off).wall.lowest, Comparison(on, off).wall.highest) == (0.8, 0.8)
    on, off = side(3, *[80] * 17, 300), side(*[100] * 19)
    assert (Comparison(on, off).wall.lowest, Comparison(on, off).wall.highest) == (0.03, 3.0)


ON, OFF = "host.1.0", "host.2.0"


def recorded(engine: str, *, caching: bool, repetitions: int = 4) -> Recording:
    """Two requests of 40 tokens, one after the other, in every repetition; of the second one 32
    tokens hit. A first step lasts 4.2 ms, and less for a hit."""
    recording = Recording(engine=engine, enable_prefix_caching=caching, num_blocks=64)
    for _ in range(repetitions):
        for again in (False, True):
            hit = 32 if again and caching else 0
            at = recording.next_step * 10 * MS
            number = recording.arrive(f"p{again:d}", 40, arrival_ns=at - MS, hash_ns=500_000)
            recording.step({number: 40 - hit}, admit={number: Admit([[1, 2, 3]], hit=hit)})
            timed(recording, recording.next_step - 1, whole_ns=3_200_000 if hit else 4_200_000)
            recording.step({number: 1})
            timed(recording, recording.next_step - 1)
            recording.finish(number, 2)
    recording.change(SchedulerStep, 5, num_free_blocks=20)
    return recording


@pytest.fixture
def run(tmp_path: Path) -> Run:
    recorded(ON, caching=True).write(tmp_path / "run", name="host.1")
    recorded(OFF, caching=False).write(tmp_path / "run", name="host.2")
    return Run(tmp_path / "run")


REPETITIONS = [
    Repetition(caching, wall * MS, 84, host_bytes=5 << 20 if caching else None)
    for caching, wall in [
        *((True, 900), (False, 900)),  # to warm up
        *((False, 100), (True, 50)),
        *((True, 60), (False, 100)),
        *((False, 100), (True, 55)),
    ]
]


def test_a_trace_is_joined_with_the_runs_that_it_is_of(run: Run) -> None:
    comparison = compare(run, REPETITIONS, 2)
    assert comparison.num_pairs == 3
    on, off = comparison.on.runs[0], comparison.off.runs[0]
    assert [one.wall_ns for one in comparison.on.runs] == [50 * MS, 60 * MS, 55 * MS]
    assert (on.queried_tokens, on.hit_tokens, off.hit_tokens) == (80, 32, 0)
    assert on.first_token_ns == [5_700_000, 4_700_000]  # 1 ms waiting and 0.5 ms of hashing before
    assert off.first_token_ns == [5_700_000, 5_700_000]
    assert (on.steps_ns, off.steps_ns) == (15_800_000, 16_800_000)
    assert (on.num_steps, on.num_tokens, on.tokens_per_second) == (4, 84, 1680.0)
    assert on.phases_ns["forward"] == 8 * MS
    assert on.phases_ns["lookup"] == 80_000
    assert (on.peak_blocks, comparison.on.runs[1].peak_blocks) == (43, 34)
    assert comparison.hit_rate == 0.4
    assert (comparison.on.host_bytes, comparison.off.host_bytes) == (5 << 20, None)
    assert comparison.verdict == "pays-off"


def test_the_report_says_it_in_words_and_numbers(run: Run) -> None:
    comparison = compare(run, REPETITIONS, 2)
    text = as_text(compare_report(comparison, {"model": "tiny"}, vllm_version="0.30.0"))
    lines = text.splitlines()
    assert lines[:4] == [
        "The prefix cache on and off",
        "model  tiny",
        "pairs  3",
        "hits   40.0 % of the queried tokens with caching on",
    ]
    assert (
        "run, ms                             55          100             0.55  0.5 .. 0.6" in lines
    )
    assert (
        "first token, median, ms            5.2          5.7            0.912  0.912 .. 0.912"
        in lines
    )
    assert "of one run of the workload  caching on  caching off  pairs' on / off  spread" in lines
    end = lines.index("Memory and copies") - 1
    assert " ".join(lines[end - 2 : end]).strip() == (
        "pairs' on / off: the median of the ratios within the pairs of neighbouring runs, and "
        "their spread; it is not the quotient of the two medians beside it"
    )
    memory = lines[lines.index("Memory and copies") :]
    assert memory[2:] == [
        "blocks of the pool in use, at most          43           43",
        "the same, MiB on each rank                   -            -",
        "tensor cache on the host, MiB                5            -",
        "its share of the time of the steps           -            -",
    ]
    data: dict[str, Any] = compare_data(comparison)
    assert data["verdict"] == "pays-off"
    assert data["ratios"]["run"] == {"median": 0.55, "lowest": 0.5, "highest": 0.6}
    assert data["on"]["runs"][0]["tensor_share"] is None
    assert "save" not in data["on"]["runs"][0]["phases_ns"]


def test_a_workload_in_which_nothing_hits_is_told(run: Run) -> None:
    comparison = Comparison(side(50, 50, 50), side(100, 100, 100))
    text = as_text(compare_report(comparison, {}, vllm_version=None))
    assert "nothing hit: this workload has no prefix twice that fills a block" in text


@pytest.mark.parametrize(
    ("repetitions", "what"),
    [
        (REPETITIONS[:6], "a repetition 3"),
        ([*REPETITIONS, Repetition(True, 1, 1)], "no steps of one of the engines"),
    ],
)
def test_a_trace_of_other_runs_is_refused(
    repetitions: list[Repetition], what: str, run: Run
) -> None:
    with pytest.raises(BadTraceError, match=what):
        compare(run, repetitions, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to compare; name a model folder, or a hub id"),
        (("--pid", "1"), "--pid cannot be combined with --compare-cache; leave it out"),
        (("--native",), "--native cannot be combined with --compare-cache; leave it out"),
        (("--", "true"), "--compare-cache starts two engines of its own; name a MODEL, no command"),
        (("M", "--pairs", "2", "--prompt", "a"), "2 pairs say nothing on a noisy machine"),
        (("M",), 'no prompt; give --prompt "TEXT" or --prompts FILE.jsonl'),
        (
            ("M", "--prompt", "a", "--stage", "thinker", "--engine-process"),
            "a stage runs in this process; leave out --engine-process or --stage",
        ),
        (
            ("M", "--prompt", "a", "--enable-prefix-caching"),
            "the cache is compared on and off; leave out enable_prefix_caching",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "M").mkdir()
    (tmp_path / "M" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["omnicache", "profile", "--compare-cache", *arguments])
    assert exit_code_of_run() == 2
    assert words in capsys.readouterr().err


def test_what_is_next_says_that_it_has_the_first_runs_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(options: Any, workload: Any, folder: Path, **given: Any) -> Any:
        shutil.copytree(run.folder, folder, dirs_exist_ok=True)
        return SimpleNamespace(repetitions=REPETITIONS, notes=[])

    monkeypatch.setitem(
        sys.modules, "omnicache_cli.engine.comparison", SimpleNamespace(run_in_turns=ran)
    )
    options = SimpleNamespace(vllm_version=lambda: "0.30.0")
    monkeypatch.setitem(sys.modules, "omnicache_cli.engine.options", options)
    monkeypatch.chdir(tmp_path)
    workload = Workload((Prompt("a", None), Prompt("b", None)))
    compare_cache(SimpleNamespace(model="tiny"), workload, pairs=3, run=Path("kept"))  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "the trace has the run that warmed up each engine too, which is left out here",
        "next: omnicache show kept --phases",
    ]
