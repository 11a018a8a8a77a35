"""Runs `child`: an import may take so long and no longer, and a crash costs that import only."""

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from omnicache_cli.doctor.facts import Probe
from omnicache_cli.engine.doctor.children import Children

COMMAND = (sys.executable, "-P", "-m", "omnicache_cli.engine.doctor.child")


def probe(
    names: Sequence[str], *, limit_s: float, children: Children | None = None
) -> dict[str, Probe]:
    """How each of these went, in this order and in one process, as long as it lives.

    `limit_s`: seconds for each; what takes longer hangs, and is killed.
    RuntimeError: the `children` have been ended.
    """
    children = children or Children()
    found: dict[str, Probe] = {}
    while rest := [name for name in names if name not in found]:
        found |= _in_one_child(rest, limit_s, children)
    return found


def _in_one_child(names: Sequence[str], limit_s: float, children: Children) -> dict[str, Probe]:
    """Up to the first that does not survive; at least one."""
    found: dict[str, Probe] = {}
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # whatever an import started ends with the block, and so the reader does
    with children.started([*COMMAND, *names], stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
        reader.start()
        start = time.monotonic()
        while len(found) < len(names):
            name = names[len(found)]
            try:
                line = lines.get(timeout=max(0.0, start + limit_s - time.monotonic()))
            except queue.Empty:
                found[name] = Probe("hangs", limit_s, f"no answer within {limit_s:g} s")
                break
            if not line:
                error = _end_of(child.wait())
                found[name] = Probe("crashes", time.monotonic() - start, error)
                break
            said: Mapping[str, Any] = json.loads(line)
            if "ended" in said:
                found[name] = Probe(
                    said["outcome"], said["seconds"], said.get("error", ""), said.get("details", {})
                )
            start = time.monotonic()
    reader.join()
    child.stdout.close()
    return found


def _read(stream: IO[bytes], lines: "queue.SimpleQueue[bytes]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _end_of(status: int) -> str:
    if status >= 0:
        return f"it ends the process with exit code {status}"
    try:
        return f"it ends the process with {signal.Signals(-status).name}"
    except ValueError:
        return f"it ends the process with signal {-status}"
