"""The entry point, and the only place where an exception becomes an exit code.

Imports next to nothing at load, so that `--version` costs no more than Python itself.
"""

import errno
import os
import sys

from omnicache_cli import __version__
from omnicache_cli.errors import (
    EXIT_BAD_INPUT,
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    OmnicacheError,
)

WATCHES = "monitor"
"""The command that others start and terminate. It has no engine of its own, that is a process
which would inherit what a signal does; those that have one see to it when they start it."""

MAX_SHOWN_PATH = 200
"""Characters of a refused path that an error shows."""


def main() -> None:
    sys.exit(exit_code_of_run())


def exit_code_of_run() -> int:
    """Run the command line in sys.argv; every ending has its exit code."""
    try:
        code = _answer_version() if sys.argv[1:] == ["--version"] else _run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader had enough, as in `omnicache ... | head`
        _drop_stdout()
        return EXIT_DONE
    except OmnicacheError as error:
        _say(str(error))
        _drop_stdout()
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _say(f"cannot write: {error.strerror}; free some space, or name a file elsewhere")
        elif error.filename is not None:  # a path that the system refuses, wherever it was used
            _say(f"cannot use {_shown(error.filename)}: {error.strerror}; name another path")
        else:
            return _report_bug()
        _drop_stdout()
        return EXIT_BAD_INPUT
    except Exception:  # Python would exit with 1, which here means "checked, and it differs"
        return _report_bug()
    return code


def _shown(path: object) -> str:
    """A path that fits into one line."""
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
    return text if len(text) <= MAX_SHOWN_PATH else f"{text[:MAX_SHOWN_PATH]}…"


def _answer_version() -> int:
    print(f"omnicache {__version__}")
    return EXIT_DONE


def _run() -> int:
    """`monitor` is ended by SIGTERM as by Ctrl-C from its first moment, while it is loaded, too."""
    if sys.argv[1:2] != [WATCHES]:
        return _run_app()
    from omnicache_cli.cli.interrupts import termination_as_interrupt

    with termination_as_interrupt():
        return _run_app()


def _run_app() -> int:
    """The exit code that typer means, or the exception that it turned into a code of its own."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without UTF-8 gets \u escapes, no error
            stream.reconfigure(errors="backslashreplace")
    import typer  # outside of what is caught by its names: a signal may end the import

    from omnicache_cli.cli.app import run

    try:
        code = run()
    except SystemExit as stop:
        hidden = stop.__context__
        if isinstance(hidden, BrokenPipeError):  # typer would exit with 1
            raise hidden from None
        code = _as_exit_code(stop.code)
    except typer.Abort as abort:  # an answered prompt, or an EOFError of ours
        raise abort.__cause__ or KeyboardInterrupt from None
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _as_exit_code(code: object) -> int:
    if code is None:
        return EXIT_DONE
    if isinstance(code, int):
        return code
    raise TypeError(f"exit code {code!r} is not a number")


def _report_bug() -> int:
    import traceback

    traceback.print_exc()
    _say(
        f"this is a bug in omnicache {__version__}; "
        "please report it with the traceback above and the command you typed"
    )
    _drop_stdout_if_broken()
    return EXIT_BUG


def _say(message: str) -> None:
    from omnicache_cli.report.output import note

    note(f"omnicache: {message}")


def _drop_stdout_if_broken() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop_stdout()


def _drop_stdout() -> None:
    """What stdout still holds goes nowhere, so that Python's last flush cannot fail."""
    try:
        target = os.open(os.devnull, os.O_WRONLY)
        os.dup2(target, sys.stdout.fileno())
        os.close(target)
    except (OSError, ValueError, AttributeError):  # no stdout, or not a real file
        pass
