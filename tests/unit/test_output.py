"""Where results go: whole or not at all."""

import errno
import io
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.errors import RefusedOutputError
from omnicache_cli.profile.results import SUFFIXES
from omnicache_cli.report import output
from omnicache_cli.report.layout import escaped, quoted
from omnicache_cli.report.output import check_output, deliver, note
from omnicache_cli.trace.files import SUFFIX
from omnicache_cli.trace.folder import PROFILE_NAME
from omnicache_cli.trace.manifest import MANIFEST_NAME


def test_a_result_goes_to_stdout_and_nothing_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    check_output(None, force=False)
    deliver("result\n", None)
    assert capsys.readouterr() == ("result\n", "")


def test_a_file_is_whole_private_and_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hits.txt"
    check_output(path, force=False)
    deliver("é\n", path)
    assert path.read_bytes() == "é\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["hits.txt"]
    assert capsys.readouterr() == ("", f"wrote {path}\n")


def test_quiet_does_not_announce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deliver("x", tmp_path / "a", quiet=True)
    assert capsys.readouterr() == ("", "")


def refusal(path: Path, *, force: bool = False) -> str:
    with pytest.raises(RefusedOutputError) as refused:
        check_output(path, force=force)
    return str(refused.value)


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    assert refusal(path) == f"{path} exists; pass --force to replace it"
    check_output(path, force=True)
    deliver("new", path, quiet=True)
    assert path.read_text() == "new"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "name", ["vm.1.trace.jsonl", "vm.2.trace.jsonl", "run.json", "profile.json", "vm.1.raw.txt"]
)
def test_no_file_of_a_run_is_replaced_or_added(name: str, force: bool, tmp_path: Path) -> None:
    for one in ("vm.1.trace.jsonl", "run.json", "hits.json"):
        (tmp_path / one).write_text("recorded")
    path = tmp_path / name
    said = f"{path} has the name of a file of the run in its folder; name another file"
    assert refusal(path, force=force) == said
    (tmp_path / "other").mkdir()
    for link, target in (("link.json", path), ("folder", tmp_path)):
        (tmp_path / "other" / link).symlink_to(target)
    assert "has the name of a file of the run" in refusal(tmp_path / "other/folder" / name)
    if path.exists():
        assert "has the name of a file of the run" in refusal(
            tmp_path / "other/link.json", force=True
        )
    check_output(tmp_path / "hits.json", force=True)
    check_output(tmp_path / "other" / name, force=force)  # no run is there


def test_another_name_of_a_file_of_a_run_is_replaced_and_the_file_stays(tmp_path: Path) -> None:
    recorded, other = tmp_path / "vm.1.trace.jsonl", tmp_path / "hits.json"
    recorded.write_text("recorded")
    os.link(recorded, other)
    check_output(other, force=True)
    deliver("new", other, quiet=True)
    assert (recorded.read_text(), other.read_text()) == ("recorded", "new")


def test_the_names_of_a_run_are_those_that_are_written() -> None:
    assert (MANIFEST_NAME, PROFILE_NAME) == output.RUN_NAMES
    assert {SUFFIX, *SUFFIXES.values()} == set(output.RUN_SUFFIXES)


def test_a_folder_is_refused_even_by_force(tmp_path: Path) -> None:
    assert refusal(tmp_path, force=True) == f"{tmp_path} is a folder; name a file in it"


def test_a_device_is_refused_even_by_force() -> None:
    assert refusal(Path("/dev/null"), force=True) == (
        "/dev/null is not a regular file; leave out -o and redirect stdout"
    )


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no" / "a"
    assert refusal(path) == f"cannot write {path}: no folder {path.parent}; create it first"


def test_a_folder_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
    path = tmp_path / "a"
    assert refusal(path) == (
        f"cannot write {path}: no permission in {tmp_path}; name a file in a writable folder"
    )


def test_a_name_too_long_for_the_file_system_is_refused(tmp_path: Path) -> None:
    assert "File name too long" in refusal(tmp_path / ("a" * 300))


def test_of_writers_at_once_one_wins_and_the_others_say_so(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def both() -> None:
        with output.replacing(path, force=False) as mine:
            mine.write(b"mine")
            with output.replacing(path, force=False) as theirs:
                theirs.write(b"theirs")

    with pytest.raises(RefusedOutputError) as refused:
        both()
    assert str(refused.value) == f"{path} exists; pass --force to replace it"
    assert (path.read_text(), os.listdir(tmp_path)) == ("theirs", ["a"])


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    check_output(link, force=True)
    deliver("new", link, quiet=True)
    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    assert refusal(link, force=True) == (
        f"{link} is a link to a file that does not exist; remove it or name another file"
    )


def test_a_full_disk_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a"
    path.write_text("old")
    monkeypatch.setattr(output.os, "fsync", full)
    with pytest.raises(RefusedOutputError) as refused:
        deliver("new", path)
    assert str(refused.value) == (
        f"cannot write {path}: No space left on device; name another file, or free some space"
    )
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["a"])


def test_an_interrupted_write_leaves_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(output.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deliver("new", tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_note_is_one_line_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    note("reading a\nb\x1b[2J")
    assert capsys.readouterr() == ("", "reading a\\nb\\x1b[2J\n")


def test_a_note_on_a_full_stderr_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        note("lost")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_note_without_a_stderr_does_not_land_in_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    note("lost")
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "")


class Stingy(io.RawIOBase):
    """Takes at most ten bytes at a time, and every third time none: an unbuffered pipe."""

    def __init__(self, handle: int) -> None:
        self.taken = bytearray()
        self.calls = 0
        self._handle = handle

    def fileno(self) -> int:
        return self._handle

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int | None:
        self.calls += 1
        if self.calls % 3 == 0:
            return None
        part = bytes(content[:10])
        self.taken += part
        return len(part)


def test_an_unbuffered_stdout_that_takes_a_part_gets_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, writing = os.pipe()
    stingy = Stingy(writing)
    stdout = io.TextIOWrapper(stingy, encoding="utf-8", write_through=True)  # type: ignore[type-var]
    monkeypatch.setattr(sys, "stdout", stdout)
    text = "".join(f"line {number} ▓\n" for number in range(50))
    deliver(text, None)
    assert bytes(stingy.taken).decode() == text
    os.close(writing)


def test_a_result_that_does_not_fit_is_no_success_without_buffering(tmp_path: Path) -> None:
    code = "from omnicache_cli.report.output import deliver; deliver('x' * 100000, None)"
    limited = f'ulimit -f 8; exec {sys.executable} -c "{code}" > out'
    done = subprocess.run(
        ["bash", "-c", limited],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot write the result to stdout: File too large" in done.stderr


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("run", "run"),
        ("my run's", "'my run'\"'\"'s'"),
        ("ev il\n\x1b[31m", "$'ev il\\012\\033[31m'"),
        ("it's\\\t7é", "$'it\\'s\\\\\\0117é'"),
        ("not utf-8 \udcff", "$'not utf-8 \\377'"),
        ("\u202e", "$'\\342\\200\\256'"),
    ],
)
def test_a_hint_quotes_a_name_as_a_shell_reads_it(name: str, word: str) -> None:
    assert quoted(name) == word == escaped(quoted(name))
    said = subprocess.run(
        ["bash", "-c", f"printf %s {word}"], capture_output=True, check=True, timeout=30
    )
    assert os.fsdecode(said.stdout) == name
