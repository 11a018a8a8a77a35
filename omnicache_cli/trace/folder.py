"""A run folder from the writing side: made, refused, cleared, and its manifest written."""

import contextlib
import os
from pathlib import Path

import msgspec

from omnicache_cli.errors import RefusedOutputError
from omnicache_cli.trace.files import SUFFIX
from omnicache_cli.trace.manifest import MANIFEST_NAME, Manifest

FOLDER_MODE = 0o700


def prepare_folder(folder: Path, *, force: bool) -> None:
    """Make an empty run folder. With `force` an earlier run in it is removed, nothing else is.

    RefusedOutputError: it holds a run and `force` is not given, holds other files, or cannot
    be made.
    """
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
    foreign = [one.name for one in entries if not _is_ours(one)]
    if foreign:
        raise RefusedOutputError(
            f"{folder} holds {foreign[0]!r}, which is not part of a run; name an empty folder"
        )
    if entries and not force:
        raise RefusedOutputError(f"{folder} holds a run; pass --force to replace it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RefusedOutputError(
            f"cannot write into {folder}: no permission; name a folder of your own"
        )
    for entry in entries:
        entry.unlink()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace run.json as a whole. OSError: it cannot be written."""
    temporary = folder / f".{MANIFEST_NAME}.{os.getpid()}"
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        temporary.replace(folder / MANIFEST_NAME)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    return path.name == MANIFEST_NAME or path.name.endswith(SUFFIX)
