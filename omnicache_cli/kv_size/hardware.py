"""Cards by name, and amounts of memory as people type them."""

import re
from dataclasses import dataclass
from pathlib import Path

from omnicache_cli.errors import UsageError

GIB = 1 << 30

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


@dataclass(frozen=True, slots=True)
class Card:
    """A card's memory as CUDA's total_memory gives it, bytes."""

    name: str
    bytes: int
    source: str
    capability: int | None = None  # the major number of CUDA's compute capability, where known


_CAPABILITY = {
    "rtx4090": 8,
    "rtx3090": 8,
    "rtx5090": 12,
    "t4": 7,
    "l4": 8,
    "l40s": 8,
    "a10g": 8,
    "a100-40g": 8,
    "a100": 8,
    "h100": 9,
    "h200": 9,
    "b200": 10,
}

_MIB = {
    "rtx4090": 24210,
    "rtx3090": 24253,
    "rtx5090": 32106,
    "t4": 14913,
    "l4": 22563,
    "l40s": 45458,
    "a10g": 22598,
    "a100-40g": 40442,
    "a100": 81154,
    "h100": 81090,
    "h200": 143156,
    "b200": 182632,
}
"""MiB that CUDA reports as total_memory; ECC and the driver's reserve are already off. Cards of one
name differ by a few hundred MiB between drivers, so --gpu-memory with your own figure is better."""

MOST_DIGITS = 40
"""Characters of an amount of memory; longer ones are no amounts of any machine."""


def memory_bytes(text: str, option: str) -> int:
    """24GiB, 16.87GiB, 80GB, 1024 (bytes)."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNITS or len(text) > MOST_DIGITS:
        raise UsageError(f"{option} {text!r} is no amount of memory; write it like 16.87GiB")
    return round(float(match.group(1)) * _UNITS[unit])


def card_named(name: str) -> Card:
    key = name.lower().replace(" ", "").removeprefix("nvidia").strip("-")
    if key not in _MIB:
        raise UsageError(
            f"no card is called {name!r}; known: {', '.join(sorted(_MIB))}; "
            "or give its memory: --gpu-memory 24GiB"
        )
    source = "the table of cards in omnicache; --gpu-memory overrides it"
    return Card(key, _MIB[key] << 20, source, _CAPABILITY[key])


CPU_INFO = Path("/proc/cpuinfo")


def cpu_flags() -> frozenset[str]:
    """What this machine's CPU can do, by Linux's names; empty where that is not told."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(flags, "").split())
