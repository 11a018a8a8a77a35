"""The state of one mamba-like layer: shapes and bytes.

Each rule is the function of the same name in vLLM's MambaStateShapeCalculator
(model_executor/layers/mamba/mamba_utils.py); dtypes are MambaStateDtypeCalculator's.
"""

from collections.abc import Callable
from math import prod

from omnicache_cli.errors import UsageError
from omnicache_cli.kv_size.dtypes import bytes_of
from omnicache_cli.kv_size.layers import StateRule

Shapes = tuple[tuple[int, ...], ...]

ONE_STATE = frozenset({"short_conv"})


def state_shapes(rule: StateRule, tensor_parallel: int, num_speculative: int) -> Shapes:
    """(conv, temporal) shapes on one rank, or (conv,) for a short convolution."""
    return _SHAPES[rule.kind](rule, tensor_parallel, num_speculative)


def state_dtypes(
    rule: StateRule, model_dtype: str, mamba_cache_dtype: str, mamba_ssm_cache_dtype: str
) -> tuple[str, ...]:
    """_mamba_state_dtype: "auto" is the model's dtype, or what the config names."""
    conv = model_dtype if mamba_cache_dtype == "auto" else mamba_cache_dtype
    if rule.kind in ONE_STATE:
        return (conv,)
    temporal = mamba_ssm_cache_dtype
    if rule.kind == "delta_attention" and temporal not in ("auto", "float32"):
        raise UsageError(
            f"--mamba-ssm-cache-dtype {temporal}: vLLM keeps the states of delta attention in "
            "float32 and fails on any other; leave it out"
        )
    if temporal == "auto":
        temporal = rule.temporal_dtype or conv
    if temporal == "auto":  # the config itself may say so
        temporal = conv
    return (conv, temporal)


def state_bytes(shapes: Shapes, dtypes: tuple[str, ...]) -> int:
    """MambaSpec.state_content_size_bytes."""
    return sum(prod(shape) * bytes_of(dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def _divide(number: int, ranks: int) -> int:
    if number % ranks:
        raise UsageError(
            f"a state of {number} channels cannot be split over --tensor-parallel-size {ranks}"
        )
    return number // ranks


def _mamba1(rule: StateRule, ranks: int, _: int) -> Shapes:
    """mamba1_state_shape."""
    width = _divide(rule["intermediate_size"], ranks)
    return (rule["conv_kernel"] - 1, width), (width, rule["state_size"])


def _mamba2(rule: StateRule, ranks: int, num_speculative: int) -> Shapes:
    """mamba2_state_shape: groups that do not divide over the ranks are repeated."""
    groups = rule["n_groups"]
    if groups % ranks:
        groups += ranks - groups
    width = rule["intermediate_size"] + 2 * groups * rule["state_size"]
    return (
        (rule["conv_kernel"] - 1 + num_speculative, _divide(width, ranks)),
        (_divide(rule["num_heads"], ranks), rule["head_dim"], rule["state_size"]),
    )


def _mamba2_plain(rule: StateRule, ranks: int, _: int) -> Shapes:
    return _mamba2(rule, ranks, 0)


def _gated_delta_net(rule: StateRule, ranks: int, num_speculative: int) -> Shapes:
    """gated_delta_net_state_shape."""
    width = 2 * rule["head_k_dim"] * rule["num_k_heads"] + rule["head_v_dim"] * rule["num_v_heads"]
    return (
        (rule["conv_kernel"] - 1 + num_speculative, _divide(width, ranks)),
        (_divide(rule["num_v_heads"], ranks), rule["head_v_dim"], rule["head_k_dim"]),
    )


def _delta_attention(rule: StateRule, ranks: int, num_speculative: int) -> Shapes:
    """kda_state_shape, as KimiLinearForCausalLM calls it."""
    heads, size = rule["num_heads"], rule["head_dim"]
    return (
        (rule["conv_kernel"] - 1 + num_speculative, _divide(3 * heads * size, ranks)),
        (_divide(heads, ranks), size, size),
    )


def _short_conv(rule: StateRule, ranks: int, _: int) -> Shapes:
    """short_conv_state_shape."""
    return ((rule["conv_kernel"] - 1, _divide(rule["intermediate_size"], ranks)),)


_SHAPES: dict[str, Callable[[StateRule, int, int], Shapes]] = {
    "mamba1": _mamba1,
    "mamba2": _mamba2_plain,
    "mamba2_speculative": _mamba2,
    "gated_delta_net": _gated_delta_net,
    "delta_attention": _delta_attention,
    "short_conv": _short_conv,
}
