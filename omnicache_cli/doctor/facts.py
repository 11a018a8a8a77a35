"""What was gathered about a machine. None means that it is not known, never that there is none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["imports", "fails", "crashes", "hangs"]


@dataclass(frozen=True, slots=True)
class Probe:
    """One import, tried in a process of its own."""

    outcome: Outcome
    seconds: float
    error: str = ""  # the last line of what it raised; a signal's name; nothing where it imports
    details: Mapping[str, object] = field(default_factory=dict)  # what the import let us ask


@dataclass(frozen=True, slots=True)
class Package:
    """A module that Python would find, and what was installed under it."""

    module: str
    is_found: bool
    distributions: Mapping[str, str] = field(default_factory=dict)  # name -> version
    probe: Probe | None = None  # None: it was not tried

    @property
    def version(self) -> str | None:
        return next(iter(self.distributions.values()), None)


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_mib: int | None
    driver: str


@dataclass(frozen=True, slots=True)
class Attention:
    """Limits of vLLM's attention on a CPU, as its own source states them."""

    block_size_multiple: int | None = None
    head_sizes: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Cpu:
    architecture: str
    allowed: frozenset[int]  # CPUs that this process may run on
    flags: frozenset[str]  # by Linux's names; empty: not told
    numa_nodes: Sequence[int] | None
    attention: Attention = Attention()


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point that vLLM or vLLM-Omni loads into its processes."""

    group: str
    name: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class Ptrace:
    """May py-spy read another process of ours?"""

    yama_scope: int | None  # None: the kernel has no Yama
    is_capable: bool  # CAP_SYS_PTRACE
    in_container: bool
    probe: Probe | None  # py-spy on a process that we started; None: no py-spy


@dataclass(frozen=True, slots=True)
class Disk:
    purpose: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Terminal:
    is_terminal: bool
    columns: int
    encoding: str
    kind: str  # TERM


@dataclass(frozen=True, slots=True)
class Facts:
    tool_version: str
    python: tuple[int, int, int]
    implementation: str
    system: str
    kernel: str
    packages: Mapping[str, Package]  # by module
    plugins: Sequence[Plugin]
    gpus: Sequence[Gpu]
    cpu: Cpu
    ptrace: Ptrace
    available_bytes: int | None  # memory, the container's limit counted in
    total_bytes: int | None
    disks: Sequence[Disk]
    terminal: Terminal
    environment: Mapping[str, str]  # variables of a known list only
    is_deep: bool = False  # vLLM itself was imported
    seconds: float = 0.0

    def package(self, module: str) -> Package:
        """As it was found; KeyError: nobody looked for it."""
        return self.packages[module]
