"""Traces any command that ends in a vLLM engine, by its environment alone.

Does not import vLLM: the command may run in another environment, as long as omnicache-cli is
installed in that one too.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from omnicache_cli import __version__
from omnicache_cli.engine.environment import Recording, tracing_variables
from omnicache_cli.errors import BadInputError
from omnicache_cli.trace.folder import finish_manifest, prepare_folder, write_manifest
from omnicache_cli.trace.manifest import Manifest
from omnicache_cli.trace.records import SCHEMA_VERSION

FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
"""Signals that the command gets when we get them."""


def trace_command(
    command: Sequence[str],
    folder: Path,
    *,
    force: bool = False,
    what: Recording | None = None,
) -> int:
    """Run a command with its vLLM processes traced into `folder`; its exit code as a shell's.

    Stdin, stdout and stderr are the command's own. BadInputError: it cannot be started.
    """
    if shutil.which(command[0]) is None:
        raise BadInputError(f"cannot run {command[0]}: no such program; check the command after --")
    new = prepare_folder(folder, force=force)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        tool_version=__version__,
        vllm_version=None,
        created_unix_ns=time.time_ns(),
        layout="command",
        program=Path(command[0]).name,
    )
    write_manifest(folder, manifest)
    variables = tracing_variables(folder, os.environ, what)
    try:
        process = subprocess.Popen(command, env={**os.environ, **variables})
    except OSError as error:
        finish_manifest(folder, manifest, error=type(error).__name__)
        new.give_back()
        raise BadInputError(
            f"cannot run {command[0]}: {error.strerror or error}; check the command after --"
        ) from error
    new.keep()
    with _forwarding(process):
        code = process.wait()
    finish_manifest(folder, manifest, finished=True, exit_code=code)
    return 128 - code if code < 0 else code


@contextmanager
def _forwarding(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Hand signals on. Ctrl-C reaches the command from the terminal: it is then not sent twice."""
    own_group = os.getpgrp()

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            from_terminal = number in (signal.SIGINT, signal.SIGQUIT) and in_foreground(own_group)
            if not from_terminal:
                process.send_signal(number)

    numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
    numbers = [one for one in numbers if signal.getsignal(one) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_foreground(group: int) -> bool:
    """Our process group owns a terminal, so the terminal's signals reach the command too."""
    for stream in (0, 1, 2):
        with contextlib.suppress(OSError):
            return os.tcgetpgrp(stream) == group
    return False
