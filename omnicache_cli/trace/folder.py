"""A run folder from the writing side: made, refused, replaced, and its manifest written."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from omnicache_cli.errors import BadTraceError, RefusedOutputError
from omnicache_cli.trace.digest import BOARD_MAGIC, BOARD_PREFIX
from omnicache_cli.trace.files import SUFFIX, read_header
from omnicache_cli.trace.manifest import MANIFEST_NAME, Manifest, read_manifest

FOLDER_MODE = 0o700
PROFILE_NAME = "profile.json"
"""Manifest of what `omnicache profile` left beside a run."""


@dataclass(slots=True)
class NewFolder:
    """A fresh run folder; an earlier run that it replaces is kept beside it until it is settled."""

    path: Path
    replaced: Path | None = None

    def keep(self) -> None:
        """The new run stands: remove the one that it replaces. Harmless when repeated."""
        if self.replaced is not None:
            shutil.rmtree(self.replaced, ignore_errors=True)
            self.replaced = None

    def give_back(self) -> None:
        """Nothing came of the new run: put the earlier one back, where there is one."""
        if self.replaced is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.path)
                self.replaced.rename(self.path)
            self.replaced = None


def prepare_folder(folder: Path, *, force: bool) -> NewFolder:
    """Make an empty run folder. With `force` it may take the place of an earlier run.

    RefusedOutputError: the folder holds a run and `force` is not given, holds other files, or
    cannot be made. Nothing but files that omnicache wrote is ever removed.
    """
    check_folder(folder, force=force)
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        entries = sorted(folder.iterdir())
    except FileExistsError:
        raise RefusedOutputError(f"{folder} is a file; name a folder for the run") from None
    except FileNotFoundError:
        raise RefusedOutputError(
            f"cannot make {folder}: no folder {folder.absolute().parent}; create it first"
        ) from None
    except OSError as error:
        raise RefusedOutputError(
            f"cannot make {folder}: {error.strerror or error}; name another folder"
        ) from error
    return _replacing(folder) if entries else NewFolder(folder)


@contextmanager
def claimed_folder(folder: Path, *, force: bool) -> Iterator[NewFolder]:
    """`prepare_folder`, for one process at a time: a lock on the folder until the block ends.

    For what writes its files only at the end, so that till then the folder looks free. The kernel
    takes the lock from a process that dies. RefusedOutputError: another process has it, too.
    """
    check_folder(folder, force=force)
    with contextlib.ExitStack() as locks:
        is_new = not folder.exists()
        if not is_new:
            locks.enter_context(_locked(folder))
        new = prepare_folder(folder, force=force)
        if is_new or new.replaced is not None:
            locks.enter_context(_locked(folder))
        yield new


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # not there on every system that reads traces

    refusal = RefusedOutputError(
        f"another omnicache is about to write into {folder}; name another folder"
    )
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:  # it has been there a moment ago
        raise refusal from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:  # else the file system has no locks
                raise refusal from error
        if not folder.exists() or not os.path.samestat(os.fstat(handle), folder.stat()):
            raise refusal  # the other one has replaced it, or failed and removed it
        yield
    finally:
        os.close(handle)


def check_folder(folder: Path, *, force: bool) -> None:
    """Refuse what `prepare_folder` would refuse, and touch nothing: for before the slow work."""
    if folder.exists() and not folder.is_dir():
        raise RefusedOutputError(f"{folder} is a file; name a folder for the run")
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise RefusedOutputError(
            f"cannot make {folder}: {error.strerror or error}; name another folder"
        ) from error
    foreign = [one.name for one in entries if not _is_ours(one)]
    if foreign:
        raise RefusedOutputError(
            f"{folder} holds {foreign[0]!r}, which is not part of a run; name an empty folder"
        )
    if any(one.name != MANIFEST_NAME for one in entries) and not force:
        raise RefusedOutputError(f"{folder} holds a run; pass --force to replace it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RefusedOutputError(
            f"cannot write into {folder}: no permission; name a folder of your own"
        )


def _replacing(folder: Path) -> NewFolder:
    place = Path(os.path.realpath(folder))
    aside = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    try:
        place.rename(aside)
        place.mkdir(mode=FOLDER_MODE)
    except OSError as error:
        raise RefusedOutputError(
            f"cannot replace {folder}: {error.strerror or error}; name another folder"
        ) from error
    return NewFolder(place, aside)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace run.json as a whole. RefusedOutputError: it cannot be written."""
    write_whole(folder, MANIFEST_NAME, manifest)


def write_whole(folder: Path, name: str, told: msgspec.Struct) -> None:
    """Replace a file of a run as a whole, by JSON. RefusedOutputError: it cannot be written."""
    temporary = folder / f".{name}.{os.getpid()}"
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
        temporary.replace(folder / name)
    except OSError as error:
        raise RefusedOutputError(
            f"cannot write into {folder}: {error.strerror or error}; free some space or name "
            "another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def finish_manifest(folder: Path, manifest: Manifest, **changes: Any) -> None:
    """The run is over: say how, if there is still a folder and room, and take away what only
    running ranks need."""
    with contextlib.suppress(RefusedOutputError):
        write_manifest(folder, msgspec.structs.replace(manifest, **changes))
    for left in folder.glob(f"{BOARD_PREFIX}*"):
        with contextlib.suppress(OSError):
            left.unlink()


class _Sampled(msgspec.Struct):
    files: dict[str, str]


class _Profile(msgspec.Struct):
    schema_version: int
    py_spy_version: str
    processes: list[_Sampled]


def _of_profile(folder: Path) -> set[str]:
    """The files of a profile beside the run, where there is one."""
    try:
        profile = msgspec.json.decode((folder / PROFILE_NAME).read_bytes(), type=_Profile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return set()
    return {PROFILE_NAME}.union(*(one.files.values() for one in profile.processes))


def _is_ours(path: Path) -> bool:
    """A file that omnicache wrote, by its content and not by its name alone."""
    if path.is_symlink() or not path.is_file():
        return False
    with contextlib.suppress(BadTraceError, OSError):
        if path.name == MANIFEST_NAME:
            return read_manifest(path.parent) is not None
        if path.name.endswith(SUFFIX):
            read_header(path)
            return True
        if path.name in _of_profile(path.parent):
            return True
        if path.name.startswith(BOARD_PREFIX):  # of a process that was killed
            with path.open("rb") as stream:
                return stream.read(len(BOARD_MAGIC)) == BOARD_MAGIC
    return False
