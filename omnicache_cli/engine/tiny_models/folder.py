"""Puts a model's files into a folder, all or nothing, and never over somebody else's files.

A marker file names what was written, so that only such a folder is ever replaced.
It does not know what is in the files.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omnicache_cli.errors import RefusedOutputError

MARKER_NAME = "omnicache_tiny_model.json"


def check_folder(directory: Path, *, force: bool) -> None:
    """Refuse a folder that must not be written; call it before the slow work."""
    with _os_errors_named(directory):
        target = _real(directory)
        if target == Path.cwd():
            raise RefusedOutputError(
                f"{directory} is the current folder; name a new folder inside it"
            )
        if not target.parent.is_dir():
            raise RefusedOutputError(
                f"cannot write {directory}: there is no folder {target.parent}; "
                "create it, or name another"
            )
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise RefusedOutputError(
                f"cannot write {directory}: no permission in {target.parent}; "
                "name a folder in a writable place"
            )
        if target.exists():
            _check_existing(target, directory, force=force)


def write_folder(
    files: Mapping[str, bytes], directory: Path, *, kind: str, force: bool = False
) -> None:
    """Write into a sibling first and rename it, so that `directory` is whole or untouched."""
    check_folder(directory, force=force)
    target = _real(directory)
    suffix = secrets.token_hex(4)
    new = target.with_name(f".{target.name}.{suffix}.new")
    old = target.with_name(f".{target.name}.{suffix}.old")
    marker = {"kind": kind, "files": sorted([*files, MARKER_NAME])}
    try:
        with _os_errors_named(directory):
            new.mkdir()
            for name, content in files.items():
                (new / name).parent.mkdir(exist_ok=True)
                (new / name).write_bytes(content)
            (new / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
            if target.exists() and any(target.iterdir()):
                target.rename(old)
            new.rename(target)  # an empty folder at `target` is replaced by this
    except BaseException:  # Ctrl-C too
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _real(directory: Path) -> Path:
    """Behind all links, so that the sibling is on the same disk and a link stays a link."""
    return Path(os.path.realpath(directory))


def _check_existing(target: Path, directory: Path, *, force: bool) -> None:
    if not target.is_dir():
        raise RefusedOutputError(f"{directory} is not a folder; name a new folder")
    if not any(target.iterdir()):
        return
    if not force:
        raise RefusedOutputError(
            f"{directory} is not empty; name a new folder, or pass --force to replace a tiny "
            "model built earlier"
        )
    names = _names_in(target)
    foreign = sorted(names - _names_in_marker(target))
    if "config.json" not in names or foreign:
        example = f" (it holds {foreign[0]})" if foreign else ""
        raise RefusedOutputError(
            f"{directory} is not a tiny model that omnicache built{example}, and --force does "
            "not replace anything else; name a new folder"
        )


def _names_in(folder: Path) -> set[str]:
    """Paths of all files inside, and of folders that hold none."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    }


def _names_in_marker(target: Path) -> set[str]:
    """What an earlier build wrote there; nothing when the marker is missing or unreadable."""
    try:
        marker = json.loads((target / MARKER_NAME).read_text(encoding="utf-8"))
        return {str(name) for name in marker["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        return set()


@contextmanager
def _os_errors_named(directory: Path) -> Iterator[None]:
    """A full disk or a refused rename becomes an error that names the folder."""
    try:
        yield
    except OSError as error:
        raise RefusedOutputError(
            f"cannot write {directory}: {error.strerror or error}; "
            "free some space, or name a folder in a writable place"
        ) from error
