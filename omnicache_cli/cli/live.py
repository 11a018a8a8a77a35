"""The live view of a run: beside a recording (`trace --live`), or alone (`show --follow`)."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.errors import RefusedOutputError
from omnicache_cli.report.output import deliver, note

LIVE_INTERVAL = 0.5
"""Seconds between two looks on a terminal."""

LINE_INTERVAL = 5.0
"""Seconds between two lines where there is no terminal, or a command writes to it too."""

END_SECONDS = 30.0
"""How long the view may take for its last look: a moment, and where it has only begun, on a machine
that is busy, its imports before."""


def show_follow(folder: Path, interval: float) -> None:
    """Follow a run on stdout until it has ended."""
    from omnicache_cli.live.follow import check_followed, follow
    from omnicache_cli.live.screen import LineScreen, terminal_screen

    if sys.stdout is None:
        raise RefusedOutputError("stdout is closed; --follow writes to it")
    check_followed(folder)
    with termination_as_interrupt():
        if sys.stdout.isatty():
            with terminal_screen(sys.stdout) as screen:
                follow(folder, screen, interval=interval)
        else:
            lines = LineScreen(lambda line: deliver(f"{line}\n", None))
            follow(folder, lines, interval=interval)


@contextmanager
def live_view(folder: Path, *, beside_a_command: bool = False) -> Iterator[None]:
    """Draw the run that the block records, on stderr, in a process of its own.

    stdout and stderr are a command's too where one runs: a table that is drawn over and over would
    wipe out its lines, so it gets lines of ours between them; and none where stderr is no terminal.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if sys.stderr is None or (beside_a_command and not is_terminal):
        note("--live is left out: stderr is no terminal, and it belongs to the command")
        yield
        return
    is_shared = beside_a_command and sys.stdout is not None and sys.stdout.isatty()
    form = "terminal" if is_terminal and not is_shared else "lines"
    interval = LIVE_INTERVAL if form == "terminal" else LINE_INTERVAL
    command = [sys.executable, "-P", "-m", "omnicache_cli.live", str(folder.absolute())]
    view = subprocess.Popen(
        [*command, str(time.time_ns()), str(interval), form],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        if view.stdin is not None:
            view.stdin.close()  # it has a last look, and ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            view.wait(END_SECONDS)
        if view.poll() is None:
            view.kill()
            view.wait()
