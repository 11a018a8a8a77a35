"""A real engine, traced: what the files say is what the engine did."""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from omnicache_cli.engine.environment import Recording
from omnicache_cli.engine.launch import Engine, Outcome
from omnicache_cli.engine.options import EngineOptions
from omnicache_cli.engine.tracing import trace_workload, tracing
from omnicache_cli.trace.invariants import ONLY_WHERE_ASKED, InvariantChecker
from omnicache_cli.trace.records import Evicted, Preempted
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Step
from omnicache_cli.trace.summary import summarize
from omnicache_cli.trace.workload import Prompt, Workload
from tests.engine.live import live_steps

SCHEMA = Path(__file__).parents[2] / "docs" / "trace.schema.json"
SALT = "the-salt-nobody-may-read"
TEXT = "a prompt nobody may read "

ARGS = {
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 33,  # fewer than the workload wants: evictions and preemptions
    "disable_log_stats": False,
}
"""Chunked prefill, and a pool that is too small for what runs at once."""


def ids(seed: int, length: int) -> list[int]:
    return [10 + (seed * 7 + index * 3) % 200 for index in range(length)]


PROMPTS = (
    Prompt(None, ids(0, 300)),
    Prompt(None, ids(1, 300)),
    Prompt(None, ids(2, 290)),
    Prompt(None, ids(0, 200)),
    Prompt(None, ids(3, 33)),
    Prompt(TEXT * 8, None, cache_salt=SALT),
)
WORKLOAD = Workload(PROMPTS, num_rounds=2, concurrency=4, max_tokens=40, ignore_eos=True)


class Traced:
    """One traced workload and what the engine itself said about it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        options = EngineOptions(str(model), ARGS)
        recorded = tracing(folder, Recording(check_hashes=True))
        with recorded, live_steps() as self.live, Engine(options) as engine:
            before = counters(engine)
            self.outcomes = engine.run(WORKLOAD)
            after = counters(engine)
        self.counted = {name: after[name] - before[name] for name in after}
        self.steps = list(Run(folder).steps())


def counters(engine: Engine) -> dict[str, int]:
    """vLLM's own counters; the registry is one for the process, so only differences count."""
    names = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
    values = {metric.name: getattr(metric, "value", None) for metric in engine.metrics()}
    return {name: int(values.get(f"vllm:{name}") or 0) for name in names}


