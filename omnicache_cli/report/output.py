"""Where results and talk go: results to stdout or, whole or not at all, to a file; talk to stderr.

Does not know what it writes. A reader that went away (a closed pipe) is not handled here but in
`cli/main.py`, which ends the program quietly.
"""

import contextlib
import os
import select
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from omnicache_cli.errors import RefusedOutputError
from omnicache_cli.report.layout import escaped

IN_ASCII = str.maketrans("·░▒▓█", ".:+%#")
"""The shades of a picture for a stdout that cannot carry them."""

RUN_NAMES = ("run.json", "profile.json")
RUN_SUFFIXES = (
    *(".trace.jsonl", ".flamegraph.svg"),
    *(".speedscope.json", ".raw.txt", ".chrometrace.json"),
)
"""Of the files of a recorded run and of a profile; the first two say that a folder holds one."""


def note(message: str) -> None:
    """One line of progress, warning or next step on stderr; never part of the result.

    Talk must not stop work: a closed or full stderr is ignored.
    """
    if sys.stderr is None:  # started with a closed stderr
        return
    with contextlib.suppress(OSError):
        print(escaped(message), file=sys.stderr, flush=True)


def check_output(path: Path | None, *, force: bool, option: str = "-o") -> None:
    """Refuse a file name that `deliver` could not write, or that belongs to a recorded run. Call it
    before the slow work.

    `option`: what named the file.
    """
    if path is None:
        return
    _check_no_run_file(path)
    mode = None
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise RefusedOutputError(
                f"{path} is a link to a file that does not exist; remove it or name another file"
            ) from None
    except OSError as error:
        raise RefusedOutputError(
            f"cannot write {path}: {error.strerror}; name another file"
        ) from error
    if mode is None:
        _check_folder(path.absolute().parent, path)
    elif stat.S_ISDIR(mode):
        raise RefusedOutputError(f"{path} is a folder; name a file in it")
    elif not stat.S_ISREG(mode):
        raise RefusedOutputError(
            f"{path} is not a regular file; leave out {option} and redirect stdout"
        )
    elif not force:
        raise RefusedOutputError(f"{path} exists; pass --force to replace it")
    else:
        _check_folder(_target(path).parent, path)


def deliver(text: str, path: Path | None, *, quiet: bool = False) -> None:
    """Write the result to stdout, or replace the file atomically with one only its owner reads."""
    if path is None:
        _write_stdout(text)
        return
    with replacing(path) as stream:
        stream.write(text.encode("utf-8", errors="backslashreplace"))
    if not quiet:
        note(f"wrote {path}")


@contextmanager
def replacing(path: Path, *, force: bool = True) -> Iterator[BinaryIO]:
    """A new file that only its owner reads; it takes the place of `path` once the block has ended
    well, and is gone otherwise: the old file stays whole until the new one is on the disk.

    RefusedOutputError: it cannot be written; or, without `force`, a file of that name has appeared
    meanwhile, which stays.
    """
    target = _target(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=".omnicache-", dir=target.parent)  # mode 0600
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not force:  # of several writers at once only one makes the name
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, FileExistsError):
            raise RefusedOutputError(f"{path} exists; pass --force to replace it") from None
        if isinstance(error, OSError):
            raise RefusedOutputError(
                f"cannot write {path}: {error.strerror or error}; name another file, or free some "
                "space"
            ) from error
        raise


def _check_no_run_file(path: Path) -> None:
    """Not even --force replaces what was recorded, nor adds to it: it is read as a whole."""
    for place in {path.absolute(), _target(path)}:
        if place.name not in RUN_NAMES and not place.name.endswith(RUN_SUFFIXES):
            continue
        with contextlib.suppress(OSError):  # a folder that cannot be read is refused elsewhere
            if any(name.endswith(RUN_SUFFIXES[:2]) for name in os.listdir(place.parent)):
                raise RefusedOutputError(
                    f"{path} has the name of a file of the run in its folder; name another file"
                )


def _check_folder(folder: Path, path: Path) -> None:
    if not folder.is_dir():
        raise RefusedOutputError(f"cannot write {path}: no folder {folder}; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RefusedOutputError(
            f"cannot write {path}: no permission in {folder}; name a file in a writable folder"
        )


def _target(path: Path) -> Path:
    """The file itself where `path` is a link to it: a link stays a link."""
    return Path(os.path.realpath(path))


def _write_stdout(text: str) -> None:
    if sys.stdout is None:
        raise RefusedOutputError("stdout is closed; name a file with -o")
    try:
        sys.stdout.flush()
        content = _in_encoding(text, sys.stdout.encoding)
        _write_all(
            sys.stdout.buffer, content.encode(sys.stdout.encoding, sys.stdout.errors or "strict")
        )
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RefusedOutputError(
            f"cannot write the result to stdout: {error.strerror}; name a file with -o"
        ) from error


def _write_all(stream: BinaryIO, content: bytes) -> None:
    """All of it: an unbuffered stdout (PYTHONUNBUFFERED) takes a part and says how much, one that
    does not block may take nothing for now."""
    rest = memoryview(content)
    while rest:
        try:
            taken = stream.write(rest)
        except BlockingIOError as error:
            taken = error.characters_written
        if taken:
            rest = rest[taken:]
        else:
            select.select([], [stream], [])
    stream.flush()


def _in_encoding(text: str, encoding: str) -> str:
    """Shades as ASCII where the encoding lacks one of them: a picture keeps its columns.

    Everything else that the encoding lacks gets an escape (`cli/main.py`).
    """
    if text.isascii():
        return text
    try:
        "".join(map(chr, IN_ASCII)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(IN_ASCII)
    return text
