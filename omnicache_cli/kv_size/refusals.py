"""What vLLM refuses to start with, refused here too, so that no answer is given for it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, Model

if TYPE_CHECKING:
    from omnicache_cli.kv_size.options import Options

MAMBA_CACHE_MODES = ("none", "align", "all")
MAMBA_DTYPES = ("auto", "float32", "float16", "bfloat16")

NO_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""_FLOAT16_NOT_SUPPORTED_MODELS (config/model.py)."""

OWN_NUMBERS = frozenset({"Zamba2ForCausalLM"})
"""Architectures whose attention layers are not named by the number of their decoder layer."""

NO_PIPELINE = frozenset(
    {
        *("AriaForConditionalGeneration", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        *("HrmTextForCausalLM", "Idefics3ForConditionalGeneration", "Mamba2ForCausalLM"),
        *("PaddleOCRVLForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        *("VoxtralForConditionalGeneration", "WhisperForConditionalGeneration"),
        "Zamba2ForCausalLM",
    }
)
"""Architectures of the fast path without vLLM's SupportsPP."""


def check_options(options: "Options", model: Model) -> None:
    """UsageError: options out of their range, or that vLLM refuses for this model."""
    counts = {
        "--block-size": options.block_size,
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--pipeline-parallel-size": options.pipeline_parallel_size,
        "--decode-context-parallel-size": options.decode_context_parallel_size,
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": options.max_num_seqs,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
        "--num-gpu-blocks-override": options.num_gpu_blocks_override,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; give a number from 1")
    if options.num_speculative_tokens < 0:
        raise UsageError(
            f"--num-speculative-tokens is {options.num_speculative_tokens}, not a count"
        )
    if options.mamba_cache_mode not in (None, *MAMBA_CACHE_MODES):
        raise UsageError(
            f"--mamba-cache-mode {options.mamba_cache_mode!r}: choose "
            f"{', '.join(MAMBA_CACHE_MODES)}"
        )
    for name, word in (
        ("--mamba-cache-dtype", options.mamba_cache_dtype),
        ("--mamba-ssm-cache-dtype", options.mamba_ssm_cache_dtype),
    ):
        if word not in MAMBA_DTYPES:
            raise UsageError(f"{name} {word!r}: choose {', '.join(MAMBA_DTYPES)}")
    tensor = options.tensor_parallel_size
    if model.num_attention_heads % tensor:
        raise UsageError(
            f"--tensor-parallel-size {tensor} does not divide the model's "
            f"{model.num_attention_heads} attention heads; vLLM refuses it too"
        )
    if tensor % options.decode_context_parallel_size:
        raise UsageError(
            f"--decode-context-parallel-size {options.decode_context_parallel_size} does not "
            f"divide --tensor-parallel-size {tensor}; vLLM refuses it too"
        )
    _check_block_size(options, model)
    _check_heads(options, model)
    _check_context_parallel(options, model)
    if options.kv_cache_dtype_skip_layers and model.architecture in OWN_NUMBERS:
        raise UsageError(
            f"--kv-cache-dtype-skip-layers: {model.architecture} numbers its attention layers in "
            "its own way; use --exact"
        )
    if options.pipeline_parallel_size > 1 and model.architecture in NO_PIPELINE:
        raise UsageError(
            f"--pipeline-parallel-size {options.pipeline_parallel_size}: vLLM has no pipeline "
            f"parallelism for {model.architecture}"
        )
    if options.pipeline_parallel_size > model.num_hidden_layers:
        raise UsageError(
            f"--pipeline-parallel-size {options.pipeline_parallel_size} is more than the model's "
            f"{model.num_hidden_layers} layers"
        )


def check_float16(dtype: str, config: Mapping[str, Any]) -> None:
    """_check_valid_dtype (config/model.py)."""
    if dtype == "float16" and config.get("model_type") in NO_FLOAT16:
        raise UsageError(
            f"--dtype float16: vLLM refuses it for model_type {config['model_type']}; give "
            "bfloat16 or float32"
        )


def _check_block_size(options: "Options", model: Model) -> None:
    """get_supported_kernel_block_sizes of every backend of the platform is a multiple of this."""
    attention = [one for one in model.layers if isinstance(one, AttentionLayer)]
    if options.block_size is None or not attention:
        return
    is_dense_cpu = options.platform == "cpu" and any(one.kind is not Kind.MLA for one in attention)
    unit = 32 if is_dense_cpu else 16
    if options.block_size % unit:
        raise UsageError(
            f"--block-size {options.block_size}: no attention backend of vLLM takes it on "
            f"{options.platform}; give a multiple of {unit}"
        )


def _check_heads(options: "Options", model: Model) -> None:
    """QKVParallelLinear: KV heads are divided among the ranks, or ranks among the KV heads."""
    ranks = options.tensor_parallel_size
    for layer in model.layers:
        if not isinstance(layer, AttentionLayer) or layer.kind is Kind.MLA:
            continue
        heads = layer.num_kv_heads
        if heads < 1 or layer.head_size < 1:
            raise BadInputError(
                f"layer {layer.index} has {heads} KV heads of {layer.head_size} elements, so it "
                "caches nothing; correct num_key_value_heads or head_dim in the config.json"
            )
        if max(heads, ranks) % min(heads, ranks):
            raise UsageError(
                f"--tensor-parallel-size {ranks} and the model's {heads} KV heads do not divide "
                "one another; vLLM refuses it too"
            )


def _check_context_parallel(options: "Options", model: Model) -> None:
    """ModelConfig.verify_with_parallel_config: only repeated KV heads leave something to share."""
    ranks = options.decode_context_parallel_size
    heads = max(
        (layer.num_kv_heads for layer in model.layers if isinstance(layer, AttentionLayer)),
        default=0,
    )
    if ranks == 1 or model.uses_mla or not heads:
        return
    if options.tensor_parallel_size // heads < ranks or options.tensor_parallel_size <= heads:
        raise UsageError(
            f"--decode-context-parallel-size {ranks} needs --tensor-parallel-size of at least "
            f"{ranks * heads} for {heads} KV heads; vLLM refuses it too"
        )
    if any(isinstance(one, AttentionLayer) and one.kind is Kind.SLIDING for one in model.layers):
        raise UsageError(
            "--decode-context-parallel-size: vLLM has none for sliding windows; leave it out"
        )
