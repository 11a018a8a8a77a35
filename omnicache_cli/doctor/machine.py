"""Judges the machine: devices, the limits of a CPU, plugins, permissions, room, terminal."""

from omnicache_cli import advice
from omnicache_cli.doctor.check import Check
from omnicache_cli.doctor.facts import Disk, Facts, Plugin

OURS = "omnicache_cli"
GIB = 1 << 30

LEAST_MEMORY = 3 * GIB
"""Of a tiny engine on a CPU: vLLM and torch, and a KV cache of 1 GiB."""

LEAST_DISK = 1 * GIB
LEAST_SHARED_MEMORY = 256 << 20
"""Workers of vLLM talk through it; Docker gives 64 MiB."""

NARROW = 60
"""Columns below which lines of a report in text break."""

PATCHES = {"vllm-omni": "replaces classes of vLLM in every process"}
"""Distributions whose plugins change vLLM itself."""


def devices(facts: Facts) -> Check:
    """By nvidia-smi, and by torch where it imports: the two may differ."""
    probe = facts.package("torch").probe
    seen = probe.details.get("devices") if probe is not None else None
    error = probe.details.get("devices_error") if probe is not None else None
    names = ", ".join(_card(one.name, one.memory_mib) for one in facts.gpus)
    if error:
        return Check("devices", "broken", f"torch cannot ask for devices: {error}", "nvidia-smi")
    if isinstance(seen, list) and seen:
        return Check("devices", "ok", f"CUDA: {names or ', '.join(map(str, seen))}")
    if facts.gpus and seen is not None:
        return Check(
            "devices",
            "broken",
            f"{names} by nvidia-smi (driver {facts.gpus[0].driver}), none by torch: it is built "
            "for a CPU, or for a newer driver",
            advice.install_vllm(has_gpu=True),
        )
    if facts.gpus:
        return Check("devices", "unknown", f"{names} by nvidia-smi; torch was not asked")
    return Check(
        "devices", "ok", f"no GPU; {len(facts.cpu.allowed)} CPUs, {facts.cpu.architecture}"
    )


def cpu_attention(facts: Facts) -> Check:
    name, limits = "CPU attention", facts.cpu.attention
    if facts.gpus:
        return Check(name, "ok", "not used: there is a GPU")
    if limits.block_size_multiple is None or limits.head_sizes is None:
        return Check(name, "unknown", "this vLLM's source does not tell its limits")
    sizes = ", ".join(map(str, limits.head_sizes))
    said = f"--block-size a multiple of {limits.block_size_multiple}; head sizes {sizes}"
    if "amx_tile" in facts.cpu.flags:
        return Check(name, "ok", f"{said}; AMX")
    return Check(name, "ok", f"{said}; without AMX no prefix cache for latent attention (MLA)")


def two_ranks(facts: Facts) -> Check:
    """--tensor-parallel-size 2 on a CPU: a NUMA node for each rank, or a binding by hand."""
    name, cpu = "two ranks", facts.cpu
    if facts.gpus:
        return Check(name, "ok" if len(facts.gpus) > 1 else "limits", f"GPUs: {len(facts.gpus)}")
    binding = facts.environment.get("VLLM_CPU_OMP_THREADS_BIND")
    if binding is not None and binding != "auto":
        return Check(name, "ok", f"VLLM_CPU_OMP_THREADS_BIND={binding}")
    if cpu.numa_nodes is None:
        return Check(name, "unknown", "the number of NUMA nodes is not told")
    if len(cpu.numa_nodes) > 1:
        return Check(name, "ok", f"NUMA nodes: {len(cpu.numa_nodes)}")
    return Check(
        name,
        "limits",
        "one NUMA node: vLLM refuses two ranks that are not bound by hand",
        advice.bind_two_ranks(cpu.allowed),
    )


