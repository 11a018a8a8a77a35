"""The machine as Linux tells it: CPUs, memory, disks, permissions, terminal. Imports no engine."""

import ast
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from omnicache_cli.doctor.facts import Attention, Cpu, Disk, Gpu, Probe, Ptrace, Terminal
from omnicache_cli.engine.doctor.children import Children
from omnicache_cli.kv_size.hardware import cpu_flags

CAP_SYS_PTRACE = 19
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
NODES = Path("/sys/devices/system/node/online")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
CPU_ATTENTION = ("v1", "attention", "backends", "cpu_attn.py")

SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,driver_version",
    "--format=csv,noheader,nounits",
)
SMI_LIMIT_S = 10.0

KNOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "NO_COLOR",
    "TRANSFORMERS_OFFLINE",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_PLUGINS",
    "VLLM_TARGET_DEVICE",
)
"""Variables that change what works and hold no secret. No other is read."""


def cpu() -> Cpu:
    return Cpu(
        platform.machine(),
        frozenset(os.sched_getaffinity(0)),
        cpu_flags(),
        numa_nodes(_text(NODES)),
        attention_limits(),
    )


def numa_nodes(online: str | None) -> list[int] | None:
    """Nodes in a list as the kernel writes it, such as 0-1,3; None: not told."""
    if not online:
        return None
    nodes: list[int] = []
    for part in online.split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def attention_limits() -> Attention:
    """Read in vLLM's source, which importing would take many seconds."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return Attention()
    source = Path(spec.submodule_search_locations[0], *CPU_ATTENTION)
    try:
        return limits_in(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return Attention()


def limits_in(source: str) -> Attention:
    """What the backend's two methods return, where they return literals."""
    multiple, sizes = None, None
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not isinstance(node.body[-1], ast.Return):
            continue
        match node.name, node.body[-1].value:
            case (
                "get_supported_kernel_block_sizes",
                ast.List(elts=[ast.Call(func=ast.Name("MultipleOf"), args=[ast.Constant(number)])]),
            ) if isinstance(number, int):
                multiple = number
            case "get_supported_head_sizes", ast.List() as listed:
                sizes = [int(one) for one in ast.literal_eval(listed)]
    return Attention(multiple, sizes)


def gpus(children: Children | None = None) -> list[Gpu]:
    """NVIDIA's cards by nvidia-smi; without it there is no way to ask the driver."""
    try:
        ran = (children or Children()).run(SMI, stderr=subprocess.DEVNULL, limit_s=SMI_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return cards_in(ran.stdout.decode("utf-8", "replace")) if ran.returncode == 0 else []


def cards_in(listing: str) -> list[Gpu]:
    """Lines of nvidia-smi: name, MiB, driver. Some cards say [N/A] for their memory."""
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines()]
    return [
        Gpu(name, int(memory) if memory.isdigit() else None, driver)
        for name, memory, driver in (row for row in rows if len(row) == 3)
    ]


def ptrace(children: Children | None = None) -> Ptrace:
    scope = _text(YAMA)
    return Ptrace(
        int(scope) if scope is not None and scope.isdigit() else None,
        is_capable(_text(Path("/proc/self/status")) or ""),
        any(mark.exists() for mark in CONTAINER_MARKS) or "container" in os.environ,
        sample_a_process(children=children),
    )


def is_capable(status: str) -> bool:
    """Of /proc/self/status: may this process trace any other?"""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_PTRACE & 1)
    return False


def py_spy() -> str | None:
    """The program, of this environment first."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def sample_a_process(limit_s: float = 20.0, *, children: Children | None = None) -> Probe | None:
    """py-spy on a process that is no child of py-spy's own, as an engine is none."""
    program = py_spy()
    if program is None:
        return None
    children = children or Children()
    start = time.monotonic()
    target = children.started(
        [sys.executable, "-S", "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with target as process, process:  # it ends with its stdin
        assert process.stdout is not None
        process.stdout.readline()
        command = [program, "dump", "--pid", str(process.pid)]
        try:
            ran = children.run(command, stderr=subprocess.PIPE, limit_s=limit_s)
        except subprocess.TimeoutExpired:
            return Probe("hangs", limit_s, f"py-spy gives no answer within {limit_s:g} s")
        except OSError as error:
            return Probe("fails", time.monotonic() - start, error.strerror or type(error).__name__)
    seconds = time.monotonic() - start
    if ran.returncode == 0:
        return Probe("imports", seconds)
    text = ran.stderr.decode("utf-8", "replace")
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return Probe("fails", seconds, said[0] if said else f"exit code {ran.returncode}")


def memory() -> tuple[int | None, int | None]:
    """Bytes available and in total: the machine's, or what a container's limit leaves of it."""
    found = {}
    for line in (_text(Path("/proc/meminfo")) or "").splitlines():
        name, _, amount = line.partition(":")
        if name in {"MemAvailable", "MemTotal"}:
            found[name] = int(amount.split()[0]) << 10
    available, total = found.get("MemAvailable"), found.get("MemTotal")
    limit, used = _text(CGROUP_LIMIT), _text(CGROUP_USED)
    if limit and limit.isdigit() and used and used.isdigit():
        left = max(0, int(limit) - int(used))
        available = left if available is None else min(available, left)
        total = int(limit) if total is None else min(total, int(limit))
    return available, total


def disks(environment: Mapping[str, str]) -> list[Disk]:
    """Where temporary files, shared memory and models go. What is not there is left out."""
    home = Path(environment.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    places = {
        "temporary files": Path(tempfile.gettempdir()),
        "shared memory": Path("/dev/shm"),
        "models from the hub": _first_that_exists(home),
        "this folder": Path(),
    }
    found = []
    for purpose, place in places.items():
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            continue
        found.append(Disk(purpose, usage.free, usage.total))
    return found


def terminal(environment: Mapping[str, str]) -> Terminal:
    stdout = sys.stdout
    return Terminal(
        stdout is not None and stdout.isatty(),
        shutil.get_terminal_size().columns,
        "" if stdout is None else stdout.encoding,
        environment.get("TERM", ""),
    )


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in KNOWN_VARIABLES if name in environment}


def _first_that_exists(path: Path) -> Path:
    return next((one for one in (path, *path.parents) if one.exists()), path)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def kernel() -> tuple[str, str]:
    """The system's name and its release."""
    return platform.system(), platform.release()


def python() -> tuple[tuple[int, int, int], str]:
    return tuple(sys.version_info[:3]), platform.python_implementation()  # type: ignore[return-value]


def names_to_hide(environment: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """What must not stand in a report, and what stands for it; the longest first."""
    home = str(Path("~").expanduser())
    pairs = [(sys.prefix, "ENVIRONMENT"), (home, "~"), (platform.node(), "HOST")]
    user = environment.get("USER") or environment.get("LOGNAME") or ""
    pairs += [(f"/{user}/", "/USER/")] if user else []
    return sorted(((old, new) for old, new in pairs if len(old) > 2), key=lambda one: -len(one[0]))
