"""`python -m omnicache_cli.live FOLDER SINCE INTERVAL FORM`: the view of `omnicache trace --live`.

A process of its own, so that it takes no time from an engine in the process that started it. It
waits for the run that was started at SINCE (ns, wall clock), draws on stderr, and ends with the
run, or when its stdin ends: closed by who started it, or because that is gone. It ignores Ctrl-C,
which is for the run. Whatever fails here, it must not disturb the run: it says so in one line.
"""

import contextlib
import os
import select
import signal
import sys
from pathlib import Path

from omnicache_cli.errors import OmnicacheError
from omnicache_cli.live.follow import follow
from omnicache_cli.live.screen import LineScreen, terminal_screen
from omnicache_cli.report.output import note
from omnicache_cli.trace.manifest import read_manifest


def main(folder: Path, since_ns: int, interval: float, form: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)

    def wait(seconds: float) -> bool:
        """True, at once: stdin has ended."""
        return bool(select.select([sys.stdin], [], [], seconds)[0])

    def is_over() -> bool:
        return wait(0)

    while not _has_begun(folder, since_ns):
        if wait(interval):
            return
    if form == "terminal":
        with terminal_screen(sys.stderr) as screen:
            follow(folder, screen, interval=interval, wait=wait, is_over=is_over)
    else:
        follow(folder, LineScreen(note), interval=interval, wait=wait, is_over=is_over)


def _has_begun(folder: Path, since_ns: int) -> bool:
    """The folder holds the new run, and not one that it replaces."""
    with contextlib.suppress(OmnicacheError, OSError):
        manifest = read_manifest(folder)
        return manifest is not None and manifest.created_unix_ns >= since_ns
    return False


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
    except (OmnicacheError, OSError) as error:
        note(f"omnicache: the live view has ended: {error}")
