"""vLLM's objects -> our records. The one place that reads the fields of vLLM's configuration,
requests and specs; written against vLLM 0.30 and tested with its real types.

Imports nothing of vLLM at load: the probe runs inside engines, where vLLM already is.
"""

from collections.abc import Callable
from typing import Any

from omnicache_cli.trace.records import CacheGroup, EngineSource, MultiModalSpan, RequestRecord

HASH_ATTRIBUTE = "_omnicache_hash_ns"
"""Set on a Request that was traced while vLLM made it: how long its prompt was hashed."""

HASH_BYTES = 8
"""Trailing bytes of a block hash that are kept: those vLLM's KV events show as an integer."""

_UNMAPPED_SPECS = frozenset({"MambaSpec", "EncoderOnlyAttentionSpec"})


def plain(text: Any) -> str:
    """Text that JSON can hold: a file name or an id may have bytes that are no UTF-8."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def short_hash(block_hash: bytes) -> str:
    """The trailing bytes of a block hash, in hex."""
    return block_hash[-HASH_BYTES:].hex()


def cache_group(group: Any, *, is_eagle_group: bool = False) -> CacheGroup:
    """One vLLM KVCacheGroupSpec."""
    spec = group.kv_cache_spec
    dtype = getattr(spec, "dtype", None)  # mamba has dtypes, uniform-type groups one per layer
    names = [base.__name__ for base in type(spec).__mro__]
    return CacheGroup(
        spec=names[0],
        block_size=int(spec.block_size),
        num_layers=len(group.layer_names),
        layer_names=list(group.layer_names),
        page_size_bytes=int(spec.page_size_bytes),
        maps_slots=_UNMAPPED_SPECS.isdisjoint(names),
        sliding_window=getattr(spec, "sliding_window", None),
        num_kv_heads=getattr(spec, "num_kv_heads", None),
        head_size=getattr(spec, "head_size", None),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        prefix_cacheable=bool(spec.prefix_cacheable),
        is_eagle_group=is_eagle_group,
    )


def engine_source(
    scheduler: Any, *, source: int, engine: str, checks_hashes: bool = False
) -> EngineSource:
    """A constructed vLLM Scheduler: its configuration as far as the cache depends on it."""
    from vllm import envs

    config = scheduler.vllm_config
    kv_cache = scheduler.kv_cache_config
    cache, model, parallel = config.cache_config, config.model_config, config.parallel_config
    eagle = scheduler.kv_cache_manager.coordinator.eagle_group_ids
    stage = getattr(model, "model_stage", None)  # vLLM-Omni's ModelConfig has it, vLLM's has not
    return EngineSource(
        source=source,
        engine=engine,
        model=plain(model.model),
        scheduler_class=f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        num_gpu_blocks=int(kv_cache.num_blocks),
        block_size=int(scheduler.block_size),
        hash_block_size=int(scheduler.hash_block_size),
        enable_prefix_caching=bool(scheduler.kv_cache_manager.enable_caching),
        groups=[
            cache_group(group, is_eagle_group=number in eagle)
            for number, group in enumerate(kv_cache.kv_cache_groups)
        ],
        kv_cache_tensors=[
            {"size": int(tensor.size), "layers": list(tensor.layers)}
            for tensor in kv_cache.kv_cache_tensors
        ],
        parallel={
            "world_size": int(parallel.world_size),
            "tensor_parallel_size": int(parallel.tensor_parallel_size),
            "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
            "data_parallel_size": int(parallel.data_parallel_size),
            "data_parallel_rank": int(parallel.data_parallel_rank),
            "decode_context_parallel_size": int(parallel.decode_context_parallel_size),
        },
        options={
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "max_num_seqs": int(config.scheduler_config.max_num_seqs),
            "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
            "enable_chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "policy": str(config.scheduler_config.policy),
            "kv_cache_dtype": str(cache.cache_dtype),
            "prefix_caching_hash_algo": str(cache.prefix_caching_hash_algo),
            "mamba_cache_mode": str(cache.mamba_cache_mode),
            "prefix_cache_retention_interval": cache.prefix_cache_retention_interval,
            "enforce_eager": bool(model.enforce_eager),
            "use_v2_model_runner": bool(scheduler.use_v2_model_runner),
            "num_spec_tokens": int(scheduler.num_spec_tokens),
            "use_eagle": bool(scheduler.use_eagle),
            "kv_connector": scheduler.connector is not None,
            "lora": config.lora_config is not None,
        },
        randomized_request_ids=not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION,
        cache_hit_alignment_tokens=_hit_alignment(scheduler.kv_cache_manager),
        checks_hashes=checks_hashes,
        stage_id=None if stage is None else int(model.stage_id),
        stage=None if stage is None else plain(stage),
    )


def _hit_alignment(manager: Any) -> int | None:
    """What every prefix hit is a multiple of, in tokens; None: there are no hits."""
    coordinator = manager.coordinator
    if not manager.enable_caching:
        return None
    if len(manager.kv_cache_config.kv_cache_groups) == 1:
        return int(coordinator.block_size)
    return int(coordinator._cache_hit_alignment_tokens)


def group_hit_tokens(manager: Any, request: Any) -> list[int]:
    """Each KV cache group's own longest hit, as the pool stands; empty for a single group."""
    coordinator = manager.coordinator
    several = len(manager.kv_cache_config.kv_cache_groups) > 1
    if not several or not manager.prefix_cache_lookup_enabled(request):
        return []
    _, hits = coordinator.find_longest_cache_hit_per_group(
        request.block_hashes, request.num_tokens - 1
    )
    return [int(hit) for hit in hits]


