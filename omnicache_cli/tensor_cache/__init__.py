"""The Omni tensor prefix cache: rows of per-token tensors, kept by slot of the KV cache.

See docs/tensor-cache.md. Imports torch, and never vLLM.
"""

from omnicache_cli.tensor_cache.cache import (
    CacheStats,
    KeyStats,
    Materialized,
    Saved,
    TensorCache,
)
from omnicache_cli.tensor_cache.device import CudaCopies, DeviceCopies, HostCopy, PlainCopies
from omnicache_cli.tensor_cache.layout import BadStepError, RequestRows, StepLayout
from omnicache_cli.tensor_cache.missing import RowsMissingError
from omnicache_cli.tensor_cache.rule import why_not

__all__ = [
    "BadStepError",
    "CacheStats",
    "CudaCopies",
    "DeviceCopies",
    "HostCopy",
    "KeyStats",
    "Materialized",
    "PlainCopies",
    "RequestRows",
    "RowsMissingError",
    "Saved",
    "StepLayout",
    "TensorCache",
    "why_not",
]
