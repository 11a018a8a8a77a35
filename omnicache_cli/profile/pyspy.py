"""One py-spy on one process: started, told to end, and understood. Knows no engine.

It is told to end by SIGINT, as by Ctrl-C, upon which it writes its file. It must not be killed
while it holds the process: a stop signal may then be left behind (see `kill`).
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from omnicache_cli.advice import install_extra
from omnicache_cli.errors import (
    BadInputError,
    EngineFailedError,
    EngineMissingError,
    OmnicacheError,
    RefusedOutputError,
)
from omnicache_cli.profile.parent import end_with_parent
from omnicache_cli.profile.permission import why_denied
from omnicache_cli.profile.sampling import Sampling

PROGRAM = "py-spy"

PATIENCE_SECONDS = 120
MAX_WORDS = 1 << 14
"""Bytes of py-spy's talk that are read, at its beginning and at its end."""

_COUNTS = re.compile(r"Samples: (\d+) Errors: (\d+)")
_SAMPLING = "Sampling process"
_DENIED = ("Permission denied", "Permission Denied", "Operation not permitted")
_NOT_PYTHON = ("Failed to find python version", "Failed to find a python interpreter")
_GONE = ("No such file or directory", "No such process")
_NATIVE = ("--native", "native", "unwind")


def find_py_spy() -> str:
    """The program, on the path or beside this Python. EngineMissingError: it is not installed."""
    places = os.pathsep.join((os.environ.get("PATH", ""), os.path.dirname(sys.executable)))
    program = shutil.which(PROGRAM, path=places)
    if program is None:
        raise EngineMissingError(f"py-spy is not installed; {install_extra('profile')}")
    return program


def py_spy_version(program: str) -> str:
    """EngineMissingError: the program does not run."""
    try:
        ran = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineMissingError(
            f"{program} does not run: {error}; {install_extra('profile')}"
        ) from error
    return ran.stdout.strip().removeprefix("py-spy ")


def check_permission(program: str) -> None:
    """Look at this very process: what is refused here is refused for an engine too.

    BadInputError: it cannot be looked at, with the setting that would allow it.
    """
    try:
        looked = subprocess.run(
            [program, "dump", "--pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineFailedError(f"py-spy does not look at this Python: {error}") from error
    if looked.returncode:
        raise what_failed(os.getpid(), looked.stderr, "this Python")


class Recorder:
    """A py-spy that records one process into one file."""

    def __init__(self, program: str, pid: int, sampling: Sampling, path: Path) -> None:
        self.pid = pid
        self.path = path
        self.sampling = sampling
        self.spawned_ns = time.time_ns()
        self.sampling_ns: int | None = None  # when it was seen to sample
        self.told_to_end_ns: int | None = None
        self.ended_ns: int | None = None
        self._out, self._err = path.with_suffix(".out"), path.with_suffix(".err")
        command = [program, "record", "--pid", str(pid), "--output", str(path)]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [*command, *sampling.arguments()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "RUST_BACKTRACE": "0", "NO_COLOR": "1"},
                start_new_session=True,  # a Ctrl-C is for the engine; we say when to end
                preexec_fn=_prepare,  # noqa: PLW1509 (this process has one thread)
            )

    def poll(self) -> None:
        """See how far it is."""
        if self.sampling_ns is None and _SAMPLING in _text(self._out):
            self.sampling_ns = time.time_ns()
        if self.ended_ns is None and self._process.poll() is not None:
            self.ended_ns = time.time_ns()

    @property
    def is_starting(self) -> bool:
        return self.sampling_ns is None and self.ended_ns is None

    @property
    def has_ended(self) -> bool:
        return self.ended_ns is not None

    @property
    def counts(self) -> tuple[int, int] | None:
        """(stacks recorded, instants that failed), once the file is written."""
        found = _COUNTS.search(_text(self._out)) if self.has_ended else None
        return None if found is None else (int(found[1]), int(found[2]))

    @property
    def failure(self) -> OmnicacheError | None:
        """Why there is no recording, once it has ended without one."""
        if not self.has_ended or self.counts is not None:
            return None
        if self._process.returncode in (-signal.SIGINT, -signal.SIGKILL):
            return EngineFailedError(f"py-spy was ended before it had sampled process {self.pid}")
        return what_failed(self.pid, _text(self._err), f"process {self.pid}")

    @property
    def failed_for_native(self) -> bool:
        """It did not come to sampling, and native frames are why."""
        words = _text(self._err)
        return (
            self.sampling.native
            and self.has_ended
            and self.sampling_ns is None
            and any(word in words for word in _NATIVE)
        )

    def tell_to_end(self) -> None:
        """Let it write its file. Harmless when repeated."""
        self.poll()
        if self.told_to_end_ns is None and not self.has_ended:
            self.told_to_end_ns = time.time_ns()
            self._process.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.poll()
        return self.has_ended

    def kill(self) -> None:
        """The last resort. The process goes on, also where a stop signal was left behind."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)
        self.poll()


def _prepare() -> None:
    end_with_parent(signal.SIGINT)


def _text(path: Path) -> str:
    """The beginning of what py-spy said; a py-spy that falls behind says so again and again."""
    with path.open("rb") as stream:
        head = stream.read(MAX_WORDS)
        stream.seek(max(len(head), os.fstat(stream.fileno()).st_size - MAX_WORDS))
        return (head + stream.read()).decode("utf-8", "replace")


def _is_full(folder: str) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < MAX_WORDS
    return False


def what_failed(pid: int, words: str, process: str) -> OmnicacheError:
    """What py-spy's words mean, and what to do."""
    if any(one in words for one in _DENIED):
        return BadInputError(f"py-spy may not read {process}: {why_denied(pid)}")
    if any(one in words for one in _NOT_PYTHON):
        return BadInputError(
            f"{process} runs no Python that py-spy knows; name the process of an engine"
        )
    if any(one in words for one in _GONE) and not os.path.exists(f"/proc/{pid}/exe"):
        return EngineFailedError(f"{process} ended before py-spy could look at it")
    if "No space left" in words or (not words and _is_full(tempfile.gettempdir())):
        return RefusedOutputError(
            f"py-spy could not write its recording of {process}: no space left in "
            f"{tempfile.gettempdir()}; free some, or set TMPDIR"
        )
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    first = lines[0].removeprefix("Error: ") if lines else "no reason given"
    return EngineFailedError(f"py-spy failed on {process}: {first}")
