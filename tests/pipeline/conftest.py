"""Tests with vLLM-Omni's stages on the CPU; a process of their own, for vLLM-Omni changes vLLM.

Import vLLM and torch inside tests and fixtures, as in tests/engine.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from omnicache_cli.engine.tiny_models import build_tiny_model
from tests.engine.conftest import THEIR_WARNINGS

os.environ.pop("VLLM_PLUGINS", None)  # tests/engine leaves vLLM-Omni out
os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
# One thread: a tiny model's kernels are shorter than the barriers between threads.
os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm_omni") is None
    if missing and os.environ.get("CI"):
        raise pytest.UsageError("vLLM-Omni is not installed, so no test of its stages can run")
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.engine)
        for warning in THEIR_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM-Omni is not installed"))


@pytest.fixture(scope="session")
def omni_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "omni"
    build_tiny_model("omni", directory)
    return directory
