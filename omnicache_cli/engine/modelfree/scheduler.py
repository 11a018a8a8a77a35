"""vLLM's own Scheduler and block pool, with nobody computing: every hit is vLLM's own.

Requests are token ids; a sampled token is always 0. Under `tracing` it writes the same records as
an engine does, without forward passes.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omnicache_cli.engine.options import IMPORT_ERRORS, missing_engine
from omnicache_cli.errors import BadInputError, UsageError

MAX_STEPS_WITHOUT_TOKENS = 3
"""vLLM schedules nothing for that long only when a request can never run."""

GroupKind = Literal["full", "sliding", "mamba"]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One KV cache group of a model that is not there."""

    kind: GroupKind
    block_size: int  # tokens
    window: int | None = None  # tokens, of kind sliding


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What the scheduler and its pool are made with."""

    groups: tuple[GroupPlan, ...]
    num_blocks: int = 4096  # usable ones, the null block apart
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 64
    long_prefill_token_threshold: int = 0  # tokens of one request in a step; 0: no limit
    max_model_len: int = 131_072
    hash_algo: str = "sha256"
    match_unit: int | None = None  # vLLM's prefix_match_unit, tokens
    retention_interval: int | None = 0  # vLLM's prefix_cache_retention_interval, tokens
    drops_unit: bool = False  # as with EAGLE or MTP drafting
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Media:
    """One image, audio or video of a prompt: its placeholder tokens and its hash."""

    modality: str
    hash: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """One request to schedule."""

    name: str
    token_ids: Sequence[int]
    max_tokens: int = 1
    lora_name: str | None = None
    lora_id: int = 1
    cache_salt: str | None = None
    media: tuple[Media, ...] = ()
    skip_reading_prefix_cache: bool = False


@dataclass(slots=True)
class PoolScheduler:
    """Enter `tracing` before one is made. Methods raise vLLM's own errors."""

    plan: PoolPlan
    _scheduler: Any = None
    _hasher: Any = None
    _idle: int = 0  # steps without a token

    def __post_init__(self) -> None:
        """EngineMissingError: no vLLM here. UsageError: vLLM refuses the plan."""
        self._scheduler, self._hasher, _ = build(self.plan, log_stats=True)

    def add(self, one: PoolRequest) -> None:
        """A request arrives. BadInputError: the pool or the model length is too small for it."""
        size = min(group.block_size for group in self.plan.groups)
        total = len(one.token_ids) + one.max_tokens
        if total > self.plan.max_model_len or total > self.plan.num_blocks * size:
            raise BadInputError(
                f"request {one.name} needs {total} tokens; the pool has "
                f"{self.plan.num_blocks * size}, a request at most {self.plan.max_model_len}; "
                "give a larger --num-gpu-blocks"
            )
        self._scheduler.add_request(self._request(one))

    def step(self) -> int:
        """Schedule once and pretend to compute; the tokens that were scheduled.

        BadInputError: a request waits that can never run.
        """
        from vllm.v1.outputs import ModelRunnerOutput

        output = self._scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self._scheduler.requests[name]
            sampled.append([0] if request.num_computed_tokens >= request.num_tokens else [])
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        self._scheduler.update_from_output(output, ran)
        tokens = int(output.total_num_scheduled_tokens)
        self._idle = 0 if tokens or not self.is_busy else self._idle + 1
        if self._idle > MAX_STEPS_WITHOUT_TOKENS:
            raise BadInputError(
                f"vLLM cannot run a request in {self.plan.num_blocks} blocks; "
                "give a larger --num-gpu-blocks"
            )
        return tokens

    @property
    def is_busy(self) -> bool:
        """A request waits or runs."""
        return bool(self._scheduler.has_unfinished_requests())

    def run(self) -> None:
        """Until every request has ended. BadInputError: one can never run."""
        while self.is_busy:
            self.step()

    def abort(self, name: str) -> None:
        """The client of this request goes away."""
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self) -> bool:
        return bool(self._scheduler.reset_prefix_cache())

    def _request(self, one: PoolRequest) -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            max_tokens=one.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            skip_reading_prefix_cache=one.skip_reading_prefix_cache,
        )
        lora = None
        if one.lora_name is not None:
            lora = LoRARequest(one.lora_name, one.lora_id, lora_path="not loaded")
        features = [
            MultiModalFeatureSpec(
                data=None,
                modality=item.modality,
                identifier=item.hash,
                mm_position=PlaceholderRange(offset=item.offset, length=item.length),
            )
            for item in sorted(one.media, key=lambda item: item.offset)
        ]
        # Media are in the hashes; nobody encodes them here.
        unencoded = {"num_encoder_inputs": 0, "has_encoder_inputs": False}
        return type("Request", (Request,), unencoded)(
            one.name,
            list(one.token_ids),
            params,
            None,
            mm_features=features or None,
            lora_request=lora,
            cache_salt=one.cache_salt,
            block_hasher=self._hasher,
        )


def build(plan: PoolPlan, *, log_stats: bool) -> tuple[Any, Any, Any]:
    """vLLM's Scheduler, its block hasher, and the hash function in it.

    EngineMissingError: no vLLM here. UsageError: vLLM refuses the plan.
    """
    try:
        import vllm  # noqa: F401
    except IMPORT_ERRORS as error:
        raise missing_engine(error, "the hasher and block pool are vLLM's") from error
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        init_none_hash,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    config = _config(plan)
    cache = _kv_cache_config(plan)
    try:
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
        hash_function = get_hash_fn_by_name(plan.hash_algo)
        init_none_hash(hash_function)
        hasher = get_request_block_hasher(hash_block_size, hash_function)
        scheduler = Scheduler(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=log_stats,
        )
    except (ValueError, AssertionError) as error:
        raise UsageError(f"vLLM refuses these KV cache groups: {error}") from error
    return scheduler, hasher, hash_function


def _config(plan: PoolPlan) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory(prefix="omnicache-") as folder:
        text = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": plan.max_model_len,
        }
        (Path(folder) / "config.json").write_text(json.dumps(text), encoding="utf-8")
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=plan.max_model_len,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_caching=plan.enable_prefix_caching,
            async_scheduling=False,
        ).create_engine_config()
    config.model_config.model = "(no model)"
    config.scheduler_config.long_prefill_token_threshold = plan.long_prefill_token_threshold
    cache = config.cache_config
    cache.num_gpu_blocks = plan.num_blocks + 1
    states = [group.block_size for group in plan.groups if group.kind == "mamba"]
    cache.block_size = states[0] if states else plan.groups[0].block_size
    cache.prefix_match_unit = plan.match_unit
    cache.prefix_caching_hash_algo = plan.hash_algo
    cache.prefix_cache_retention_interval = plan.retention_interval
    if states:
        cache.mamba_cache_mode = "align"
    return config


def _kv_cache_config(plan: PoolPlan) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [
        KVCacheGroupSpec([f"layers.{number}"], _spec(group), is_eagle_group=plan.drops_unit)
        for number, group in enumerate(plan.groups)
    ]
    sparse = any(group.kind != "full" for group in plan.groups)
    return KVCacheConfig(
        num_blocks=plan.num_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=plan.retention_interval if sparse else None,
    )


def _spec(group: GroupPlan) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    heads = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    if group.kind == "full":
        return FullAttentionSpec(block_size=group.block_size, **heads)
    if group.kind == "sliding":
        return SlidingWindowSpec(block_size=group.block_size, sliding_window=group.window, **heads)
    return MambaSpec(
        block_size=group.block_size,
        shapes=((1, 1),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
    )
