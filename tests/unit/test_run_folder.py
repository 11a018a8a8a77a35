"""Making a run folder: nothing of the user's is ever removed."""

import stat
from pathlib import Path

import pytest

from omnicache_cli.errors import BadTraceError, RefusedOutputError
from omnicache_cli.trace.digest import BOARD_MAGIC, BOARD_PREFIX
from omnicache_cli.trace.folder import (
    claimed_folder,
    finish_manifest,
    prepare_folder,
    write_manifest,
)
from omnicache_cli.trace.manifest import MANIFEST_NAME, Manifest, read_manifest
from tests.unit.run_builder import two_rounds

MANIFEST = Manifest(1, "0.1.0", "0.30.0", 1, "in-process", "tiny", 1, 2, 1, 16)


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", force=False)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_an_earlier_run_is_replaced_only_by_force(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "run")
    with pytest.raises(RefusedOutputError, match=r"holds a run; pass --force to replace it$"):
        prepare_folder(folder, force=False)
    new = prepare_folder(folder, force=True)
    assert list(folder.iterdir()) == []
    new.keep()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_earlier_run_comes_back_when_nothing_comes_of_the_new_one(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    new = prepare_folder(folder, force=True)
    (folder / "half.trace.jsonl").touch()
    new.give_back()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_recorded_nothing_may_be_tried_again_without_force(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    prepare_folder(tmp_path, force=False).keep()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_looks_free_is_for_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    refused = r"another omnicache is about to write into .*/p; name another folder$"
    with claimed_folder(folder, force=False):
        for force in (False, True):
            with (
                pytest.raises(RefusedOutputError, match=refused),
                claimed_folder(folder, force=force),
            ):
                pass
        assert list(tmp_path.iterdir()) == [folder]
    earlier_run(folder)
    with claimed_folder(folder, force=True) as new:
        assert list(folder.iterdir()) == []
        with pytest.raises(RefusedOutputError, match=refused), claimed_folder(folder, force=True):
            pass
        new.give_back()
    assert len(list(folder.iterdir())) == 2
    with claimed_folder(folder, force=True) as new:
        new.keep()
    assert list(tmp_path.iterdir()) == [folder]


def earlier_run(folder: Path) -> Path:
    two_rounds().write(folder)
    write_manifest(folder, MANIFEST)
    return folder


@pytest.mark.parametrize("name", ["notes.txt", "run.json.bak", "trace.jsonl", "mine.trace.jsonl"])
def test_a_folder_with_a_foreign_file_is_refused_even_by_force(tmp_path: Path, name: str) -> None:
    write_manifest(tmp_path, MANIFEST)
    (tmp_path / name).touch()
    with pytest.raises(RefusedOutputError, match=f"holds '{name}', which is not part of a run"):
        prepare_folder(tmp_path, force=True)
    assert len(list(tmp_path.iterdir())) == 2


def test_files_that_only_bear_our_names_are_foreign(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"my": "own"}')
    with pytest.raises(RefusedOutputError, match=r"holds 'run.json', which is not part of a run"):
        prepare_folder(tmp_path, force=True)
    assert (tmp_path / "run.json").read_text() == '{"my": "own"}'


def test_what_a_killed_rank_left_behind_is_ours_and_goes_with_the_run(tmp_path: Path) -> None:
    board = tmp_path / f"{BOARD_PREFIX}host.1.0.0"
    board.write_bytes(BOARD_MAGIC + bytes(32))
    prepare_folder(tmp_path, force=True).keep()
    assert not board.exists()
    board.write_bytes(BOARD_MAGIC)
    finish_manifest(tmp_path, MANIFEST, finished=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == [MANIFEST_NAME]
    board.write_bytes(b"somebody else's")
    with pytest.raises(RefusedOutputError, match="which is not part of a run"):
        prepare_folder(tmp_path, force=True)


def test_a_link_and_a_subfolder_with_our_names_are_foreign(tmp_path: Path) -> None:
    for make in (lambda path: path.symlink_to("/etc/hostname"), Path.mkdir):
        folder = tmp_path / make.__name__.strip("<>")
        folder.mkdir()
        make(folder / "a.trace.jsonl")
        with pytest.raises(RefusedOutputError, match="not part of a run"):
            prepare_folder(folder, force=True)


def test_a_file_and_a_missing_parent_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RefusedOutputError, match=r"file is a file; name a folder for the run$"):
        prepare_folder(tmp_path / "file", force=True)
    with pytest.raises(RefusedOutputError, match=r"no folder .*none; create it first$"):
        prepare_folder(tmp_path / "none" / "run", force=False)


def test_a_manifest_is_read_back_as_written_and_private(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600


def test_a_run_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"schema_version": "1"}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(BadTraceError, match=r"^cannot read .*run.json: "):
        read_manifest(tmp_path)
