"""All checks of one set of facts, in the order in which they are told."""

from collections.abc import Callable

from omnicache_cli.doctor import machine, packages
from omnicache_cli.doctor.check import Check
from omnicache_cli.doctor.facts import Facts


def checks_of(facts: Facts, is_tested: Callable[[str], bool]) -> list[Check]:
    """`is_tested`: was omnicache tried with this version of vLLM?"""
    return [
        packages.python(facts),
        packages.vllm(facts, is_tested),
        packages.vllm_omni(facts),
        packages.torch(facts),
        packages.torchvision(facts),
        packages.audio(facts),
        packages.transformers(facts),
        machine.devices(facts),
        machine.cpu_attention(facts),
        machine.two_ranks(facts),
        machine.plugins(facts),
        packages.namesake(facts),
        packages.extra(facts, "py_spy", "profile"),
        packages.extra(facts, "psutil", "profile"),
        machine.ptrace(facts),
        packages.extra(facts, "httpx", "monitor"),
        packages.extra(facts, "prometheus_client", "monitor"),
        packages.extra(facts, "zmq", "monitor"),
        packages.extra(facts, "pyarrow", "export"),
        packages.extra(facts, "zstandard", "simulate"),
        packages.huggingface_hub(facts),
        packages.soundfile(facts),
        machine.memory(facts),
        machine.disk(facts),
        machine.terminal(facts),
    ]
