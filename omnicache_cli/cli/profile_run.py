"""Runs what is to be profiled, or looks at what runs, with py-spys on it; ends all of them.

A run is recorded by a fork of this process, exactly as `omnicache trace` records it. This process
stays small and outside of what is sampled, and lives on when the engine is killed.
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NoReturn

import typer

from omnicache_cli.cli.commands import COMMAND_TO_RUN
from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.trace import record_run
from omnicache_cli.errors import EXIT_ENGINE_FAILED, EXIT_INTERRUPTED, OmnicacheError
from omnicache_cli.profile.parent import end_with_parent
from omnicache_cli.profile.results import Profile, write_profile
from omnicache_cli.profile.roles import Role
from omnicache_cli.profile.sampling import Sampling
from omnicache_cli.profile.watch import POLL_SECONDS, Sampled, Wanted, Watch, check_process
from omnicache_cli.report.output import note
from omnicache_cli.trace.folder import claimed_folder

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 2
"""Signals that end the sampling and are handed on; one more ends this process."""

CHILD_INTERRUPTED = 131
"""Exit code of our own child that was interrupted: only one of the two says so."""

START_SECONDS = 60
"""That the workload waits for the py-spys to sample."""

UP, DONE, FAILED = b"u", b"d", b"f"
GO_ON, STOP = b"g", b"x"


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for."""

    program: str  # py-spy's path
    py_spy_version: str
    sampling: Sampling
    roles: frozenset[Role]
    duration: float | None  # seconds
    roles_are_given: bool

    def is_over(self, watch: Watch) -> bool:
        """The time to sample has passed since the first py-spy sampled."""
        first = watch.first_sampling_ns
        if self.duration is None or first is None:
            return False
        return time.time_ns() - first >= self.duration * 1e9


@dataclass(frozen=True, slots=True)
class Ended:
    """A recorded run: the exit code of `omnicache trace`, or of the command, and what was sampled.

    `has_failed`: the code is ours, and what failed has been said.
    """

    code: int
    has_failed: bool
    sampled: list[Sampled]


class Interrupts:
    """While it is entered, counts the signals that ask to end, and hands them on."""

    def __init__(self) -> None:
        self.count = 0
        self.hand_on: Callable[[int], None] = lambda number: None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        self._before = {
            number: signal.signal(number, self._handle)
            for number in SIGNALS
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN  # nohup
        }
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        from omnicache_cli.engine.command import in_foreground

        self.count += 1
        if self.count > PATIENCE:
            raise KeyboardInterrupt
        if number != signal.SIGINT or not in_foreground(os.getpgrp()):
            self.hand_on(number)


def profile_process(plan: Plan, pid: int, folder: Path, *, force: bool) -> Profile:
    """Sample a process that runs, and those below it, and write the files.

    BadInputError: there is no such process, it is no Python, or it must not be read.
    """
    check_process(pid)
    is_made = not folder.exists()
    with claimed_folder(folder, force=force) as new:
        try:
            profile = _profile_into(plan, pid, folder)
        except BaseException:
            new.give_back()
            if is_made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        new.keep()
        return profile


def _profile_into(plan: Plan, pid: int, folder: Path) -> Profile:
    with TemporaryDirectory(prefix="omnicache-") as scratch, Interrupts() as interrupts:
        wanted = Wanted(plan.roles, from_start=True, top_if_none=not plan.roles_are_given)
        with Watch(plan.program, pid, wanted, plan.sampling, Path(scratch)) as watch:
            while not (interrupts.count or plan.is_over(watch)):
                watch.poll()
                if not watch.num_running:  # the processes ended, or there are none
                    break
                _sleep(plan, watch)
            watch.finish()
            found = _found(watch)
        return write_profile(folder, found, plan.sampling, plan.py_spy_version)


