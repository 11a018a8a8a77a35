"""Finds the processes of an engine under one process, and keeps a py-spy on each.

Looks at the process table and at the run's own files; the engine is asked nothing.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnicache_cli.advice import install_extra
from omnicache_cli.errors import BadInputError, EngineMissingError
from omnicache_cli.profile.pyspy import Recorder
from omnicache_cli.profile.roles import (
    Role,
    TracedProcess,
    TracedProcesses,
    role_of,
    shown_command,
)
from omnicache_cli.profile.sampling import Sampling

POLL_SECONDS = 0.2

WRITE_SECONDS = 120
"""For a py-spy to write its file; one that takes longer is killed."""


@dataclass(slots=True)
class Sampled:
    """A process that has been found, and its py-spy."""

    pid: int
    role: Role
    command: str
    recorder: Recorder
    alive_until_ns: dict[int, int] = field(default_factory=dict)  # of its threads, by number

    def look(self) -> None:
        """See how far py-spy is, and which threads are there."""
        self.recorder.poll()
        if not self.recorder.has_ended:
            now = time.time_ns()
            with contextlib.suppress(OSError):
                for name in os.listdir(f"/proc/{self.pid}/task"):
                    self.alive_until_ns[int(name)] = now


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which processes are to be sampled, and from when."""

    roles: frozenset[Role]
    own_role: Role | None = None  # of the process at the top, where it is known
    from_start: bool = False  # False: from the first step of its engine that is recorded
    top_if_none: bool = False  # the process at the top, where the first look finds no wanted one


class Watch:
    """The processes under `root`, and the py-spys on them. Ends them all when it is left."""

    def __init__(
        self,
        program: str,
        root: int,
        wanted: Wanted,
        sampling: Sampling,
        scratch: Path,
        run: Path | None = None,
    ) -> None:
        """`scratch`: a folder for recordings. `run`: where the processes are traced into.

        EngineMissingError: psutil is not installed.
        """
        self._psutil = _psutil()
        self._program = program
        self._root = root
        self._wanted = wanted
        self._sampling = sampling
        self._scratch = scratch
        self._traced = TracedProcesses(run) if run is not None else None
        self._open = wanted.from_start
        self._ended = False
        self._takes_top = False
        self._looked = False
        self.notes: list[str] = []
        self.sampled: dict[int, Sampled] = {}

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for one in self.sampled.values():
            one.recorder.kill()

    def begin(self) -> None:
        """Sample from now on, whether or not a step has been recorded."""
        self._open = True

    def poll(self) -> None:
        """Look for new processes, put a py-spy on them, and see how far the others are."""
        if not self._ended:
            found = self._found()
            if self._wanted.top_if_none and not found and not self._looked:
                self._takes_top = True
                found = self._found()
            self._looked = True
            for pid, role, command in found:
                if pid not in self.sampled:
                    self._start(pid, role, command)
        for one in self.sampled.values():
            one.look()
            if one.recorder.failed_for_native:
                self._without_native(one)

    @property
    def num_starting(self) -> int:
        return sum(one.recorder.is_starting for one in self.sampled.values())

    @property
    def num_running(self) -> int:
        return sum(not one.recorder.has_ended for one in self.sampled.values())

    @property
    def first_sampling_ns(self) -> int | None:
        """When the first py-spy was seen to sample."""
        seen = [one.recorder.sampling_ns for one in self.sampled.values()]
        return min((one for one in seen if one is not None), default=None)

    def tell_to_end(self) -> None:
        """No new processes, and an end of those that are sampled. Harmless when repeated."""
        self._ended = True
        for one in self.sampled.values():
            one.look()
            one.recorder.tell_to_end()

    def finish(self) -> None:
        """End all, and wait until their files are written; one that does not end is killed."""
        self.tell_to_end()
        until = time.monotonic() + WRITE_SECONDS
        for one in self.sampled.values():
            if not one.recorder.wait(max(0.0, until - time.monotonic())):
                self.notes.append(f"py-spy on process {one.pid} did not end and was killed")
                one.recorder.kill()

    def _start(self, pid: int, role: Role, command: str, sampling: Sampling | None = None) -> None:
        chosen = sampling or self._sampling
        path = self._scratch / f"{pid}.{chosen.recorded_as}"
        recorder = Recorder(self._program, pid, chosen, path)
        self.sampled[pid] = Sampled(pid, role, command, recorder)

    def _without_native(self, one: Sampled) -> None:
        self.notes.append(
            f"process {one.pid}: native frames cannot be read ({one.recorder.failure}); sampled "
            "without them"
        )
        self._sampling = self._sampling.without_native()
        self._start(one.pid, one.role, one.command)

    def _found(self) -> list[tuple[int, Role, str]]:
        """The processes of the wanted roles whose time has come."""
        traced = self._traced.update() if self._traced is not None else {}
        tree = self._tree()
        parents = {process.pid: parent for process, parent, _ in tree}
        stepped = {pid for pid, one in traced.items() if one.has_stepped}
        found = []
        for process, _, command_line in tree:
            role = self._role(process.pid, command_line, traced)
            due = self._open or _is_related(process.pid, stepped, parents)
            wanted = role in self._wanted.roles or (process.pid == self._root and self._takes_top)
            if due and wanted:
                found.append((process.pid, role, shown_command(command_line, process)))
        return found

    def _role(self, pid: int, command_line: list[str], traced: dict[int, TracedProcess]) -> Role:
        if pid == self._root and self._wanted.own_role is not None:
            return self._wanted.own_role
        return role_of(command_line, traced.get(pid))

    def _tree(self) -> list[tuple[Any, int, list[str]]]:
        """(process, number of its parent, command line) of the root and all below it that live."""
        found = []
        with contextlib.suppress(self._psutil.Error):
            root = self._psutil.Process(self._root)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(self._psutil.Error):
                    if process.status() != self._psutil.STATUS_ZOMBIE:
                        found.append((process, process.ppid(), process.cmdline()))
        return found


def check_process(pid: int) -> None:
    """BadInputError: there is no such process, or it runs no program that could be sampled."""
    psutil = _psutil()
    if pid == os.getpid():
        raise BadInputError(f"process {pid} is this omnicache; name a running engine")
    try:
        has_program = bool(psutil.Process(pid).cmdline())
    except psutil.ZombieProcess as error:
        raise BadInputError(
            f"process {pid} has ended: it is a zombie; name a running engine"
        ) from error
    except psutil.NoSuchProcess as error:
        raise BadInputError(
            f"no process {pid}; name a running engine: pgrep -f EngineCore, or its server"
        ) from error
    except psutil.AccessDenied:
        return  # py-spy is refused too, and that is explained
    if not has_program:
        raise BadInputError(f"process {pid} is a thread of the kernel; name a running engine")


def _is_related(pid: int, stepped: Iterable[int], parents: dict[int, int]) -> bool:
    """The process, one above or one below it has recorded a step."""
    line = _line_of(pid, parents)
    return any(one in line or pid in _line_of(one, parents) for one in stepped)


def _line_of(pid: int, parents: dict[int, int]) -> set[int]:
    line = {pid}
    while pid in parents and parents[pid] not in line:
        pid = parents[pid]
        line.add(pid)
    return line


def _psutil() -> Any:
    try:
        import psutil
    except ModuleNotFoundError as error:
        raise EngineMissingError(f"psutil is not installed; {install_extra('profile')}") from error
    return psutil