@pytest.fixture(scope="module")
def traced(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return Traced(tiny_text_model, tmp_path_factory.mktemp("traced") / "run")


def test_every_step_of_the_engine_is_recorded_with_its_forward_pass(traced: Traced) -> None:
    assert [step.number for step in traced.steps] == list(range(len(traced.live)))
    assert all(len(step.forwards) == 1 for step in traced.steps)


def test_rebuilt_metadata_equals_the_live_tensors_in_every_step(traced: Traced) -> None:
    for step, live in zip(traced.steps, traced.live, strict=True):
        (forward,) = step.forwards
        assert forward.request_ids == live.request_ids
        assert len(forward.groups) == len(live.groups) == 1
        for group, real in zip(forward.groups, live.groups, strict=True):
            rebuilt = {
                "num_actual_tokens": group.num_actual_tokens,
                "max_query_len": group.max_query_len,
                "max_seq_len": group.max_seq_len,
                "query_start_loc": group.query_start_loc,
                "seq_lens": group.seq_lens,
                "slot_mapping": group.slot_mapping,
                "block_table": list(group.block_table),
                "table_shape": group.record.table_shape,
                "causal": group.record.causal,
            }
            assert rebuilt == real


def test_the_run_has_chunks_batches_evictions_preemptions_and_resumes(traced: Traced) -> None:
    """Otherwise the tests around this one prove less than they say."""
    events = [event for step in traced.steps for event in step.record.events]
    assert any(isinstance(event, Evicted) for event in events)
    assert any(isinstance(event, Preempted) for event in events)
    assert any(one.resumed for step in traced.steps for one in step.scheduled)
    assert any(len(step.scheduled) > 2 for step in traced.steps)
    assert any(is_later_chunk(step) for step in traced.steps)


def is_later_chunk(step: Step) -> bool:
    return any(
        one.hit_tokens is None
        and one.num_computed_tokens + one.num_scheduled_tokens
        <= one.request.record.num_prompt_tokens
        for one in step.scheduled
    )


def test_hit_and_query_totals_equal_vllms_own_counters(traced: Traced) -> None:
    summary = summarize(Run(traced.folder))
    assert {
        "prefix_cache_queries": summary.queried_tokens,
        "prefix_cache_hits": summary.hit_tokens,
        "num_preemptions": summary.preemptions,
    } == traced.counted
    assert summary.hit_tokens > 0


def test_hit_tokens_of_each_request_equal_what_vllm_reports_to_the_client(traced: Traced) -> None:
    recorded = {
        one.request.external_id: one.hit_tokens
        for step in traced.steps
        for one in step.scheduled
        if one.hit_tokens is not None and not one.resumed
    }
    reported = {outcome.request_id: outcome.num_cached_tokens for outcome in traced.outcomes}
    assert recorded == reported


def test_all_invariants_hold_and_were_really_checked(traced: Traced) -> None:
    checker = InvariantChecker()
    summary = summarize(Run(traced.folder), checker=checker)
    assert (summary.broken_invariants, checker.unchecked()) == (0, {})
    checked = {number for number, one in checker.coverage.items() if one.checked}
    assert checked == set(checker.coverage) - ONLY_WHERE_ASKED | {8}


def test_tokens_with_tracing_equal_tokens_without(traced: Traced, tiny_text_model: Path) -> None:
    with Engine(EngineOptions(str(tiny_text_model), ARGS)) as engine:
        plain = engine.run(WORKLOAD)
    assert tokens(plain) == tokens(traced.outcomes)


def tokens(outcomes: list[Outcome]) -> dict[str, tuple[int, ...]]:
    return {outcome.request_id: outcome.token_ids for outcome in outcomes}


def test_every_line_follows_the_published_schema(traced: Traced) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    kinds = set()
    for line in lines_of(traced.folder):
        record = json.loads(line)
        kinds.add(record["type"])
        validator.validate(record)
    expected = {"header", "engine", "worker", "request", "schedule", "forward", "after", "end"}
    assert kinds == expected


def lines_of(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.trace.jsonl")):
        yield from path.read_text().splitlines()


def test_files_hold_no_prompt_text_no_salt_and_no_tokens(traced: Traced) -> None:
    for path in traced.folder.iterdir():
        content = path.read_text()
        assert SALT not in content
        assert TEXT.strip() not in content
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    requests = [json.loads(line) for line in lines_of(traced.folder) if '"request_id"' in line]
    assert all("token_ids" not in one for one in requests)
    salted = [one for one in requests if "cache_salt" in one]
    assert [one["request_id"].rpartition("-")[0] for one in salted] == ["p5-r1", "p5-r2"]
    assert len({one["cache_salt"] for one in salted}) == 1
    assert salted[0]["extra_keys"] == [[0, [f"salt:{salted[0]['cache_salt']}"]]]


def damaged(traced: Traced, folder: Path, damage: Callable[[dict[str, Any]], bool]) -> Path:
    """The same run with one record changed, as a broken engine would have written it."""
    folder.mkdir()
    done = False
    for path in traced.folder.glob("*.trace.jsonl"):
        lines = []
        for line in path.read_text().splitlines():
            record = json.loads(line)
            done = done or damage(record)
            lines.append(json.dumps(record))
        (folder / path.name).write_text("\n".join(lines) + "\n")
    assert done, "the run has no record to damage"
    return folder


def first_group(record: dict[str, Any], num_reqs: int = 2) -> dict[str, Any] | None:
    """Metadata of a forward pass of at least two requests that decode."""
    if record["type"] != "forward" or record["num_reqs"] < num_reqs:
        return None
    group: dict[str, Any] = record["groups"][0]
    return group if group["max_query_len"] == 1 else None


def one_slot_off(record: dict[str, Any]) -> bool:
    group = first_group(record)
    if group is not None:
        group["slots"][0] += 1
    return group is not None


def a_real_row_is_padding(record: dict[str, Any]) -> bool:
    group = first_group(record)
    if group is not None:
        group["slots"].pop()
        group["num_slot_padding"] = 1
    return group is not None


def two_rows_write_one_slot(record: dict[str, Any]) -> bool:
    group = first_group(record)
    if group is not None:
        group["slots"][1] = group["slots"][0]
    return group is not None


def one_row_more_than_requests(record: dict[str, Any]) -> bool:
    group = first_group(record)
    if group is not None:
        group["table_shape"][0] += 1
    return group is not None


def the_prefill_writes_elsewhere(record: dict[str, Any]) -> bool:
    if record["type"] != "forward" or record["step"] != 0:
        return False
    record["groups"][0]["slot_mapping"] = []
    record["groups"][0]["num_slot_padding"] = record["groups"][0]["num_actual_tokens"]
    return True


def a_common_prefix_too_many(record: dict[str, Any]) -> bool:
    if record["type"] != "schedule" or record["num_running"] < 2:
        return False
    record["num_common_prefix_blocks"] = [record.get("num_common_prefix_blocks", [0])[0] + 1]
    return True


def a_hit_of_the_last_token(record: dict[str, Any]) -> bool:
    admission = next(iter(record.get("admitted", ())), None)
    if admission is None or not admission["hit_tokens"]:
        return False
    admission["hit_tokens"] += 1
    return True


def a_block_table_names_another_block(record: dict[str, Any]) -> bool:
    if record["type"] != "forward" or not record["groups"][0].get("block_table"):
        return False
    runs = record["groups"][0]["block_table"][0][2]
    runs[-1] -= 1
    if not runs[-1]:
        del runs[-2:]
    runs += [32, 1]
    return True


@pytest.mark.parametrize(
    ("number", "damage"),
    [
        (1, one_slot_off),
        (2, a_real_row_is_padding),
        (3, two_rows_write_one_slot),
        (4, one_row_more_than_requests),
        (5, a_common_prefix_too_many),
        (6, the_prefill_writes_elsewhere),
        (7, a_hit_of_the_last_token),
        (12, a_block_table_names_another_block),
    ],
)
def test_a_damaged_run_breaks_the_invariant_that_names_the_damage(
    traced: Traced, tmp_path: Path, number: int, damage: Callable[[dict[str, Any]], bool]
) -> None:
    checker = InvariantChecker()
    run = Run(damaged(traced, tmp_path / "damaged", damage))
    broken = [one for step in run.steps() for one in checker.check(step)]
    assert number in {one.invariant for one in broken}


def test_a_prompt_with_an_arrival_step_reaches_the_scheduler_before_that_step(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    workload = Workload(
        (
            Prompt(None, ids(0, 40), arrival_step=0),
            Prompt(None, ids(1, 40), arrival_step=3),
            Prompt(None, ids(2, 40), arrival_step=3),
            Prompt(None, ids(3, 40), arrival_step=100),  # the engine is idle before: at once
        ),
        max_tokens=8,
        ignore_eos=True,
    )
    args = {**ARGS, "num_gpu_blocks_override": 65}
    trace_workload(EngineOptions(str(tiny_text_model), args), workload, tmp_path / "run")
    admitted = {
        one.request.external_id: step.number
        for step in Run(tmp_path / "run").steps()
        for one in step.scheduled
        if one.hit_tokens is not None
    }
    assert admitted == {"p0": 0, "p1": 3, "p2": 3, "p3": 11}


def test_with_the_cache_off_nothing_is_queried(tiny_text_model: Path, tmp_path: Path) -> None:
    args = {**ARGS, "enable_prefix_caching": False}
    workload = Workload((Prompt(None, ids(0, 100)),), num_rounds=2, max_tokens=2)
    trace_workload(EngineOptions(str(tiny_text_model), args), workload, tmp_path / "run")
    run = Run(tmp_path / "run")
    summary = summarize(run, checker=InvariantChecker())
    assert (summary.queried_tokens, summary.hit_tokens, summary.kv_cache_hit_rate) == (0, 0, None)
    assert summary.broken_invariants == 0
    (engine,) = run.engines.values()
    assert engine.enable_prefix_caching is False


def test_an_image_is_recorded_by_its_span_and_hash_and_hits_the_second_time(
    tiny_image_model: Path, tmp_path: Path
) -> None:
    from omnicache_cli.engine.tiny_images import write_test_image

    picture, other = tmp_path / "a.png", tmp_path / "b.png"
    write_test_image(picture, width=336, height=224, seed=0)
    write_test_image(other, width=336, height=224, seed=1)
    text = "<|vision_start|><|image_pad|><|vision_end|>Describe."
    workload = Workload(
        (Prompt(text, None, (picture,)), Prompt(text, None, (other,))), num_rounds=2, max_tokens=2
    )
    args = {**ARGS, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    trace_workload(EngineOptions(str(tiny_image_model), args), workload, tmp_path / "run")
    steps = list(Run(tmp_path / "run").steps())
    admitted = {
        one.request.external_id: (one.hit_tokens, one.request.record)
        for step in steps
        for one in step.scheduled
        if one.hit_tokens is not None
    }
    assert {name: hit for name, (hit, _) in admitted.items()} == {
        "p0-r1": 0,
        "p1-r1": 0,
        "p0-r2": 96,
        "p1-r2": 96,
    }
    spans = {name: record.multimodal for name, (_, record) in admitted.items()}
    assert [(one.modality, one.offset, one.length) for one in spans["p0-r1"]] == [("image", 1, 96)]
    assert spans["p0-r1"] == spans["p0-r2"] != spans["p1-r1"]
    image_hash = spans["p0-r1"][0].hash
    assert admitted["p0-r1"][1].extra_keys[0] == (0, [f"mm:{image_hash}@1"])
    encoded = [step.record.scheduled_encoder_inputs for step in steps]
    assert encoded[0] == [(0, [0])]
    summary = summarize(Run(tmp_path / "run"), checker=InvariantChecker())
    assert summary.broken_invariants == 0
    assert summary.modal_cache_ratio == {"image": 190 / 192, "text": 2 / 192}


@pytest.fixture(scope="module")
def lost_at(
    tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[Path, int, list[Outcome]]]:
    """Runs a small workload again and again on one engine, each time losing one more record."""
    from omnicache_cli.trace.writer import RankFileWriter

    options = EngineOptions(str(tiny_text_model), {**ARGS, "num_gpu_blocks_override": 65})
    workload = Workload(
        tuple(Prompt(None, ids(seed, 40 + seed), max_tokens=2 + seed) for seed in range(3)),
        concurrency=2,
        ignore_eos=True,
    )
    append = RankFileWriter._append

    def run(number: int) -> tuple[Path, int, list[Outcome]]:
        """The run folder, and how often a record was to be written; record `number` fails."""
        folder = tmp_path_factory.mktemp("lost") / "run"
        folder.mkdir()
        calls = 0

        def failing(self: Any, record: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                raise OSError(28, "No space left on device")
            append(self, record)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankFileWriter, "_append", failing)
            with tracing(folder), Engine(options) as engine:
                outcomes = engine.run(workload)
        return folder, calls, outcomes

    return run


def test_whichever_record_is_lost_the_rest_stays_readable(lost_at: Any) -> None:
    folder, total, sound = lost_at(0)
    whole = summarize(Run(folder)).num_steps
    assert total > 15
    for number in range(2, total):  # the first is the header: without it there is no file
        folder, _, outcomes = lost_at(number)
        assert tokens(outcomes) == tokens(sound), number
        run = Run(folder)
        summary = summarize(run, checker=InvariantChecker())
        assert summary.broken_invariants == 0, number
        assert summary.dropped_records >= 1, number
        assert summary.num_steps >= whole - 2, number


def test_a_session_that_replaces_a_token_caches_its_block_under_a_stale_hash(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    """A known fault of vLLM 0.30 (vllm#49377): the next part of a streaming-input session takes
    the place of the last sampled token, whose hash stays."""
    from vllm import SamplingParams

    (tmp_path / "run").mkdir()
    with (
        tracing(tmp_path / "run", Recording(check_hashes=True)),
        Engine(EngineOptions(str(tiny_text_model), ROOMY)) as engine,
    ):
        llm = engine._engine

        def send(part: list[int], *, more: bool) -> None:
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            prompt = {"type": "token", "prompt_token_ids": part}
            request = llm.input_processor.process_inputs(
                "session", prompt, params, supported_tasks=("generate",), resumable=more
            )
            request.external_req_id = "session"
            core = llm.engine_core.engine_core
            core.add_request(*core.preprocess_add_request(request))
            for _ in range(3):
                core.step_fn()

        send(ids(0, 31), more=True)  # the token sampled behind them completes block 0
        send(ids(1, 40), more=True)  # and is replaced
        send(ids(2, 5), more=False)
    checker = InvariantChecker()
    run = Run(tmp_path / "run")
    found = [one for step in run.steps() for one in checker.check(step)]
    assert [(one.invariant, one.request, one.what) for one in found] == [
        (8, "session", "hash of block 1, entry 0 of the request")
    ]
    assert checker.coverage[8].checked == 2
    assert summarize(Run(tmp_path / "run")).num_arrived == 1  # its last word is no new request


def test_vllm_omni_takes_part_when_its_plugin_is_named(traced: Traced) -> None:
    (file,) = Run(traced.folder).files
    named = "vllm_omni_register_models" in os.environ["VLLM_PLUGINS"]
    assert ("vllm_omni" in file.header.versions) == named


def test_every_hook_point_is_there_and_no_probe_failed(traced: Traced) -> None:
    (file,) = Run(traced.folder).files
    summary = summarize(Run(traced.folder))
    assert file.header.vllm_version is not None
    assert summary.probe_errors == {}


ROOMY = {**ARGS, "num_gpu_blocks_override": 65}
SHORT = Workload(
    tuple(Prompt(None, ids(seed, 50)) for seed in range(3)), max_tokens=4, ignore_eos=True
)


def plain_tokens(model: Path) -> dict[str, tuple[int, ...]]:
    with Engine(EngineOptions(str(model), ROOMY)) as engine:
        return tokens(engine.run(SHORT))


@pytest.mark.parametrize(
    ("probe", "method", "hook"),
    [
        ("runner.RunnerProbe", "forward", "GPUModelRunner._model_forward"),
        ("scheduler.SchedulerProbe", "step", "Scheduler.schedule"),
        ("scheduler.SchedulerProbe", "cache", "BlockPool.cache_full_blocks"),
        ("scheduler.SchedulerProbe", "add_request", "Scheduler.add_request"),
    ],
)
def test_an_error_inside_a_probe_is_counted_and_never_reaches_the_engine(
    tiny_text_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    probe: str,
    method: str,
    hook: str,
) -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(f"omnicache_cli.engine.probe.{probe}.{method}", failing)
    (tmp_path / "run").mkdir()
    with tracing(tmp_path / "run") as recording:
        with Engine(EngineOptions(str(tiny_text_model), ROOMY)) as engine:
            outcomes = engine.run(SHORT)
        assert recording.errors[hook] > 0
    monkeypatch.undo()
    assert tokens(outcomes) == plain_tokens(tiny_text_model)


def test_the_engine_goes_on_when_the_run_folder_is_removed(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def remove(outcome: Outcome) -> None:
        if folder.is_dir():
            shutil.rmtree(folder)

    with tracing(folder) as recording, Engine(EngineOptions(str(tiny_text_model), ROOMY)) as engine:
        outcomes = engine.run(SHORT, remove)
    assert tokens(outcomes) == plain_tokens(tiny_text_model)
    assert recording.dropped > 20


def test_the_engine_goes_on_when_the_run_folder_was_never_there(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    options = EngineOptions(str(tiny_text_model), ROOMY)
    with tracing(tmp_path / "none") as recording, Engine(options) as engine:
        outcomes = engine.run(SHORT)
    assert tokens(outcomes) == plain_tokens(tiny_text_model)
    assert recording.dropped > 20
    assert recording.errors["open"] > 0


def test_token_ids_are_recorded_when_they_are_asked_for(
    tiny_text_model: Path, tmp_path: Path
) -> None:
    options = EngineOptions(str(tiny_text_model), ROOMY)
    trace_workload(options, SHORT, tmp_path / "run", what=Recording(token_ids=True))
    recorded = [
        request.record.token_ids
        for step in Run(tmp_path / "run").steps()
        for request in step.arrived
    ]
    assert recorded == [prompt.token_ids for prompt in SHORT.prompts]