def plugins(facts: Facts) -> Check:
    """Ours must be found where vLLM looks; VLLM_PLUGINS chooses among all by name."""
    chosen = facts.environment.get("VLLM_PLUGINS")
    ours = [one for one in facts.plugins if one.name == OURS and one.group.startswith("vllm.")]
    if not ours:
        return Check(
            "plugins",
            "broken",
            "vLLM finds no plugin of omnicache here, so engines in processes of their own are not "
            "traced",
            advice.install("omnicache-cli") + ", or in a clone: " + advice.install("."),
        )
    others = sorted(
        {
            f"{one.distribution} ({PATCHES.get(one.distribution, one.name)})"
            for one in facts.plugins
            if one.name != OURS and is_active(one, chosen)
        }
    )
    said = "omnicache_cli"
    if others:
        said += f"; also {', '.join(others)}, unless VLLM_PLUGINS={OURS}"
    if chosen is not None:
        said += f"; VLLM_PLUGINS is {chosen or 'empty'}"
    return Check("plugins", "ok", said)


def is_active(plugin: Plugin, chosen: str | None) -> bool:
    """Does vLLM load it? `chosen`: VLLM_PLUGINS."""
    return chosen is None or plugin.name in chosen.split(",")


def ptrace(facts: Facts) -> Check:
    """py-spy reads a process that is not its child: tried, not guessed from the settings."""
    traced = facts.ptrace
    settings = [
        f"Yama scope {'none' if traced.yama_scope is None else traced.yama_scope}",
        f"CAP_SYS_PTRACE {'yes' if traced.is_capable else 'no'}",
        *(["in a container"] if traced.in_container else []),
    ]
    said = ", ".join(settings)
    if traced.probe is None:
        return Check("ptrace", "unknown", f"{said}; not tried, there is no py-spy")
    if traced.probe.outcome == "imports":
        return Check("ptrace", "ok", f"py-spy reads another process; {said}")
    return Check(
        "ptrace",
        "broken",
        f"py-spy cannot read another process: {traced.probe.error}; {said}",
        advice.allow_ptrace(traced.yama_scope, in_container=traced.in_container),
    )


def memory(facts: Facts) -> Check:
    if facts.available_bytes is None:
        return Check("memory", "unknown", "not told")
    of = "" if facts.total_bytes is None else f" of {_gib(facts.total_bytes)}"
    said = f"{_gib(facts.available_bytes)}{of} available"
    if facts.available_bytes < LEAST_MEMORY:
        return Check(
            "memory",
            "limits",
            f"{said}; a tiny engine on a CPU wants {_gib(LEAST_MEMORY)}",
            "export VLLM_CPU_KVCACHE_SPACE=1, or end other programs",
        )
    return Check("memory", "ok", said)


def disk(facts: Facts) -> Check:
    said = ", ".join(f"{one.purpose} {_gib(one.free_bytes)}" for one in facts.disks)
    tight = [one for one in facts.disks if one.free_bytes < _least(one)]
    if not facts.disks:
        return Check("disk", "unknown", "not told")
    if not tight:
        return Check("disk", "ok", f"free: {said}")
    names = ", ".join(one.purpose for one in tight)
    mend = (
        "start the container with --shm-size=8g"
        if any(one.purpose == "shared memory" for one in tight)
        else "free some space, or set TMPDIR and HF_HOME to another disk"
    )
    return Check("disk", "limits", f"free: {said}; little for {names}", mend)


def terminal(facts: Facts) -> Check:
    one = facts.terminal
    encoding = one.encoding or "none"
    if not one.is_terminal:
        return Check("terminal", "ok", f"stdout is no terminal; encoding {encoding}")
    kind = f"{one.kind or 'no TERM'}, {one.columns} columns, encoding {encoding}"
    if encoding.lower().replace("-", "") != "utf8":
        return Check(
            "terminal", "limits", f"{kind}: pictures are drawn in ASCII", "export PYTHONUTF8=1"
        )
    if one.columns < NARROW:
        return Check(
            "terminal",
            "limits",
            f"{kind}: reports need {NARROW} columns",
            "widen the window, or write a page: -o report.html",
        )
    return Check("terminal", "ok", kind)


def _card(name: str, memory_mib: int | None) -> str:
    return name if memory_mib is None else f"{name} ({memory_mib / 1024:.0f} GiB)"


def _least(disk: Disk) -> int:
    return LEAST_SHARED_MEMORY if disk.purpose == "shared memory" else LEAST_DISK


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
