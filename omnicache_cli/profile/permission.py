"""Why one process may not read another, and the setting that allows it."""

import os
import time
from pathlib import Path
from typing import Any

from omnicache_cli.advice import PTRACE_IN_A_CONTAINER

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
PROCESSES = Path("/proc")
OWN_STATUS = Path("/proc/self/status")
CAP_SYS_PTRACE = 19
LOOK_SECONDS = 0.2
"""For another tracer."""


def why_denied(pid: int) -> str:
    """What forbids to read this process, and how that is allowed; one sentence."""
    owner = _owner_of(pid)
    if os.geteuid() not in (0, owner) and owner is not None:
        return (
            f"it belongs to user {_name_of(owner)}, and this is {_name_of(os.geteuid())}; run "
            'omnicache as that user, or as root: sudo env "PATH=$PATH" omnicache profile ...'
        )
    tracer = _tracer_of(pid)
    if tracer is not None:
        return f"process {tracer} traces it already; end that one first"
    status = _status_of(OWN_STATUS)
    if _has_capability(status):
        return (
            "the kernel refuses it in spite of CAP_SYS_PTRACE: the process is in another user "
            "namespace, or a security module protects it; run omnicache where that process runs"
        )
    scope = _ptrace_scope()
    if scope == 3:
        return "kernel.yama.ptrace_scope is 3, which forbids it until the next boot"
    if scope in (1, 2):
        return (
            f"kernel.yama.ptrace_scope is {scope}; run sudo sysctl kernel.yama.ptrace_scope=0, or "
            f"give CAP_SYS_PTRACE: in a container {PTRACE_IN_A_CONTAINER}"
        )
    if status.get("Seccomp", "0") != "0":
        return f"a seccomp filter forbids ptrace; in a container: {PTRACE_IN_A_CONTAINER}"
    return f"CAP_SYS_PTRACE is missing; in a container: {PTRACE_IN_A_CONTAINER}"


def _owner_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _tracer_of(pid: int) -> int | None:
    """The process that traces a thread of this one, by ptrace: only one may. A py-spy does so for
    moments, hence the second look and all further ones."""
    until = time.monotonic() + LOOK_SECONDS
    while True:
        for status in sorted((PROCESSES / str(pid) / "task").glob("*/status")):
            tracer = _status_of(status).get("TracerPid", "0")
            if tracer != "0":
                return int(tracer)
        if time.monotonic() > until:
            return None


def _status_of(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs: list[Any] = [line.partition(":") for line in text.splitlines()]
    return {name: value.strip() for name, _, value in pairs}


def _has_capability(status: dict[str, str]) -> bool:
    return bool(int(status.get("CapEff", "0"), 16) >> CAP_SYS_PTRACE & 1)


def _ptrace_scope() -> int | None:
    try:
        return int(PTRACE_SCOPE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
