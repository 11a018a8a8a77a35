"""Commands that tests start and trace: servers above all."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STARTING_SECONDS = 480

_started: list["subprocess.Popen[str]"] = []


def traced(run: Path, *command: str, **environment: str) -> "subprocess.Popen[str]":
    """A traced command, in a session of its own; what is left of it ends with the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "omnicache_cli.cli", "trace", "-o", str(run), "--", *command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def end_all() -> None:
    """Kill what a test that failed has left, with all of its session."""
    for process in _started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    _started.clear()


def wait_until(ready: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # all of its session holds the pipe
            pytest.fail(f"the command did not get that far:\n{process.communicate()[0][-4000:]}")
        time.sleep(0.2)


def ended(process: "subprocess.Popen[str]") -> str:
    """What the command printed; it and all it started are gone."""
    printed, _ = process.communicate(timeout=120)
    deadline = time.monotonic() + 30  # multiprocessing's resource tracker leaves a moment later
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return printed
        time.sleep(0.2)
    pytest.fail(f"processes are left behind:\n{printed[-4000:]}")


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def metric(page: str, name: str) -> int:
    (line,) = (line for line in page.splitlines() if line.startswith(f"vllm:{name}_total{{"))
    return int(float(line.rpartition(" ")[2]))
