"""The rank file's writer: whole lines or nothing, and what is lost is counted."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from omnicache_cli.trace.files import read_records
from omnicache_cli.trace.records import AfterStep, End, Gap, Header, Preempted
from omnicache_cli.trace.writer import MAX_HELD, RankFileWriter

HEADER = Header(1, "0.1.0", "0.30.0", "host", 7, "EngineCore", 1, 2)
RECORD = AfterStep(0, 3, 99, [Preempted(5)])
END = End(1, 0, {}, 10)

Write = Callable[[int, bytes], int]


def test_records_come_back_as_written_from_a_private_file(tmp_path: Path) -> None:
    writer = RankFileWriter(tmp_path, HEADER)
    writer.write(RECORD)
    writer.close(END)
    writer.close(END)
    assert writer.path == tmp_path / "host.7.trace.jsonl"
    assert list(read_records(writer.path)) == [HEADER, RECORD, END]
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600


def test_a_process_number_used_again_gets_a_file_of_its_own(tmp_path: Path) -> None:
    first, second = (RankFileWriter(tmp_path, HEADER) for _ in range(2))
    assert [first.path.name, second.path.name] == ["host.7.trace.jsonl", "host.7.1.trace.jsonl"]


def test_half_a_line_on_a_full_disk_is_taken_back_and_a_gap_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RankFileWriter(tmp_path, HEADER)
    write: Write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:5]))
    writer.write(RECORD)
    writer.write(RECORD)
    assert (writer.num_dropped, writer.generation) == (2, 2)
    monkeypatch.setattr(os, "write", write)
    writer.write(RECORD)
    writer.close(END)
    assert list(read_records(writer.path)) == [HEADER, Gap(2), RECORD, END]


def test_a_failing_disk_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RankFileWriter(tmp_path, HEADER)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    writer.write(RECORD)
    writer.close(END)
    assert writer.num_dropped == 2


def test_what_is_written_to_a_removed_file_counts_as_lost(tmp_path: Path) -> None:
    writer = RankFileWriter(tmp_path, HEADER)
    writer.path.unlink()
    writer.write(RECORD)
    assert (writer.num_records, writer.num_dropped) == (0, 1)


def test_a_header_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 3)
    with pytest.raises(OSError, match="only 3 of"):
        RankFileWriter(tmp_path, HEADER)
    assert list(tmp_path.iterdir()) == []


# -- records that are not whole yet ---------------------------------------------------------------


def numbered(step: int) -> AfterStep:
    return AfterStep(0, step, 99, [])


def steps_in(writer: RankFileWriter) -> list[int]:
    return [one.step for one in read_records(writer.path) if isinstance(one, AfterStep)]


def test_what_follows_a_record_that_is_not_whole_waits_behind_it(tmp_path: Path) -> None:
    writer = RankFileWriter(tmp_path, HEADER)
    held = numbered(1)
    writer.write(numbered(0))
    writer.hold(held)
    writer.write(numbered(2))
    writer.flush()
    assert steps_in(writer) == [0]
    writer.settle(held)
    assert steps_in(writer) == [0]  # with the next record, in one call
    writer.write(numbered(3))
    assert steps_in(writer) == [0, 1, 2, 3]
    writer.close(END)
    assert writer.num_records == 5


def test_of_two_that_are_not_whole_the_first_goes_alone(tmp_path: Path) -> None:
    """As with asynchronous scheduling: the next step is scheduled before the output of this one."""
    writer = RankFileWriter(tmp_path, HEADER)
    first, second = numbered(1), numbered(3)
    writer.hold(first)
    writer.write(numbered(2))
    writer.hold(second)
    writer.settle(first)
    writer.flush()
    assert steps_in(writer) == [1, 2]
    writer.settle(second)
    writer.flush()
    assert steps_in(writer) == [1, 2, 3]


def test_what_came_before_a_whole_one_waits_no_longer(tmp_path: Path) -> None:
    """The output of a step that failed never comes; those behind it must not be lost with it."""
    writer = RankFileWriter(tmp_path, HEADER)
    failed, later = numbered(1), numbered(2)
    writer.hold(failed)
    writer.hold(later)
    writer.settle(later)
    writer.settle(failed)  # too late, and harmless
    writer.flush()
    assert steps_in(writer) == [1, 2]


def test_not_too_many_wait(tmp_path: Path) -> None:
    writer = RankFileWriter(tmp_path, HEADER)
    writer.hold(numbered(0))
    for step in range(1, MAX_HELD):
        writer.write(numbered(step))
    assert steps_in(writer) == []
    writer.write(numbered(MAX_HELD))
    assert steps_in(writer) == list(range(MAX_HELD + 1))


def test_what_waits_behind_a_lost_record_is_lost_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says only what changed since: nobody could read it."""
    writer = RankFileWriter(tmp_path, HEADER)
    first, second = numbered(1), numbered(2)
    writer.hold(first)
    writer.hold(second)
    writer.settle(first)
    write: Write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:5]))
    writer.flush()
    assert (writer.num_dropped, writer.generation) == (2, 1)
    monkeypatch.setattr(os, "write", write)
    writer.settle(second)
    writer.write(numbered(3))
    assert list(read_records(writer.path)) == [HEADER, Gap(2), numbered(3)]


def test_closing_writes_what_is_held(tmp_path: Path) -> None:
    writer = RankFileWriter(tmp_path, HEADER)
    writer.hold(numbered(0))
    writer.write(numbered(1))
    writer.close(END)
    assert list(read_records(writer.path)) == [HEADER, numbered(0), numbered(1), END]
