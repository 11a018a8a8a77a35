"""The processes that the doctor starts: each with a group of its own, and all ended at once."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Children:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._is_over = False

    @contextmanager
    def started(
        self, command: Sequence[str], *, stdin: int = subprocess.DEVNULL, stderr: int
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """A process with its stdout piped; at the end of the block it is killed with its group.

        OSError: it does not start. RuntimeError: all have been ended, and no other is to start.
        """
        with self._lock:
            if self._is_over:
                raise RuntimeError("no process is started once all have been ended")
            child = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
            self._groups.add(child.pid)
        try:
            yield child
        finally:
            with self._lock:
                self._groups.discard(child.pid)
                _kill(child.pid)
            child.wait()

    def run(
        self, command: Sequence[str], *, stderr: int, limit_s: float
    ) -> "subprocess.CompletedProcess[bytes]":
        """One that is waited for. Raises as `started`, and subprocess.TimeoutExpired."""
        with self.started(command, stderr=stderr) as child:
            try:
                out, err = child.communicate(timeout=limit_s)
            finally:
                for stream in (child.stdout, child.stderr):
                    if stream is not None:
                        stream.close()
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    def end_all(self) -> None:
        """Kill all, and let no other start."""
        with self._lock:
            self._is_over = True
            for group in self._groups:
                _kill(group)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
