"""Model Runner V2, for real but on a CPU (`v2_child` says how); nothing here ran on a GPU."""

import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omnicache_cli.trace.files import SUFFIX
from omnicache_cli.trace.invariants import ONLY_WHERE_ASKED, InvariantChecker
from omnicache_cli.trace.records import (
    COPIED,
    AnyRecord,
    Evicted,
    ForwardStep,
    GroupForward,
    Preempted,
    WorkerSource,
)
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import GroupView, Step
from omnicache_cli.trace.summary import summarize
from tests.engine.v2_child import LATE_SLOTS, LATE_TABLES, Told

SLOW = 600
"""Seconds for all scenarios; the interpreter of Triton takes 20 ms to prepare a step."""


class Ran:
    """The run folders of all scenarios and what the child process told of each."""

    def __init__(self, model: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.engine.v2_child", str(model), str(folder)]
        ran = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=SLOW,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        self._folder = folder
        told = (folder / "told.json").read_bytes()
        self.told = msgspec.json.decode(told, type=dict[str, Told])

    def folder(self, scenario: str) -> Path:
        return self._folder / scenario

    def steps(self, scenario: str) -> list[Step]:
        return list(Run(self.folder(scenario)).steps())


@pytest.fixture(scope="module")
def ran(tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tiny_text_model, tmp_path_factory.mktemp("v2"))


def rebuilt(group: GroupView) -> dict[str, Any]:
    table = group.block_table
    return {
        "num_actual_tokens": group.num_actual_tokens,
        "max_query_len": group.max_query_len,
        "max_seq_len": group.max_seq_len,
        "query_start_loc": group.query_start_loc,
        "seq_lens": group.seq_lens,
        "slot_mapping": group.slot_mapping,
        "block_table": None if table is None else list(table),
        "table_shape": list(group.record.table_shape or ()),
        "causal": group.record.causal,
    }


def check(folder: Path) -> InvariantChecker:
    checker = InvariantChecker()
    for step in Run(folder).steps():
        checker.check(step)
    return checker


def test_rebuilt_metadata_equals_what_the_model_saw_in_every_step(ran: Ran) -> None:
    steps, live = ran.steps("traced"), ran.told["traced"].steps
    assert [step.number for step in steps] == list(range(len(live)))
    for step, real in zip(steps, live, strict=True):
        (forward,) = step.forwards
        assert forward.request_ids == real.request_ids
        assert [rebuilt(group) for group in forward.groups] == real.groups


def test_the_run_has_chunks_batches_evictions_preemptions_and_resumes(ran: Ran) -> None:
    """Otherwise the tests around this one prove less than they say."""
    steps = ran.steps("traced")
    events = [event for step in steps for event in step.record.events]
    assert any(isinstance(event, Evicted) for event in events)
    assert any(isinstance(event, Preempted) for event in events)
    assert any(one.resumed for step in steps for one in step.scheduled)
    assert any(len(step.scheduled) > 2 for step in steps)
    orders = [
        (view.request_ids, [one.request.record.request_id for one in step.scheduled])
        for step in steps
        for view in step.forwards
    ]
    assert any(rows != scheduled for rows, scheduled in orders)  # V2 sorts its rows


def test_it_is_model_runner_v2_and_its_phases_were_timed(ran: Ran) -> None:
    run = Run(ran.folder("traced"))
    steps = list(run.steps())
    (worker,) = run.workers
    (engine,) = run.engines.values()
    assert worker.runner_class == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert engine.options["use_v2_model_runner"] is True
    assert (worker.kernel_block_sizes, worker.read_from) == ([32], {})
    assert worker.metadata_classes == ["CPUAttentionMetadata"]
    for step in steps:
        (forward,) = step.forwards
        record = forward.record
        assert min(record.prepare_ns, record.forward_ns, record.sample_ns or 0) > 0
        assert record.batch_descriptor is not None
        assert record.batch_descriptor.num_tokens == step.num_scheduled_tokens


def test_all_invariants_hold_and_everything_was_checked(ran: Ran) -> None:
    checker = check(ran.folder("traced"))
    assert checker.num_broken == 0
    assert not checker.unchecked()
    checked = {number for number, one in checker.coverage.items() if one.checked}
    assert checked == set(checker.coverage) - ONLY_WHERE_ASKED


def slot_off_by_one(group: GroupForward) -> GroupForward:
    slots = group.slots or []
    return msgspec.structs.replace(group, slots=[slots[0] + 1, *slots[1:]])


def one_token_more(group: GroupForward) -> GroupForward:
    return msgspec.structs.replace(group, num_actual_tokens=(group.num_actual_tokens or 0) + 1)


@pytest.mark.parametrize(("damage", "invariant"), [(slot_off_by_one, 1), (one_token_more, 4)])
def test_a_damaged_record_breaks_its_invariant(
    ran: Ran, tmp_path: Path, damage: Callable[[GroupForward], GroupForward], invariant: int
) -> None:
    shutil.copytree(ran.folder("traced"), tmp_path / "run")
    (path,) = (tmp_path / "run").glob(f"*{SUFFIX}")
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        record = msgspec.json.decode(line, type=AnyRecord)
        if isinstance(record, ForwardStep) and record.groups[0].slots:
            groups = [damage(record.groups[0])]
            damaged = msgspec.structs.replace(record, groups=groups)
            lines[number] = msgspec.json.encode(damaged) + b"\n"
            break
    path.write_bytes(b"".join(lines))
    assert check(tmp_path / "run").coverage[invariant].broken > 0


def test_tracing_does_not_change_the_tokens_and_no_probe_failed(ran: Ran) -> None:
    assert ran.told["traced"].tokens == ran.told["plain"].tokens
    assert ran.told["traced"].errors == {}
    assert summarize(Run(ran.folder("traced"))).probe_errors == {}
    assert list(ran.folder("plain").iterdir()) == []


def test_dummy_profiling_and_warm_up_runs_are_not_recorded(ran: Ran) -> None:
    told, steps = ran.told["dummies"], ran.steps("dummies")
    assert told.dummy_runs == 4  # two passes of the warm-up, a dummy run, a profiling run
    assert told.errors == {}
    assert [view.request_ids for step in steps for view in step.forwards] == [
        step.request_ids for step in told.steps
    ]
    run = Run(ran.folder("dummies"))
    assert summarize(run).unjoined_forwards == 0
    assert check(ran.folder("dummies")).num_broken == 0


def test_what_is_copied_from_a_device_is_right_or_said_to_be_unread(ran: Ran) -> None:
    """The probe takes all tensors for a device's; each n-th copy comes too late."""
    steps, live = ran.steps("on_device"), ran.told["on_device"].steps
    assert len(steps) == len(live)
    unread = {"slot_mapping": 0, "block_table": 0}
    for step, real in zip(steps, live, strict=True):
        (forward,) = step.forwards
        (group,) = forward.groups
        (wanted,) = real.groups
        found = rebuilt(group)
        for name, count in unread.items():
            if found[name] is None:
                unread[name] = count + 1
                wanted = {**wanted, name: None}
        assert found == wanted
    assert unread == {
        "slot_mapping": len(steps) // LATE_SLOTS,
        "block_table": len(steps) // LATE_TABLES,
    }
    assert ran.told["on_device"].tokens == ran.told["plain"].tokens


def test_the_worker_says_what_was_copied_and_the_check_counts_what_is_missing(ran: Ran) -> None:
    run = Run(ran.folder("on_device"))
    steps = list(run.steps())
    (worker,) = run.workers
    assert worker.read_from == {
        "block_table": COPIED,
        "query_start_loc": "InputBatch.query_start_loc_np",
        "seq_lens": "InputBatch.seq_lens_cpu_upper_bound",
        "slot_mapping": COPIED,
    }
    checker = check(ran.folder("on_device"))
    assert checker.num_broken == 0
    unread = [not_read(step) for step in steps]
    num_rows = [len(step.scheduled) for step in steps]
    reasons = checker.coverage[1].unchecked
    assert reasons["slot mapping not read"] == sum(
        rows for rows, (slots, _) in zip(num_rows, unread, strict=True) if slots
    )
    assert reasons["block table not read"] == sum(
        rows for rows, (slots, table) in zip(num_rows, unread, strict=True) if table and not slots
    )


def not_read(step: Step) -> tuple[bool, bool]:
    (forward,) = step.forwards
    (group,) = forward.groups
    return group.slot_mapping is None, group.block_table is None


def test_a_field_that_cannot_be_read_is_counted_and_never_raised(ran: Ran) -> None:
    told, steps = ran.told["failing"], ran.steps("failing")
    assert told.tokens == ran.told["dummies"].tokens
    assert told.errors == {"KVConnector.pre_forward": len(steps) // 3}
    assert sum(not step.forwards for step in steps) == len(steps) // 3
    assert check(ran.folder("failing")).num_broken == 0


def test_the_hooked_methods_and_arguments_are_those_of_this_vllm() -> None:
    from omnicache_cli.engine.probe import hooks_v2

    for module, classes in hooks_v2.HOOKS.items():
        __import__(module)
        for name, methods in classes.items():
            owner = getattr(sys.modules[module], name)
            assert methods.keys() - owner.__dict__.keys() == set(), name
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def arguments(method: str) -> list[str]:
        return list(inspect.signature(getattr(GPUModelRunner, method)).parameters)[1:]

    assert arguments("execute_model")[:3] == [
        "scheduler_output",
        "intermediate_tensors",
        "dummy_run",
    ]
    assert arguments("prepare_inputs")[2] == "batch_desc"
    assert arguments("prepare_attn") == ["input_batch"]


def test_a_worker_record_is_one_per_runner(ran: Ran) -> None:
    (path,) = ran.folder("dummies").glob(f"*{SUFFIX}")
    records = [msgspec.json.decode(line, type=AnyRecord) for line in path.read_bytes().splitlines()]
    assert sum(isinstance(one, WorkerSource) for one in records) == 1
