"""The rank file's writer: whole lines or nothing, and what is lost is counted."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from omnicache_cli.trace.files import read_records
from omnicache_cli.trace.records import AfterStep, End, Gap, Header, Preempted
from omnicache_cli.trace.writer import RankFileWriter

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
