"""Why one process may not read another, and the setting that allows it."""

import os
from pathlib import Path
from typing import Any

from omnicache_cli.advice import PTRACE_IN_A_CONTAINER

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
OWN_STATUS = Path("/proc/self/status")
CAP_SYS_PTRACE = 19


def why_denied(pid: int) -> str:
    """What forbids to read this process, and how that is allowed; one sentence."""
    owner = _owner_of(pid)
    if os.geteuid() not in (0, owner) and owner is not None:
        return (
            f"it belongs to user {_name_of(owner)}, and this is {_name_of(os.geteuid())}; run "
            'omnicache as that user, or as root: sudo env "PATH=$PATH" omnicache profile ...'
        )
    status = _status()
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


def _status() -> dict[str, str]:
    try:
        text = OWN_STATUS.read_text(encoding="utf-8", errors="replace")
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
