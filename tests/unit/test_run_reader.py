"""Reading a run folder: what a killed process leaves, what damage is, and what is no trace."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from omnicache_cli.errors import BadTraceError
from omnicache_cli.profile.manifest import read_profile_manifest
from omnicache_cli.trace.manifest import read_manifest
from omnicache_cli.trace.records import (
    AfterStep,
    EngineSource,
    Finished,
    ForwardStep,
    Gap,
    RequestRecord,
    SchedulerStep,
    WorkerSource,
    from_runs,
    to_runs,
)
from omnicache_cli.trace.run import Run
from tests.unit.run_builder import Admit, Recording, header, two_rounds, write_manifest


def rank_file(folder: Path) -> Path:
    (path,) = folder.glob("*.trace.jsonl")
    return path


def steps(folder: Path) -> list[int]:
    return [step.number for step in Run(folder).steps()]


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    run = Run(two_rounds().write(tmp_path))

    assert [step.number for step in run.steps()] == [0, 1, 2, 3, 4]
    assert run.files[0].end is not None
    assert run.vllm_version == "0.30.0"
    assert run.dropped == 0


def test_the_tensors_of_a_step_are_rebuilt_in_full(tmp_path: Path) -> None:
    step = list(Run(two_rounds().write(tmp_path)).steps())[3]
    group = step.forwards[0].groups[0]

    assert step.scheduled[0].hit_tokens == 32
    assert group.num_actual_tokens == 8
    assert group.query_start_loc == [0, 8]
    assert group.seq_lens == [40]
    assert group.slot_mapping == list(range(64, 72))
    assert group.block_table == ([1, 2, 4],)


def test_a_killed_process_keeps_every_finished_step(tmp_path: Path) -> None:
    path = rank_file(two_rounds().write(tmp_path, is_finished=False))
    path.write_bytes(path.read_bytes()[:-30])

    run = Run(tmp_path)

    assert [step.number for step in run.steps()] == [0, 1, 2, 3, 4]
    assert run.files[0].end is None


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_last_line_cut_anywhere_is_dropped(cut: int, tmp_path: Path) -> None:
    path = rank_file(two_rounds().write(tmp_path))
    path.write_bytes(path.read_bytes()[:-cut])

    assert steps(tmp_path)[:4] == [0, 1, 2, 3]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = rank_file(two_rounds().write(tmp_path))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b'"step":0', b'"step":"x"')
    path.write_bytes(b"".join(lines))

    with pytest.raises(BadTraceError) as caught:
        steps(tmp_path)

    assert str(caught.value).startswith(f"{path}:5: not a trace record (Expected `int`, got `str`")
    assert caught.value.exit_code == 3


def test_a_newer_schema_is_refused_by_its_number(tmp_path: Path) -> None:
    path = rank_file(two_rounds().write(tmp_path))
    lines = path.read_bytes().splitlines(keepends=True)
    newer = msgspec.json.encode(header(schema_version=2)).replace(b"{", b'{"new_field":1,', 1)
    path.write_bytes(b"".join([newer + b"\n", *lines[1:]]))

    with pytest.raises(BadTraceError) as caught:
        Run(tmp_path)

    assert str(caught.value) == (
        f"{path} has trace schema 2, this omnicache reads 1; use the omnicache that recorded it, "
        "or record the trace again"
    )


@pytest.mark.parametrize(
    "content", [b"hello\n", b"{}\n", b'{"type":"step"}\n', b"\xff\xfe\n", b"[[["]
)
def test_a_foreign_file_is_no_trace(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.trace.jsonl").write_bytes(content)

    with pytest.raises(BadTraceError, match=r"x\.trace\.jsonl"):
        Run(tmp_path)


def test_an_empty_folder_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(BadTraceError, match=r"is not a run folder: it holds no \*.trace.jsonl"):
        Run(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"error": "EngineFailedError"},
            r"holds no step: the run ended before its first one \(EngineFailedError\)",
        ),
        ({"error": None}, r"holds no step: the run ended before its first one; record it again"),
        (
            {"layout": "command", "program": "python"},
            r"holds no step: python started no traced vLLM engine; omnicache-cli must be",
        ),
        (
            {"layout": "command", "program": "python", "finished": True, "exit_code": 0},
            r"holds no step: python started no traced vLLM engine; omnicache-cli must be",
        ),
        *(
            (
                {"layout": "command", "program": "python", "finished": True, "exit_code": code},
                rf"holds no step: python ended with exit code {shown} before any engine was "
                r"traced; mend it, and record it again$",
            )
            for code, shown in ((1, 1), (-9, 137))
        ),
    ],
)
def test_a_run_without_a_step_says_how_it_ended(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_manifest(tmp_path, **changes)
    with pytest.raises(BadTraceError, match=message):
        Run(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BadTraceError, match="is not a run folder"):
        Run(tmp_path / "missing")


@pytest.mark.parametrize("kind", [EngineSource, WorkerSource, RequestRecord])
def test_a_record_of_something_undeclared_is_damage(kind: type, tmp_path: Path) -> None:
    recording = two_rounds()
    recording.records = [one for one in recording.records if not isinstance(one, kind)]

    with pytest.raises(BadTraceError, match="no record before it declares"):
        steps(recording.write(tmp_path))


def test_two_files_are_joined_by_step(tmp_path: Path) -> None:
    whole = two_rounds()
    workers, scheduler = Recording(), Recording()
    mine = (WorkerSource, ForwardStep)
    workers.records = [one for one in whole.records if isinstance(one, mine)]
    scheduler.records = [one for one in whole.records if not isinstance(one, mine)]
    workers.write(tmp_path, name="host.1")
    scheduler.write(tmp_path, name="host.2")

    found = list(Run(tmp_path).steps())

    assert [(step.number, len(step.forwards)) for step in found] == [(n, 1) for n in range(5)]


def test_what_follows_the_last_step_is_read(tmp_path: Path) -> None:
    recording = two_rounds()
    waiting = recording.arrive("late", 4)
    recording.after(Finished(waiting, "FINISHED_ABORTED", 0))
    run = Run(recording.write(tmp_path))

    last = list(run.steps())[-1]

    assert isinstance(last.after[-1], Finished)
    assert [(one.external_id, one.status) for one in run.never_scheduled] == [
        ("late", "FINISHED_ABORTED")
    ]


def test_a_finish_behind_the_next_arrival_belongs_to_the_step_before(tmp_path: Path) -> None:
    recording = Recording()
    a = recording.arrive("a", 4)
    recording.step({a: 4}, admit={a: Admit([[1]])})
    b = recording.arrive("b", 4)
    recording.finish(a)
    recording.step({b: 4}, admit={b: Admit([[2]])})

    first, second = Run(recording.write(tmp_path)).steps()

    assert [type(one) for one in first.after][:1] == [Finished]
    assert [one.external_id for one in second.arrived] == ["b"]


def test_after_lost_records_the_state_is_told_again(tmp_path: Path) -> None:
    recording = two_rounds()
    engine = next(one for one in recording.records if isinstance(one, EngineSource))
    request = [one for one in recording.records if isinstance(one, RequestRecord)][1]
    last = next(
        index
        for index, one in enumerate(recording.records)
        if isinstance(one, SchedulerStep) and one.step == 4
    )
    recording.records[last:last] = [Gap(2), engine, request]
    run = Run(recording.write(tmp_path))

    found = list(run.steps())

    assert [step.number for step in found] == [0, 1, 2, 3, 4]
    assert [step.gap for step in found] == [False, False, False, False, True]
    assert [len(step.arrived) for step in found] == [1, 0, 0, 1, 0]
    assert run.dropped == 2


def test_events_before_the_first_step_are_kept(tmp_path: Path) -> None:
    recording = Recording()
    recording.records.append(AfterStep(0, -1, 0, []))
    aborted = recording.arrive("a", 4)
    recording.after(Finished(aborted, "FINISHED_ABORTED", 0))
    number = recording.arrive("b", 4)
    recording.step({number: 4}, admit={number: Admit([[1]])})

    (step,) = Run(recording.write(tmp_path)).steps()

    assert [type(one) for one in step.before] == [Finished]


def test_the_manifest_is_optional_but_not_broken(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None

    write_manifest(tmp_path, num_rounds=3)
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.num_rounds == 3

    for read, name, part in (
        (read_manifest, "run.json", "rounds"),
        (read_profile_manifest, "profile.json", "samples"),
    ):
        (tmp_path / name).write_text("{}")
        with pytest.raises(BadTraceError) as refused:
            read(tmp_path)
        assert str(refused.value) == (
            f"cannot read {tmp_path / name}: Object missing required field `schema_version`; "
            f"remove {name} to read the run without its {part}"
        )
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(BadTraceError, match=r"run\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "values", [[], [5], [1, 2, 3], [3, 2, 1], [1, 2, 1, 2], [0, 1, -1], [7, 7, 7], [-1, 0, 1]]
)
def test_runs_give_back_the_vector(values: list[int]) -> None:
    assert from_runs(to_runs(values)) == values


def test_more_free_blocks_than_the_pool_has_are_a_damaged_trace(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change(SchedulerStep, 3, num_free_blocks=64)
    with pytest.raises(BadTraceError, match=r"^step 3 of engine host.1.0 has 64 free blocks in a"):
        list(Run(recording.write(tmp_path)).steps())
