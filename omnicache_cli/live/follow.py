"""Follows a run until it has ended: looks, counts, draws, waits."""

import time
from collections.abc import Callable
from pathlib import Path

from omnicache_cli.errors import BadTraceError
from omnicache_cli.live.screen import Screen
from omnicache_cli.live.tail import FolderTail
from omnicache_cli.live.totals import RunTotals
from omnicache_cli.trace.files import SUFFIX, rank_files
from omnicache_cli.trace.manifest import MANIFEST_NAME, Manifest, read_manifest
from omnicache_cli.trace.views.words import counted

QUIET_SECONDS = (3600, 600, 60, 10)
"""Without a record for longer than one of these, the view says so: the longest of them."""


def check_followed(folder: Path) -> None:
    """BadTraceError: it is no run folder, nor an empty one that may become one."""
    if not folder.is_dir():
        raise BadTraceError(
            f"{folder} is not a run folder; name the folder given to `omnicache trace -o`"
        )
    if any(folder.iterdir()) and read_manifest(folder) is None and not rank_files(folder):
        raise BadTraceError(
            f"{folder} is not a run folder: it holds no *{SUFFIX} file; name one of trace -o"
        )


def follow(
    folder: Path,
    screen: Screen,
    *,
    interval: float,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    is_over: Callable[[], bool] = lambda: False,
) -> RunTotals:
    """Draw the totals every `interval` seconds, until the run has ended or `is_over` says so.

    A run has ended when its run.json says so; one without, when each of its files has its end
    record. BadTraceError: the folder is gone. An interrupt passes through; what was read by then
    has been drawn.
    """
    totals, tail = RunTotals(), FolderTail(folder)
    changed_at = clock()
    while True:
        has_ended = is_over() or _has_ended(folder, totals)  # before the last look, not after it
        before = totals.num_records
        for file, record in tail.read():
            totals.add(file, record)
        if totals.num_records != before:
            changed_at = clock()
        is_quiet = totals.num_records and not has_ended  # an engine that starts has no record yet
        remarks = _remarks(tail, totals, clock() - changed_at if is_quiet else 0)
        screen.draw(totals, "; ".join(remarks))
        if has_ended:
            return totals
        wait(interval)


def _has_ended(folder: Path, totals: RunTotals) -> bool:
    if not folder.is_dir():
        raise BadTraceError(f"{folder} is gone; name a run folder that is there")
    manifest = _manifest(folder)
    if manifest is not None:
        return manifest.finished or manifest.error is not None
    if (folder / MANIFEST_NAME).exists():
        return False  # it is being replaced
    files = {path.name for path in rank_files(folder)}
    return bool(files) and files <= totals.ended_files


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except BadTraceError:
        return None


def _remarks(tail: FolderTail, totals: RunTotals, quiet_seconds: float) -> list[str]:
    remarks = []
    longest = next((one for one in QUIET_SECONDS if quiet_seconds >= one), None)
    if longest is not None:
        remarks.append(f"no record for more than {longest} s")
    if totals.num_dropped:
        remarks.append(f"{counted(totals.num_dropped, 'record')} could not be written")
    if tail.num_damaged:
        remarks.append(f"{counted(tail.num_damaged, 'line')} could not be read")
    return remarks
