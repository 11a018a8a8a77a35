"""What the user asked for, by vLLM's names, and what vLLM makes of it for a model.

Every resolved value carries its source, so that a report can print it. Mirrors
EngineArgs.create_engine_config, VllmConfig.__post_init__, the platform's check_and_update_config
and MambaModelConfig.verify_and_update_config.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.kv_size.dtypes import kv_cache_dtype, model_dtype
from omnicache_cli.kv_size.hardware import Card
from omnicache_cli.kv_size.layers import AttentionLayer, MambaLayer, Model
from omnicache_cli.kv_size.positions import derived_max_model_len
from omnicache_cli.kv_size.refusals import check_float16, check_options

Platform = Literal["cuda", "cpu"]

DEFAULT_BLOCK_SIZE = 16
"""CacheConfig.DEFAULT_BLOCK_SIZE."""

CPU_BLOCK_SIZE = 128
CPU_MLA_BLOCK_SIZE = 16
MLA_BLOCK_SIZE = 64
"""The only kernel block of FLASHMLA and of the sparse MLA backends."""

MLA_BLOCKS = {7: 16, 8: 16, 9: 16, 10: 32, 12: 16}
MLA_BACKENDS = {9: "FLASH_ATTN_MLA", 10: "FLASHINFER_MLA"}
"""By compute capability: what vLLM's first MLA backend there prefers (_get_backend_priorities in
platforms/cuda.py), TRITON_MLA elsewhere. FLASH_ATTN_MLA takes no quantised cache; FLASHMLA does."""


@dataclass(frozen=True, slots=True)
class Options:
    """None is "not asked": vLLM's default, which may hang on the model and the card."""

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    block_size: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool | None = None
    mamba_cache_mode: str | None = None
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    num_speculative_tokens: int = 0
    speculative_method: str | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    num_gpu_blocks_override: int | None = None
    platform: Platform = "cuda"
    cpu_flags: frozenset[str] = frozenset()  # of the machine, for platform cpu

    @property
    def is_reference_mla(self) -> bool:
        """CpuPlatform's MLA kernels without AMX, should the model use MLA."""
        return self.platform == "cpu" and "amx_tile" not in self.cpu_flags


@dataclass(frozen=True, slots=True)
class Settings:
    """What vLLM would run with; `block_size` is before a hybrid model's alignment."""

    dtype: str
    kv_cache_dtype: str  # "auto" is the model's dtype
    kv_cache_dtype_skip_layers: tuple[str, ...]
    block_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool
    enable_prefix_caching: bool
    mamba_cache_mode: str
    mamba_cache_dtype: str
    mamba_ssm_cache_dtype: str
    num_speculative_tokens: int
    disable_hybrid_kv_cache_manager: bool
    num_gpu_blocks_override: int | None
    platform: Platform
    derived_max_model_len: int | None = None  # the longest that the config allows
    sources: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Every setting by name; the sources apart."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "sources"}

    @property
    def max_concurrent_batches(self) -> int:
        """VllmConfig.max_concurrent_batches; GPUs have the V2 model runner, unless mode is all."""
        stages = self.pipeline_parallel_size
        if not self.async_scheduling:
            return stages
        if self.platform == "cuda" and self.mamba_cache_mode != "all":
            return stages + 1
        return 2 if stages == 1 else stages

    @property
    def max_in_flight_tokens(self) -> int:
        """VllmConfig.max_in_flight_tokens."""
        return self.max_concurrent_batches * self.max_num_batched_tokens

    def with_length(self, max_model_len: int) -> "Settings":
        return replace(self, max_model_len=max_model_len)