def multimodal_spans(request: Any) -> list[MultiModalSpan]:
    """The placeholder spans of a vLLM Request, by offset."""
    return [
        MultiModalSpan(
            str(feature.modality),
            int(feature.mm_position.offset),
            int(feature.mm_position.length),
            plain(feature.identifier),
        )
        for feature in request.mm_features
    ]


def request_record(
    request: Any,
    *,
    source: int,
    number: int,
    arrival_ns: int,
    arrival_step: int,
    hash_block_size: int,
    digest_salt: Callable[[str], str],
    with_token_ids: bool,
) -> RequestRecord:
    """A vLLM Request as it reaches the scheduler."""
    lora = request.lora_request
    salt = request.cache_salt
    return RequestRecord(
        source=source,
        request=number,
        request_id=plain(request.request_id),
        arrival_ns=arrival_ns,
        arrival_step=arrival_step,
        num_prompt_tokens=int(request.num_prompt_tokens),
        max_tokens=int(request.max_tokens),
        block_hashes=[short_hash(one) for one in request.block_hashes],
        extra_keys=_extra_keys(request, hash_block_size, digest_salt),
        multimodal=multimodal_spans(request),
        lora_name=None if lora is None else plain(lora.name),
        lora_id=None if lora is None else int(lora.adapter_id),
        cache_salt=None if salt is None else digest_salt(salt),
        skip_reading_prefix_cache=bool(request.skip_reading_prefix_cache),
        priority=int(request.priority),
        token_ids=list(request.prompt_token_ids or ()) if with_token_ids else None,
        hash_ns=getattr(request, HASH_ATTRIBUTE, None),
    )


def _extra_keys(
    request: Any, hash_block_size: int, digest_salt: Callable[[str], str]
) -> list[tuple[int, list[str]]]:
    """Extra keys of each hashed prompt block that has any, as vLLM's own function gives them."""
    if not (request.mm_features or request.lora_request or request.cache_salt) and (
        request.prompt_embeds is None
    ):
        return []
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    found = []
    multimodal_index = 0
    for index in range(len(request.block_hashes)):
        start = index * hash_block_size
        keys, multimodal_index = generate_block_hash_extra_keys(
            request, start, start + hash_block_size, multimodal_index
        )
        if keys:
            found.append((index, [_key_text(key, request.cache_salt, digest_salt) for key in keys]))
    return found


def _key_text(key: Any, salt: str | None, digest_salt: Callable[[str], str]) -> str:
    """One extra key as text: a LoRA name, a salt's digest, or multimodal hash@offset in block."""
    if isinstance(key, str):
        # a salt that equals a LoRA's name is hidden too: better than to show a secret
        return f"salt:{digest_salt(key)}" if key == salt else f"lora:{plain(key)}"
    if isinstance(key, tuple) and len(key) == 2:
        return plain(f"mm:{key[0]}@{key[1]}")
    return f"embeds:{key.hex() if isinstance(key, bytes) else key}"
