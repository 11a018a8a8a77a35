"""What `build_tiny_model` refuses, and that it leaves nothing behind; no torch is needed."""

import errno
import sys
from pathlib import Path

import pytest

from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.engine import tiny_models
from omnicache_cli.engine.tiny_kinds import TINY_MODEL_KINDS
from omnicache_cli.engine.tiny_models import build_tiny_model
from omnicache_cli.engine.tiny_models.folder import MARKER_NAME
from omnicache_cli.errors import EngineMissingError, RefusedOutputError, UsageError

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture(autouse=True)
def fake_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_models.BUILDERS, "text", lambda: dict(FILES))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_table_of_kinds_and_the_table_of_builders_agree() -> None:
    assert list(tiny_models.BUILDERS) == list(TINY_MODEL_KINDS)


def test_an_unknown_kind_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tiny model kind 'txt'; choose one of: text, image"):
        build_tiny_model("txt", tmp_path / "model")


def test_a_report_of_a_format_that_is_not_there_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["omnicache", "tiny-model", "text", "tiny", "-o", "r.csv"])

    assert exit_code_of_run() == 2
    assert capsys.readouterr().err.startswith("omnicache: r.csv names a format that is not there;")
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_holds_the_files_and_the_marker(tmp_path: Path) -> None:
    build_tiny_model("text", tmp_path / "model")

    assert sorted(contents(tmp_path)) == [
        "model/config.json",
        "model/model.safetensors",
        f"model/{MARKER_NAME}",
    ]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    build_tiny_model("text", tmp_path / "model")

    assert (tmp_path / "model" / "config.json").read_bytes() == b"{}"


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    build_tiny_model("text", tmp_path / "link")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").exists()


def test_a_model_built_earlier_is_replaced_only_with_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny_model("text", tmp_path / "model")
    monkeypatch.setitem(tiny_models.BUILDERS, "text", lambda: {"config.json": b"new"})

    with pytest.raises(RefusedOutputError, match=r"model is not empty; .* pass --force"):
        build_tiny_model("text", tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == b"{}"

    build_tiny_model("text", tmp_path / "model", force=True)
    assert sorted(contents(tmp_path)) == ["model/config.json", f"model/{MARKER_NAME}"]
    assert (tmp_path / "model" / "config.json").read_bytes() == b"new"


@pytest.mark.parametrize(
    "names", [("thesis.tex",), ("config.json", "model.safetensors"), (MARKER_NAME, "config.json")]
)
def test_force_never_replaces_a_folder_that_omnicache_did_not_build(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    (tmp_path / "mine").mkdir()
    for name in names:
        (tmp_path / "mine" / name).write_text("mine")
    before = contents(tmp_path)

    with pytest.raises(RefusedOutputError, match="mine is not a tiny model that omnicache built"):
        build_tiny_model("text", tmp_path / "mine", force=True)

    assert contents(tmp_path) == before


def test_force_never_deletes_a_file_that_was_added_to_a_built_model(tmp_path: Path) -> None:
    build_tiny_model("text", tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("mine")

    with pytest.raises(RefusedOutputError, match=r"\(it holds notes.txt\)"):
        build_tiny_model("text", tmp_path / "model", force=True)

    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"


def test_files_in_folders_are_written_replaced_and_kept_apart_from_foreign_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {**FILES, "adapter/config.json": b"{}"}
    monkeypatch.setitem(tiny_models.BUILDERS, "text", lambda: files)
    build_tiny_model("text", tmp_path / "model")
    assert (tmp_path / "model" / "adapter" / "config.json").read_bytes() == b"{}"
    build_tiny_model("text", tmp_path / "model", force=True)

    (tmp_path / "model" / "adapter" / "notes.txt").write_text("mine")
    with pytest.raises(RefusedOutputError, match=r"\(it holds adapter/notes.txt\)"):
        build_tiny_model("text", tmp_path / "model", force=True)
    (tmp_path / "model" / "adapter" / "notes.txt").unlink()
    (tmp_path / "model" / "empty").mkdir()
    with pytest.raises(RefusedOutputError, match=r"\(it holds empty\)"):
        build_tiny_model("text", tmp_path / "model", force=True)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")

    with pytest.raises(RefusedOutputError, match="model is not a folder; name a new folder"):
        build_tiny_model("text", tmp_path / "model", force=True)


def test_a_missing_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedOutputError, match=r"there is no folder .*absent; create it"):
        build_tiny_model("text", tmp_path / "absent" / "model")


def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(RefusedOutputError, match="is the current folder; name a new folder"):
        build_tiny_model("text", Path("."))


def test_a_name_is_refused_before_the_slow_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_models.BUILDERS, "text", lambda: pytest.fail("it was built"))
    (tmp_path / "model").write_text("mine")

    with pytest.raises(RefusedOutputError):
        build_tiny_model("text", tmp_path / "model")


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), RefusedOutputError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["full disk", "Ctrl-C"],
)
@pytest.mark.parametrize("method", ["write_bytes", "rename"])
def test_a_failure_leaves_the_old_model_whole_and_nothing_beside_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    shown: type[BaseException],
    method: str,
) -> None:
    build_tiny_model("text", tmp_path / "model")
    before = contents(tmp_path)
    real = getattr(Path, method)
    calls = []

    def fails_the_second_time(path: Path, *arguments: object) -> object:
        calls.append(path)
        if len(calls) == 2:
            raise failure
        return real(path, *arguments)

    monkeypatch.setattr(Path, method, fails_the_second_time)
    with pytest.raises(shown):
        build_tiny_model("text", tmp_path / "model", force=True)

    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", TINY_MODEL_KINDS)
def test_without_transformers_the_message_says_what_to_install(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real builders
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(EngineMissingError, match=r"transformers.*pip install") as caught:
        build_tiny_model(kind, tmp_path / "model")

    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