def resolve(
    options: Options,
    model: Model,
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    card: Card | None = None,
) -> Settings:
    """UsageError: an option is out of its range; BadInputError: the config lacks a field."""
    check_options(options, model)
    sources: dict[str, str] = {}
    is_cpu = options.platform == "cpu"
    dtype = model_dtype(options.dtype, config, text)
    check_float16(dtype, config)
    sources["dtype"] = "config.json" if options.dtype == "auto" else "--dtype"
    quantization = config.get("quantization_config") or text.get("quantization_config")
    quantization = quantization or config.get("compression_config") or None
    if quantization is not None and not isinstance(quantization, Mapping):
        raise BadInputError(
            f"field quantization_config is {quantization!r}, not an object of fields; correct it"
        )
    cache_dtype, sources["kv_cache_dtype"] = kv_cache_dtype(options.kv_cache_dtype, quantization)
    if model.uses_mla and cache_dtype.startswith("fp8") and _is_sparse(model):
        cache_dtype = "fp8_ds_mla"
        sources["kv_cache_dtype"] += "; FLASHMLA_SPARSE packs it as fp8_ds_mla"
    length, sources["max_model_len"] = _max_model_len(options, config, text)
    prefix_caching, sources["enable_prefix_caching"] = _prefix_caching(options, model)
    is_async, sources["async_scheduling"] = _async(options)
    seqs, batched = _batch(options, model, card, length, sources)
    block_size, sources["block_size"] = _block_size(options, model, card, cache_dtype)
    mode, sources["mamba_cache_mode"] = _mamba_mode(options, model, prefix_caching)
    ssm, sources["mamba_ssm_cache_dtype"] = _ssm_dtype(options, model)
    disabled, sources["disable_hybrid_kv_cache_manager"] = _hybrid_manager(options, model, is_cpu)
    return Settings(
        dtype=dtype,
        kv_cache_dtype=cache_dtype,
        kv_cache_dtype_skip_layers=options.kv_cache_dtype_skip_layers,
        block_size=block_size,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        decode_context_parallel_size=options.decode_context_parallel_size,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        async_scheduling=is_async,
        enable_prefix_caching=prefix_caching,
        mamba_cache_mode=mode,
        mamba_cache_dtype=options.mamba_cache_dtype,
        mamba_ssm_cache_dtype=ssm,
        num_speculative_tokens=options.num_speculative_tokens,
        disable_hybrid_kv_cache_manager=disabled,
        num_gpu_blocks_override=options.num_gpu_blocks_override,
        platform=options.platform,
        derived_max_model_len=derived_max_model_len(config, text)[0],
        sources=sources,
    )


def _is_sparse(model: Model) -> bool:
    return any(isinstance(layer, AttentionLayer) and layer.is_indexer for layer in model.layers)


def _max_model_len(
    options: Options, config: Mapping[str, Any], text: Mapping[str, Any]
) -> tuple[int, str]:
    """_get_and_verify_max_len (config/model.py)."""
    derived, field_name = derived_max_model_len(config, text)
    if options.max_model_len is None:
        if derived is None:
            return 2048, "vLLM's default where the config names no length"
        return derived, field_name
    if derived is not None and options.max_model_len > derived:
        raise UsageError(
            f"--max-model-len {options.max_model_len} is more than the config's {field_name} "
            f"{derived}; vLLM refuses it too"
        )
    return options.max_model_len, "--max-model-len"


def _prefix_caching(options: Options, model: Model) -> tuple[bool, str]:
    """ModelConfig.is_prefix_caching_supported; CPU without AMX turns it off for MLA."""
    if model.encoder_tokens is not None:
        return False, "off: vLLM does not cache prefixes of encoder-decoder models"
    if options.is_reference_mla and model.uses_mla:
        return False, "off: MLA on a CPU without AMX"
    if options.enable_prefix_caching is not None:
        return options.enable_prefix_caching, "asked"
    if model.layers and not any(isinstance(layer, AttentionLayer) for layer in model.layers):
        return False, "off: vLLM's default for models without attention"
    return True, "on: vLLM's default"


def _async(options: Options) -> tuple[bool, str]:
    if options.platform == "cpu":
        return False, "off: CPU platform"
    if options.async_scheduling is not None:
        return options.async_scheduling, "asked"
    if options.speculative_method == "ngram":
        return False, "off: vLLM's default with ngram speculation"
    return True, "on: vLLM's default on GPUs"


def _batch(
    options: Options, model: Model, card: Card | None, length: int, sources: dict[str, str]
) -> tuple[int, int]:
    """EngineArgs.get_batch_defaults for `vllm serve` and what follows it."""
    if options.platform == "cpu":
        world = options.tensor_parallel_size * options.pipeline_parallel_size
        tokens, seqs, why = 2048 * world, 128 * world, "vLLM's default on a CPU"
    elif card is not None and card.bytes >= 160 << 30:
        tokens, seqs, why = 16384, 1024, f"vLLM's default on {card.name}"
    elif card is not None and card.bytes >= 70 << 30 and "a100" not in card.name.lower():
        tokens, seqs, why = 8192, 1024, f"vLLM's default on {card.name}"
    else:
        tokens, seqs = 2048, 256
        why = f"vLLM's default on {card.name}" if card else "vLLM's default below 70 GiB"
    if options.max_num_seqs is not None:
        seqs, sources["max_num_seqs"] = options.max_num_seqs, "--max-num-seqs"
    else:
        sources["max_num_seqs"] = why
    if options.max_num_batched_tokens is not None:
        sources["max_num_batched_tokens"] = "--max-num-batched-tokens"
        return seqs, options.max_num_batched_tokens
    no_chunks = model.encoder_tokens is not None
    if no_chunks or (options.is_reference_mla and model.uses_mla):
        tokens, why = max(length, tokens), "max_model_len: no chunked prefill here"
    tokens = min(seqs * length, tokens)
    sources["max_num_batched_tokens"] = why
    if options.max_num_seqs is None:
        seqs = min(seqs, tokens)
    return seqs, tokens


