"""Tiny models, built once for all engine tests; conftest.py imports these fixtures."""

from pathlib import Path

import pytest

from omnicache_cli.engine.tiny_kinds import TINY_MODEL_KINDS
from omnicache_cli.engine.tiny_models import build_tiny_model


@pytest.fixture(scope="session")
def tiny_text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "text"
    build_tiny_model("text", directory)
    return directory


@pytest.fixture(scope="session")
def tiny_image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "image"
    build_tiny_model("image", directory)
    return directory


@pytest.fixture(scope="session")
def tiny_models(
    tiny_text_model: Path, tiny_image_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Every kind: its folder."""
    models = {"text": tiny_text_model, "image": tiny_image_model}
    for kind in TINY_MODEL_KINDS.keys() - models.keys():
        models[kind] = tmp_path_factory.mktemp("models") / kind
        build_tiny_model(kind, models[kind])
    return models
