"""The files that every tiny model has: configuration, weights, tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omnicache_cli.engine.tiny_models.tokenizer import generation_config, tokenizer_files
from omnicache_cli.engine.tiny_models.weights import random_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def checkpoint_files(
    config: PretrainedConfig, build: Callable[[], PreTrainedModel], *, max_positions: int
) -> dict[str, bytes]:
    """`build` makes the model, on the meta device; `max_positions` in tokens."""
    return {
        "config.json": config.to_json_string().encode(),
        "generation_config.json": generation_config(),
        "model.safetensors": random_weights(build),
        **tokenizer_files(max_positions),
    }


@contextmanager
def unheard(module: str) -> Iterator[None]:
    """Nothing is logged by a module that warns of what does not matter here."""
    logger = logging.getLogger(module)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False