def _block_size(
    options: Options, model: Model, card: Card | None, cache_dtype: str
) -> tuple[int, str]:
    """Platform.update_block_size_for_backend, phase 1, and CpuPlatform.check_and_update_config."""
    if options.platform == "cpu":
        if options.is_reference_mla and model.uses_mla:
            return CPU_MLA_BLOCK_SIZE, "the CPU's MLA kernel without AMX"
        if options.block_size is None:
            return CPU_BLOCK_SIZE, "vLLM's default on a CPU"
    if options.block_size is not None:
        return options.block_size, "--block-size"
    if model.uses_mla:
        return _mla_block_size(card, cache_dtype, is_sparse=_is_sparse(model))
    return DEFAULT_BLOCK_SIZE, "vLLM's default"


def _mla_block_size(card: Card | None, cache_dtype: str, *, is_sparse: bool) -> tuple[int, str]:
    """The preferred block of the backend that vLLM chooses first for MLA on a card."""
    if is_sparse:
        return MLA_BLOCK_SIZE, "of FLASHMLA_SPARSE and FLASH_ATTN_MLA_SPARSE"
    if card is None or card.capability is None:
        return MLA_BLOCK_SIZE, (
            "of FLASHMLA; by the card vLLM prefers 16 (FLASH_ATTN_MLA on Hopper, TRITON_MLA) or 32 "
            "(FLASHINFER_MLA on B200): name it with --gpu, or give --block-size"
        )
    if card.capability == 9 and cache_dtype not in ("auto", "float16", "bfloat16"):
        return MLA_BLOCK_SIZE, f"of FLASHMLA, vLLM's first MLA backend on {card.name} for fp8"
    backend = MLA_BACKENDS.get(card.capability, "TRITON_MLA")
    return MLA_BLOCKS[card.capability], f"of {backend}, vLLM's first MLA backend on {card.name}"


def _mamba_mode(options: Options, model: Model, prefix_caching: bool) -> tuple[str, str]:
    """MambaModelConfig.verify_and_update_config."""
    rules = [layer.state for layer in model.layers if isinstance(layer, MambaLayer)]
    if not rules:
        return "none", "the model has no mamba layers"
    asked = options.mamba_cache_mode
    if not prefix_caching:
        return "none", "prefix caching is off"
    if asked == "all" and not all(rule.supports_all_mode for rule in rules):
        return "align", "vLLM falls back: this model does not support mode all"
    if asked in ("all", "align"):
        return asked, "--mamba-cache-mode"
    return "align", "vLLM's default with prefix caching"


def _ssm_dtype(options: Options, model: Model) -> tuple[str, str]:
    """CpuPlatform.check_and_update_config forces float32 where the CPU has AVX512-BF16."""
    asked = options.mamba_ssm_cache_dtype
    source = "vLLM's default: what the config names, or the model's dtype"
    if asked != "auto":
        source = "--mamba-ssm-cache-dtype"
    if options.platform != "cpu" or "avx512_bf16" not in options.cpu_flags:
        return asked, source
    rules = {layer.state.kind for layer in model.layers if isinstance(layer, MambaLayer)}
    if not rules or asked == "float32" or (asked != "auto" and "gated_delta_net" in rules):
        return asked, source
    return "float32", "vLLM's CPU platform, since this machine's CPU has AVX512-BF16"


def _hybrid_manager(options: Options, model: Model, is_cpu: bool) -> tuple[bool, str]:
    """VllmConfig.__post_init__: chunked attention turns the hybrid manager off."""
    if options.disable_hybrid_kv_cache_manager is not None:
        if model.disables_hybrid_manager and not options.disable_hybrid_kv_cache_manager:
            raise UsageError(
                "--no-disable-hybrid-kv-cache-manager: vLLM refuses it for chunked attention"
            )
        return options.disable_hybrid_kv_cache_manager, "asked"
    if model.disables_hybrid_manager:
        return True, "vLLM's default for chunked attention"
    return False, "vLLM's default"


def platform_named(name: str) -> Platform:
    platforms: tuple[Platform, ...] = get_args(Platform)
    for platform in platforms:
        if name == platform:
            return platform
    raise UsageError(f"--platform {name!r}: choose {' or '.join(platforms)}")
