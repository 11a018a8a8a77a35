"""How many bytes a cached value takes, and which dtype a KV cache gets when none is asked for.

Knows names only: no torch.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from omnicache_cli.errors import BadInputError, UsageError

DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,
    "nvfp4_ds_mla": 1,
    "int4_per_token_head": 1,
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
    "nvfp4": 1,
    "nvfp4_4over6": 1,
    "turboquant_k8v4": 1,
    "turboquant_4bit_nc": 1,
    "turboquant_k3v4_nc": 1,
    "turboquant_3bit_nc": 1,
}
"""vLLM's STR_DTYPE_TO_TORCH_DTYPE (utils/torch_utils.py) with the size of each torch dtype."""

MODEL_DTYPES = ("bfloat16", "float16", "float32", "half", "float")

KV_CACHE_DTYPES = (
    "auto",
    "float16",
    "bfloat16",
    *(name for name in DTYPE_BYTES if name not in MODEL_DTYPES),
)
"""vLLM's CacheDType (config/cache.py)."""

_SAME = {"half": "float16", "float": "float32"}
_MODELOPT = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


class Packing(Enum):
    """How a quantised cache packs a head's values and scales; NONE is dense K and V."""

    NONE = "none"
    PER_TOKEN_HEAD = "per token and head"
    INT4_PER_TOKEN_HEAD = "4 bit, per token and head"
    NVFP4 = "nvfp4"
    TURBOQUANT = "turboquant"


def packing_of(kv_cache_dtype: str) -> Packing:
    """vLLM's get_kv_quant_mode (v1/kv_cache_interface.py), as far as it changes a page."""
    if kv_cache_dtype == "int4_per_token_head":
        return Packing.INT4_PER_TOKEN_HEAD
    if kv_cache_dtype.endswith("_per_token_head"):
        return Packing.PER_TOKEN_HEAD
    if kv_cache_dtype.startswith("nvfp4") and kv_cache_dtype != "nvfp4_ds_mla":
        return Packing.NVFP4
    if kv_cache_dtype.startswith("turboquant_"):
        return Packing.TURBOQUANT
    return Packing.NONE


def unpacked(kv_cache_dtype: str) -> str:
    """What FlashAttention makes of it: the values of Triton's formats without their scales."""
    is_triton = kv_cache_dtype.endswith("_per_token_head")
    return "fp8" if is_triton else kv_cache_dtype


def bytes_of(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"no dtype is called {dtype!r}; choose one of: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def model_dtype(asked: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """vLLM's _get_and_verify_dtype and ModelArchConfigConvertorBase.get_torch_dtype.

    "auto" is the checkpoint's dtype, and bfloat16 for a float32 checkpoint; dtypes are looked for
    in the config, its text config, then its vision and encoder configs.
    """
    if asked != "auto":
        if asked not in MODEL_DTYPES:
            raise UsageError(
                f"--dtype {asked!r} is not a model dtype; choose auto, {', '.join(MODEL_DTYPES)}"
            )
        return _SAME.get(asked, asked)
    parts = (config, text, config.get("vision_config"), config.get("encoder_config"))
    for part in parts:
        if isinstance(part, Mapping):
            found = part.get("dtype") or part.get("torch_dtype")
            if found is not None:
                break
    else:
        raise BadInputError(
            "the config names no dtype (field dtype or torch_dtype), so vLLM would read it from "
            "the weights; give --dtype bfloat16, float16 or float32"
        )
    name = str(found).removeprefix("torch.")
    name = _SAME.get(name, name)
    if name not in MODEL_DTYPES:
        raise BadInputError(f"field dtype is {name!r}, which no cache can have; give --dtype")
    return "bfloat16" if name == "float32" else name


def kv_cache_dtype(asked: str, quantization: Mapping[str, Any] | None) -> tuple[str, str]:
    """The dtype of the cache and where it comes from; "auto" means the model's dtype.

    vLLM's resolve_kv_cache_dtype_string (ModelOpt schemes) and Attention.__init__ (a
    compressed-tensors kv_cache_scheme). fp8 weights alone do not make an fp8 cache.
    """
    if asked != "auto":
        if asked not in KV_CACHE_DTYPES:
            raise UsageError(
                f"--kv-cache-dtype {asked!r} is not vLLM's; choose: {', '.join(KV_CACHE_DTYPES)}"
            )
        return asked, "--kv-cache-dtype"
    if not quantization:
        return "auto", "auto: the model's dtype"
    method = str(quantization.get("quant_method", "")).lower().replace("_", "-")
    if method.startswith("modelopt") or _is_modelopt(quantization):
        return _modelopt_dtype(quantization)
    if method == "compressed-tensors" and quantization.get("kv_cache_scheme") is not None:
        return "fp8", "auto: quantization_config.kv_cache_scheme"
    return "auto", "auto: the model's dtype (quantised weights do not quantise the cache)"


def _is_modelopt(quantization: Mapping[str, Any]) -> bool:
    producer = quantization.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"


def _modelopt_dtype(quantization: Mapping[str, Any]) -> tuple[str, str]:
    """vLLM's get_kv_cache_quant_algo_string (utils/torch_utils.py)."""
    inner = quantization.get("quantization", quantization)
    scheme = None
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        scheme = scheme or inner.get(name) or quantization.get(name)
    if scheme is None:
        return "auto", "auto: the model's dtype"
    if isinstance(scheme, Mapping):
        bits, is_float = scheme.get("num_bits"), scheme.get("type") == "float"
        if scheme.get("dynamic") is False and bits == 8 and is_float:
            scheme = "fp8"
        elif bits == 4 and is_float:
            scheme = "nvfp4"
    resolved = _MODELOPT.get(str(scheme).lower(), "auto")
    return resolved, "auto: quantization_config's KV cache scheme"
