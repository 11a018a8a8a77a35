"""Tests with a real vLLM engine on the CPU.

Import vLLM and torch inside tests and fixtures, not at the top of a test file: what they warn
about on import would end the collection (`filterwarnings = error`).
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import commands
from tests.engine.model_fixtures import tiny_image_model, tiny_models, tiny_text_model

__all__ = ["tiny_image_model", "tiny_models", "tiny_text_model"]

# VLLM_PLUGINS leaves out vLLM-Omni, which is installed too and would patch every vLLM process.
# `make test-engine` runs some of the tests again with it.
os.environ.setdefault("VLLM_PLUGINS", "omnicache_cli,planted")

# Set before anything imports vLLM, which reads some of them only once.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    # One thread: a tiny model's kernels are shorter than the barriers between threads.
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
)

HERE = Path(__file__).parent

# What vLLM, torch and transformers warn about is theirs to mend: shown, but no failure here.
THEIR_WARNINGS = [
    "default::DeprecationWarning",
    "default::FutureWarning",
    "default::UserWarning",
    "default::ResourceWarning",
    "default::pytest.PytestUnraisableExceptionWarning",
    "default::pytest.PytestUnhandledThreadExceptionWarning",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    if missing and os.environ.get("CI"):  # a green run there must mean that these tests ran
        raise pytest.UsageError("vLLM is not installed, so no engine test can run; run: make setup")
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.engine)
        for warning in THEIR_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; run: make setup"))


@pytest.fixture(autouse=True)
def _no_command_outlives_its_test() -> Iterator[None]:
    yield
    commands.end_all()