@contextmanager
def profiled_run(
    context: typer.Context, plan: Plan, folder: Path, *, startup: bool
) -> Iterator["Ended"]:
    """Record the model or the command of the command line, sampled. The recordings are gone at the
    end of the block."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        _record(context, folder, theirs)
    theirs.close()
    is_command = context.meta.get(COMMAND_TO_RUN) is not None
    in_process = not is_command and not context.params["engine_process"]
    wanted = Wanted(plan.roles, "in-process engine" if in_process else None, from_start=startup)
    with TemporaryDirectory(prefix="omnicache-") as scratch:
        watch = Watch(plan.program, child, wanted, plan.sampling, Path(scratch), run=folder)
        with Interrupts() as interrupts, _child(child) as ended, watch:
            interrupts.hand_on = partial(_send, child)
            code, has_failed = None, False
            while code is None:
                watch.poll()
                if interrupts.count or plan.is_over(watch):
                    watch.tell_to_end()
                has_failed |= _answer(ours, watch, interrupts)
                _sleep(plan, watch, ours)
                code = ended()
            interrupts.hand_on = lambda number: None
            has_failed |= _answer(ours, watch, interrupts)
            watch.finish()
        if has_failed and code == CHILD_INTERRUPTED:
            code = EXIT_INTERRUPTED
        with termination_as_interrupt():
            yield Ended(code, has_failed, _found(watch))


def _record(context: typer.Context, folder: Path, link: socket.socket) -> NoReturn:
    """In the child: what `omnicache trace` does, up to the end of the run."""
    end_with_parent(signal.SIGTERM)
    try:
        code, _ = record_run(context, folder, _told(link))
    except OmnicacheError:
        _say(link, FAILED)
        raise
    except KeyboardInterrupt:
        _say(link, FAILED)
        raise typer.Exit(CHILD_INTERRUPTED) from None
    raise typer.Exit(code)


@contextmanager
def _told(link: socket.socket) -> Iterator[None]:
    """In the child: the engine is up, and then the workload has been sent."""
    _ask(link, UP)
    try:
        yield
    finally:
        _ask(link, DONE)


def _ask(link: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError):
        link.sendall(word)
        if link.recv(1) == STOP:
            raise typer.Exit(EXIT_ENGINE_FAILED)


def _answer(link: socket.socket, watch: Watch, interrupts: Interrupts) -> bool:
    """Do what the child has asked for, if anything. True: it says that it has failed."""
    readable, _, _ = select.select([link], [], [], 0)
    word = link.recv(1) if readable else b""
    if word == UP:
        watch.begin()
        until = time.monotonic() + START_SECONDS
        watch.poll()
        while watch.num_starting and not interrupts.count and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 10)
            watch.poll()
        _say(link, GO_ON if watch.num_running else STOP)
    elif word == DONE:
        watch.finish()
        _say(link, GO_ON)
    return word == FAILED


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _say(link: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError):
        link.sendall(word)


@contextmanager
def _child(pid: int) -> Iterator[Callable[[], int | None]]:
    """Yields what tells the exit code of the child, as a shell's, once it has ended."""
    code: int | None = None

    def ended() -> int | None:
        nonlocal code
        if code is None:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                raw = os.waitstatus_to_exitcode(status)
                code = 128 - raw if raw < 0 else raw
        return code

    try:
        yield ended
    finally:
        if ended() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)


def _sleep(plan: Plan, watch: Watch, link: socket.socket | None = None) -> None:
    """Until the next look: less where the time to sample ends before, or the child speaks."""
    seconds = POLL_SECONDS
    first = watch.first_sampling_ns
    if watch.num_starting:
        seconds /= 10
    elif plan.duration is not None and first is not None:
        rest = plan.duration - (time.time_ns() - first) / 1e9
        seconds = min(seconds, rest) if rest > 0 else seconds
    select.select([link] if link is not None else [], [], [], seconds)


def _found(watch: Watch) -> list[Sampled]:
    for line in watch.notes:
        note(line)
    return list(watch.sampled.values())
