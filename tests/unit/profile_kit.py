"""Small Python programs for the real py-spy to sample, and command lines of `omnicache profile`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUSY = """
import sys, threading, time

def spin():
    return sum(range(4000))

def middle(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        spin()

def outermost(seconds):
    middle(seconds)

def wait_for_ever():
    threading.Event().wait()

threading.Thread(target=wait_for_ever, daemon=True, name="waiting").start()
print("ready", flush=True)
outermost(float(sys.argv[1]))
"""

WAITING = "import threading\nprint('ready', flush=True)\nthreading.Event().wait()\n"

ENGINE = """
import json, os, socket, sys, time
from pathlib import Path
from omnicache_cli.engine.plugin import ENVIRONMENT_VARIABLE
from tests.unit.run_builder import Admit, Recording

def step(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(4000))

def before_the_first_step(seconds):
    step(seconds)

folder = Path(json.loads(os.environ[ENVIRONMENT_VARIABLE])["folder"])
recording = Recording()
request = recording.arrive("p0", 32)
recording.step({request: 32}, admit={request: Admit([[1, 2]])})
before_the_first_step(float(sys.argv[1]))
scratch = folder.parent / "scratch"
(path,) = recording.write(scratch).glob("*.jsonl")
text = path.read_text().replace('"pid":1,', f'"pid":{os.getpid()},', 1)
(folder / f"{socket.gethostname()}.{os.getpid()}.trace.jsonl").write_text(text)
step(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""
"""Something that records a step as an engine does, without an engine."""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        return self.err.splitlines()[-1]


def omnicache(*arguments: object, **environment: str) -> Ran:
    done = subprocess.run(
        command_line(*arguments),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=surroundings(**environment),
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "omnicache_cli.cli", *map(str, arguments)]


def surroundings(**changes: str) -> dict[str, str]:
    import os

    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **changes}


@contextmanager
def running(program: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """A Python program, once it has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
