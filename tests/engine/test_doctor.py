"""The doctor in the environment that all tests of engines run in, and against vLLM's own words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omnicache_cli.engine.doctor.system import attention_limits

pytestmark = pytest.mark.engine


def test_here_everything_works(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "omnicache_cli.cli", "doctor", "-o", path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stderr) == (0, f"wrote {path}\n")
    result = json.loads(path.read_text(encoding="ascii"))
    assert {one["command"]: one["because"] for one in result["commands"]} == {
        one["command"]: [
            why for why in one["because"] if why.startswith(("two ranks", "memory", "disk"))
        ]
        for one in result["commands"]
    }
    states = {one["name"]: one["state"] for one in result["checks"]}
    packages = ("Python", "vllm", "vllm-omni", "torch", "torchvision", "transformers", "py-spy")
    assert {name: states[name] for name in packages} == dict.fromkeys(packages, "ok")


def test_the_limits_read_in_the_source_are_those_of_the_backend() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    limits = attention_limits()
    (multiple,) = CPUAttentionBackend.get_supported_kernel_block_sizes()
    assert limits.block_size_multiple == multiple.base
    assert limits.head_sizes == CPUAttentionBackend.get_supported_head_sizes()
