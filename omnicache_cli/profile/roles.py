"""Which process of a tree is which part of an engine.

vLLM names its child processes (VLLM::EngineCore, VLLM::Worker_TP0), where setproctitle is
installed. What it does not name, the run's own files do: a process that declares a scheduler or a
model runner there is one. A single API server is known by its command.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from omnicache_cli.errors import BadTraceError, UsageError
from omnicache_cli.trace.files import rank_files, read_records
from omnicache_cli.trace.records import (
    EngineSource,
    ForwardStep,
    Header,
    RankStep,
    SchedulerStep,
    WorkerSource,
)

Role = Literal["engine core", "worker", "in-process engine", "API server", "coordinator", "other"]

DEFAULT_ROLES: frozenset[Role] = frozenset({"engine core", "worker", "in-process engine"})
ALL = "all"
OPTIONS: dict[str, Role] = {role.lower().replace(" ", "-"): role for role in get_args(Role)}
"""As the roles are written on a command line."""

_OF_TITLES: tuple[tuple[str, Role], ...] = (
    ("EngineCore", "engine core"),
    ("StageEngineCoreProc", "engine core"),
    ("Worker", "worker"),
    ("VllmWorker", "worker"),
    ("DiffusionWorker", "worker"),
    ("APIServer", "API server"),
    ("DPCoordinator", "coordinator"),
)
"""Beginnings of the names that vLLM and vLLM-Omni give to processes."""

_PROGRAMS = frozenset(
    ("vllm", "vllm-omni", "vllm.entrypoints.cli.main", "vllm_omni.entrypoints.cli.main")
)
"""Whose word `serve` starts a server."""

_SERVER = re.compile(r"(.*[./])?vllm(_omni)?[./]entrypoints[./](.*[./])?\w*server\b.*")
"""A server as a module or a file: vllm.entrypoints.openai.api_server."""

_RUNS = re.compile(r"-[bBdEhiIOPqsSuvVx]*(?P<kind>[mc])(?P<what>.*)")
"""Python's options -m and -c, perhaps behind others that take no value."""

_OPTIONS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")

TITLE_MARK = "::"
"""Stands between vLLM's prefix, which can be set, and the name."""


@dataclass(slots=True)
class TracedProcess:
    """What a rank file says of the process that writes it, as far as it is written."""

    name: str = ""  # multiprocessing's
    has_scheduler: bool = False
    has_runner: bool = False
    has_stepped: bool = False


class TracedProcesses:
    """Follows the rank files of a run that is being recorded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_file: dict[Path, tuple[int, TracedProcess]] = {}

    def update(self) -> dict[int, TracedProcess]:
        """What is known by now, by process number. A file is read until its first step."""
        for path in rank_files(self._folder):
            known = self._by_file.get(path)
            if known is None or not known[1].has_stepped:
                found = _read(path)
                if found is not None:
                    self._by_file[path] = found
        return dict(self._by_file.values())


def _read(path: Path) -> tuple[int, TracedProcess] | None:
    pid = None
    process = TracedProcess()
    try:
        for record in read_records(path):
            match record:
                case Header():
                    pid, process.name = record.pid, record.process
                case EngineSource():
                    process.has_scheduler = True
                case WorkerSource():
                    process.has_runner = True
                case SchedulerStep() | ForwardStep() | RankStep():
                    process.has_stepped = True
                    break
    except BadTraceError:  # no complete header yet
        return None
    return None if pid is None else (pid, process)


def parse_roles(names: Sequence[str]) -> frozenset[Role]:
    """The roles of `--role`; without one those that do the work. UsageError: there is none such."""
    if ALL in names:
        return frozenset(get_args(Role))
    roles = set()
    for name in names:
        if name not in OPTIONS:
            raise UsageError(f"no role {name!r}; roles: {', '.join([*OPTIONS, ALL])}")
        roles.add(OPTIONS[name])
    return frozenset(roles) or DEFAULT_ROLES


def role_of(command_line: Sequence[str], traced: TracedProcess | None) -> Role:
    """By the name that vLLM gave the process, else by what it records, else by its command."""
    title = title_of(command_line)
    names: Iterable[str] = [title] if title else []
    names = [*names, traced.name] if traced is not None else names
    for name in names:
        for beginning, role in _OF_TITLES:
            if name.startswith(beginning):
                return role
    if traced is not None and traced.has_scheduler:
        return "in-process engine"
    if traced is not None and traced.has_runner:
        return "worker"
    return "API server" if _is_api_server(command_line) else "other"


def _is_api_server(command_line: Sequence[str]) -> bool:
    """The program is vLLM's server, which gives itself no name: `vllm serve`, or a module or file
    of its entry points. Not what a shell or a wrapper is going to start."""
    program, *words = _program_of(command_line)
    if program in _PROGRAMS or os.path.basename(program) in _PROGRAMS:
        return words[:1] == ["serve"]
    return _SERVER.fullmatch(program) is not None


def _program_of(command_line: Sequence[str]) -> list[str]:
    """The program and its arguments; of a Python the module or the script that it runs."""
    words = list(command_line)
    if words and os.path.basename(words[0]).startswith("python"):
        del words[0]
        while words and words[0].startswith("-"):
            option = words.pop(0)
            runs = _RUNS.fullmatch(option)
            if runs is not None and runs["kind"] == "c":
                return [""]
            if runs is not None:
                words[:0] = [runs["what"]] if runs["what"] else []
                break
            if option in _OPTIONS_WITH_VALUE:
                del words[:1]
    return words or [""]


def title_of(command_line: Sequence[str]) -> str | None:
    """The name that vLLM gave the process; None: it has its own command line."""
    first = command_line[0] if command_line else ""
    _, mark, name = first.partition(TITLE_MARK)
    return name if mark else None


def shown_command(command_line: Sequence[str], process: Any) -> str:
    """What a process is called in a report: never its arguments, which may hold a prompt."""
    first = command_line[0] if command_line else ""
    return first if TITLE_MARK in first else os.path.basename(first) or str(process.name())
