"""The folder of an export of tables: there as a whole, or not at all.

It is made beside its place under a hidden name, and renamed when it is complete. Nothing but what
an export wrote is ever removed.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from omnicache_cli.errors import RefusedOutputError

DESCRIPTION_NAME = "_export.json"
"""Begins with an underscore: what reads folders of Parquet files passes over it."""

FORMAT = "omnicache tables"
SUFFIXES = (".parquet", ".csv")


class _Description(msgspec.Struct):
    """As much of `_export.json` as says whose it is."""

    format: str


def check_folder(path: Path, *, force: bool) -> None:
    """Refuse what `new_folder` would refuse, and touch nothing: for before the slow work."""
    target = Path(os.path.realpath(path))
    try:
        if not target.is_dir():
            if target.exists() or path.is_symlink():
                raise RefusedOutputError(f"{path} is no folder; name a folder for the tables")
            _check_parent(target.parent, path)
            return
        entries = sorted(target.rglob("*"))
    except OSError as error:
        raise RefusedOutputError(
            f"cannot write {path}: {error.strerror or error}; name another folder"
        ) from error
    _check_parent(target.parent, path)
    foreign = next((one for one in entries if not _is_ours(one)), None)
    if foreign is not None or (entries and not _is_export(target)):
        what = (foreign or entries[0]).relative_to(target)
        raise RefusedOutputError(
            f"{path} holds {str(what)!r}, which is not part of an export; name another folder"
        )
    if entries and not force:
        raise RefusedOutputError(f"{path} holds an export; pass --force to replace it")


@contextmanager
def new_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """An empty folder to write into; it takes its place once the block has ended well.

    RefusedOutputError: it cannot be written.
    """
    check_folder(path, force=force)
    target = Path(os.path.realpath(path))
    working = None
    try:
        working = Path(tempfile.mkdtemp(prefix=f".{target.name}.omnicache-", dir=target.parent))
        yield working
        if force:
            _put_in_place(working, target)
        else:
            working.rename(target)  # of several writers at once only one finds no or an empty one
    except BaseException as error:
        if working is not None:
            shutil.rmtree(working, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            again = "export again" if force else "pass --force to replace it"
            raise RefusedOutputError(f"{path} was filled meanwhile; {again}") from None
        if isinstance(error, OSError):
            raise RefusedOutputError(
                f"cannot write {path}: {error.strerror or error}; name another folder, or free "
                "some space"
            ) from error
        raise


def open_new(path: Path) -> int:
    """The handle of a new file that only its owner reads."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _put_in_place(working: Path, target: Path) -> None:
    aside = None
    if target.is_dir():
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.replaced-", dir=target.parent))
        target.rename(aside)
    try:
        working.rename(target)
    except OSError:
        if aside is not None:
            try:
                aside.rename(target)
            except OSError:
                if target.is_dir():  # another --force has replaced the same export
                    shutil.rmtree(aside, ignore_errors=True)
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _check_parent(parent: Path, path: Path) -> None:
    if not parent.is_dir():
        raise RefusedOutputError(f"cannot write {path}: no folder {parent}; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RefusedOutputError(
            f"cannot write {path}: no permission in {parent}; name a folder in a writable one"
        )


def _is_ours(path: Path) -> bool:
    if path.is_symlink():
        return False
    return path.is_dir() or path.suffix in SUFFIXES or path.name == DESCRIPTION_NAME


def _is_export(folder: Path) -> bool:
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        content = (folder / DESCRIPTION_NAME).read_bytes()
        return msgspec.json.decode(content, type=_Description).format == FORMAT
    return False
