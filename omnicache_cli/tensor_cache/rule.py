"""The rule: which outputs of a step have one row per token, and so can be kept by slot.

Everything else is payload: it travels on untouched.
"""

from typing import Any

import torch
from torch import Tensor

from omnicache_cli.tensor_cache.layout import StepLayout


def why_not(key: str, value: Any, layout: StepLayout) -> str | None:
    """Why `value` is no per-token tensor of this step, in a sentence; None if it is one."""
    if not isinstance(value, Tensor):
        return f"{key} is a {type(value).__name__}, not a tensor"
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        return f"{key} is a tensor without plain strided storage ({value.layout})"
    if value.is_meta:
        return f"{key} is a meta tensor: it has a shape and no data"
    if value.ndim == 0:
        return f"a scalar tensor has no rows: {key} holds one value"
    if value.ndim == 1:
        return (
            f"a 1-D tensor has one value per token at most: {key} of shape {shape_of(value)} "
            "may as well be per request"
        )
    sizes = {layout.num_tokens, layout.num_tokens_padded}
    if value.shape[0] not in sizes:
        expected = " or ".join(str(size) for size in sorted(sizes))
        return (
            f"the first dimension of {key} {shape_of(value)} is not this step's tokens ({expected})"
        )
    if value.shape[1:].numel() == 0:
        return f"the rows of {key} {shape_of(value)} are empty"
    return None


def why_changed(
    key: str, value: Tensor, row_shape: tuple[int, ...], dtype: torch.dtype
) -> str | None:
    """Why rows of `value` cannot join rows of this shape and type; None if they can."""
    if value.dtype != dtype:
        return f"{key} changed from {dtype} to {value.dtype}"
    if tuple(value.shape[1:]) != row_shape:
        return f"rows of {key} changed from {row_shape} to {tuple(value.shape[1:])}"
    return None


def shape_of(value: Tensor) -> str:
    return f"({', '.join(str(size) for size in value.shape)})"
