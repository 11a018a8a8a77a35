"""Every kind of cache on a real engine, traced: the promises that `test_trace` has for text."""

from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.engine.launch import Engine
from omnicache_cli.engine.options import EngineOptions
from omnicache_cli.prefix.explain import explain_run
from omnicache_cli.trace.invariants import ONLY_WHERE_ASKED, InvariantChecker
from omnicache_cli.trace.invariants.violation import NO_SLOTS
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import summarize
from tests.engine.kinds import KINDS, Case, Traced, case, tokens
from tests.engine.test_trace import damaged


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tiny_models: dict[str, Path]) -> Path:
    return tiny_models[kind]


@pytest.fixture(scope="module")
def sent(kind: str, model: Path) -> Case:
    return case(kind, model)


@pytest.fixture(scope="module")
def traced(model: Path, sent: Case, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return Traced(model, tmp_path_factory.mktemp("traced") / "run", sent)


def test_rebuilt_metadata_equals_the_live_tensors_in_every_step(traced: Traced) -> None:
    for step, live in zip(traced.steps, traced.live, strict=True):
        (forward,) = step.forwards
        assert forward.request_ids == live.request_ids
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


def test_rebuilt_tables_equal_the_schedulers_own_after_every_step(traced: Traced) -> None:
    """Windows and states free blocks of running requests, some of which others still hold."""
    for step, tables in zip(Run(traced.folder).steps(), traced.tables, strict=True):
        assert {one.record.request_id: one.block_ids for one in step.requests} == tables


def test_hit_and_query_totals_equal_vllms_own_counters(traced: Traced) -> None:
    summary = summarize(Run(traced.folder))
    assert {
        "prefix_cache_queries": summary.queried_tokens,
        "prefix_cache_hits": summary.hit_tokens,
        "num_preemptions": summary.preemptions,
    } == traced.counted


def test_hit_tokens_of_each_request_equal_what_vllm_reports_to_the_client(traced: Traced) -> None:
    recorded = {
        one.request.external_id: one.hit_tokens
        for step in traced.steps
        for one in step.scheduled
        if one.hit_tokens is not None and not one.resumed
    }
    reported = {outcome.request_id: outcome.num_cached_tokens for outcome in traced.outcomes}
    assert recorded == reported


def test_explain_gives_vllms_own_hit_for_every_request(traced: Traced) -> None:
    lookups = list(explain_run(Run(traced.folder), None))
    assert [one.predicted_tokens for one in lookups] == [one.hit_tokens for one in lookups]
    first = {one.external_id: one.hit_tokens or 0 for one in lookups if not one.resumed}
    assert first == {one.request_id: one.num_cached_tokens for one in traced.outcomes}
    assert "unknown" not in {one.reason.name for one in lookups}


def test_all_invariants_hold_and_were_checked_where_the_engine_has_what_they_need(
    traced: Traced,
) -> None:
    checker = InvariantChecker()
    run = Run(traced.folder)
    summary = summarize(run, checker=checker)
    (engine,) = run.engines.values()
    assert (summary.broken_invariants, summary.probe_errors) == (0, {})
    all_map = all(group.maps_slots for group in engine.groups)
    assert set(checker.unchecked()) == (set() if all_map else {NO_SLOTS})
    checked = {number for number, one in checker.coverage.items() if one.checked}
    several = {9} if len(engine.groups) > 1 else set()
    unasked = {5} if summary.hit_tokens else {5, 6}  # 5: only where requests share a prefix
    assert checked - {5} == set(checker.coverage) - ONLY_WHERE_ASKED - unasked | several


def test_every_group_tells_its_own_hit_and_the_shortest_one_counts(traced: Traced) -> None:
    run = Run(traced.folder)
    admissions = [one for step in run.steps() for one in step.record.admitted]
    (engine,) = run.engines.values()
    several = len(engine.groups) if engine.enable_prefix_caching and len(engine.groups) > 1 else 0
    assert {len(one.group_hit_tokens) for one in admissions} == {several}
    for one in admissions if several else []:
        assert one.hit_tokens <= min(one.group_hit_tokens)
    if several:
        assert any(one.hit_tokens == min(one.group_hit_tokens) > 0 for one in admissions)


def test_two_groups_in_one_buffer_break_the_invariant_that_names_it(
    traced: Traced, tmp_path: Path
) -> None:
    def in_one_buffer(record: dict[str, Any]) -> bool:
        if record["type"] != "forward" or len(record["groups"]) < 2:
            return False
        record["shared_buffers"] = [["block_table", 0, 1]]
        return True

    if len(traced.steps[0].engine.groups) < 2:
        with pytest.raises(AssertionError, match="no record to damage"):
            damaged(traced, tmp_path / "damaged", in_one_buffer)
        return
    run = Run(damaged(traced, tmp_path / "damaged", in_one_buffer))
    checker = InvariantChecker()
    broken = [one for step in run.steps() for one in checker.check(step)]
    assert [(one.invariant, one.group, one.found) for one in broken] == [
        (9, 1, "shared with group 0")
    ]


def test_the_run_has_hits_where_the_engine_caches_and_none_where_it_does_not(
    traced: Traced,
) -> None:
    """A CPU without AMX turns the cache off for latent attention: ask the engine, not the kind."""
    run = Run(traced.folder)
    summary = summarize(run)
    (engine,) = run.engines.values()
    assert (summary.hit_tokens > 0) == engine.enable_prefix_caching
    assert (summary.queried_tokens > 0) == engine.enable_prefix_caching


def test_tokens_with_tracing_equal_tokens_without(traced: Traced, model: Path, sent: Case) -> None:
    with Engine(EngineOptions(str(model), sent.args)) as engine:
        plain = engine.run(sent.workload)
    assert tokens(plain) == tokens(traced.outcomes)


def test_greedy_output_is_readable_and_depends_on_prompt_and_adapter(traced: Traced) -> None:
    outputs = tokens(traced.outcomes)
    assert len(set(outputs.values())) == len(outputs) / 2  # each prompt twice, the same both times
    assert all(0x20 <= token < 0x7F for output in outputs.values() for token in output)
    assert {len(output) for output in outputs.values()} == {40}


def test_every_view_of_the_run_is_shown(
    traced: Traced, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.engine.test_trace_command import omnicache

    run = Run(traced.folder)
    list(run.steps())
    (engine,) = run.engines.values()
    for view in ([], ["--step", "1"], ["--request", "p0-r1"], ["--check"], ["--summary"]):
        assert omnicache("show", traced.folder, *view, "--quiet") == 0, (kind, view)
    printed = capsys.readouterr().out
    for number, group in enumerate(engine.groups):
        assert f"KV cache group {number}: {group.spec}, block size {group.block_size}" in printed
