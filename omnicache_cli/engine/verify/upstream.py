"""vLLM-Omni's own tensor prefix cache, driven on a plain vLLM engine through its public calls."""

from typing import Any

from omnicache_cli import advice
from omnicache_cli.engine.verify.capture import Given
from omnicache_cli.errors import EngineMissingError
from omnicache_cli.tensor_cache.layout import StepLayout
from omnicache_cli.verify.runs import HIDDEN_STATES


class UpstreamCache:
    """`OmniPrefixCacheManager` of vLLM-Omni 0.30."""

    def __init__(self, runner: Any) -> None:
        """EngineMissingError: vLLM-Omni is not installed, or is another one."""
        try:
            from vllm_omni.core.prefix_cache.group_view import get_prefix_cache_group_view
            from vllm_omni.core.prefix_cache.interface import ModelCachePolicy, PrefixCacheConfig
            from vllm_omni.core.prefix_cache.manager import OmniPrefixCacheManager
        except ImportError as error:
            raise EngineMissingError(
                f"--cache vllm-omni needs vLLM-Omni {advice.VLLM_VERSION}: {error}; "
                f"{advice.install_omni()}, or leave it out"
            ) from error
        config = runner.vllm_config
        block_size = int(config.cache_config.block_size)
        sizes = PrefixCacheConfig.from_vllm_config(
            num_blocks=int(runner.kv_cache_config.num_blocks),
            block_size=block_size,
            scheduler_config=config.scheduler_config,
            model_config=config.model_config,
        )
        view = get_prefix_cache_group_view(
            runner.input_batch, block_size, kv_cache_groups=runner.kv_cache_config.kv_cache_groups
        )
        self.manager = OmniPrefixCacheManager(sizes, view)
        self.manager.register_policy(ModelCachePolicy())
        self._refused: str | None = None  # by `begin`; told with the step

    def begin(self, scheduler_output: Any) -> None:
        try:
            self.manager.new_step_starts(scheduler_output)
        except Exception as error:
            self._refused = told(error)

    def step(self, layout: StepLayout, outputs: dict[str, Any]) -> Given:
        refused, self._refused = self._refused, None
        if refused is not None:
            return Given({}, refused)
        others = {key: value for key, value in outputs.items() if key != HIDDEN_STATES}
        ids = [one.request_id for one in layout.requests]
        try:
            number = self.manager.save_outputs(
                outputs[HIDDEN_STATES],
                others,
                num_tokens_unpadded=layout.num_tokens,
                num_tokens_padded=layout.num_tokens_padded,
            )
            given = self.manager.materialize(number, ids)
        except Exception as error:
            return Given({}, told(error))
        rows: dict[str, dict[str, Any]] = {request_id: {} for request_id in ids}
        by_key = {HIDDEN_STATES: given.hidden_states or {}, **given.mm_outputs}
        for key, of_requests in by_key.items():
            for request_id, value in of_requests.items():
                rows[request_id][key] = value
        return Given(rows)

    def close(self) -> None:
        self.manager.shutdown()


def upstream_key(key: str) -> str:
    """Its name for a key of ours."""
    from vllm_omni.core.prefix_cache.interface import HIDDEN_KEY

    return str(HIDDEN_KEY) if key == HIDDEN_STATES else key


def told(error: Exception) -> str:
    """An error of a cache in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
