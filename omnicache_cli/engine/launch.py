"""Starts a vLLM engine and sends it a workload. Knows nothing of tracing: see `tracing`.

The engine is vLLM's own LLMEngine. In the in-process layout the scheduler and the worker live in
this process, so one call of `step` is one engine step and arrivals can be exact; in the
engine-process layout the engine core and its workers are children, as behind an API server.
"""

import contextlib
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnicache_cli.engine.media import read_audio, read_image
from omnicache_cli.engine.options import EngineOptions, engine_args_class, first_line, told
from omnicache_cli.errors import BadInputError, EngineFailedError, UsageError
from omnicache_cli.trace.manifest import request_name
from omnicache_cli.trace.workload import Lora, Prompt, Workload

DEFAULT_CPU_KV_CACHE_BYTES = 1 << 30
"""KV cache on a CPU when nothing is asked for: vLLM's own default is 92% of the memory."""

SHUTDOWN_SECONDS = 60
"""vLLM's own 5 seconds are too few for a busy machine: the engine core is then killed."""

_MEMORY_ARGS = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request."""

    request_id: str  # external
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...] = ()  # per token, where asked for: token -> its own


def check_workload(options: EngineOptions, workload: Workload) -> None:
    """UsageError: the workload cannot be sent in this layout."""
    if workload.has_arrivals and options.engine_process:
        raise UsageError(
            "arrival_step needs the in-process layout: an engine in its own process steps on its "
            "own; leave out --engine-process"
        )


class Engine:
    """One running engine of this process. Use as a context manager: it leaves no child behind."""

    def __init__(self, options: EngineOptions, args_class: Any = None) -> None:
        """`args_class`: vLLM's EngineArgs, or a subclass, which the options are fields of.

        EngineMissingError: vLLM is not installed. EngineFailedError: it does not start.
        """
        engine_args = args_class or engine_args_class()
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        self.options = options
        self._closed = threading.Event()
        self._sockets: Path | None = None
        if options.engine_process:
            # vLLM leaves its sockets behind
            self._sockets = Path(tempfile.mkdtemp(prefix="omnicache-"))
            os.environ["VLLM_RPC_BASE_PATH"] = str(self._sockets)
        self.notes: list[str] = []
        self._loras: dict[Lora, Any] = {}
        args = {"use_tqdm_on_load": False, **options.args}
        memory_is_set = "VLLM_CPU_KVCACHE_SPACE" in os.environ or not _MEMORY_ARGS.isdisjoint(args)
        if current_platform.is_cpu() and not memory_is_set:
            args["kv_cache_memory_bytes"] = DEFAULT_CPU_KV_CACHE_BYTES
            if args.get("num_gpu_blocks_override") is None:
                self.notes.append(
                    "CPU: KV cache of 1 GiB; change it with --engine kv_cache_memory_bytes=BYTES"
                )
        try:
            self._engine = LLMEngine.from_engine_args(engine_args(model=options.model, **args))
        except Exception as error:
            self._remove_sockets()
            raise EngineFailedError(f"vLLM did not start: {told(error)}") from error
        if options.engine_process:
            watch = threading.Thread(
                target=_fail_when_dead, args=(self._engine.engine_core, self._closed), daemon=True
            )
            watch.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and its processes. Harmless when called again."""
        self._closed.set()
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.engine_core.shutdown(timeout=SHUTDOWN_SECONDS)
        self._remove_sockets()

    def run(
        self,
        workload: Workload,
        on_finished: Callable[[Outcome], None] | None = None,
        *,
        names: Sequence[str] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> list[Outcome]:
        """Send every prompt in every round; outcomes in finishing order. Sampling is greedy.

        Prompts with an arrival_step arrive before that step of their round, or as soon as the
        engine is idle; the others as soon as fewer than `concurrency` run. `names`: of the
        requests of a single round; `sampling`: further fields of vLLM's SamplingParams.
        """
        check_workload(self.options, workload)
        outcomes = []
        for number in range(workload.num_rounds):
            for outcome in self._round(workload, number, names, sampling or {}):
                outcomes.append(outcome)
                if on_finished is not None:
                    on_finished(outcome)
        return outcomes

    @property
    def model_runner(self) -> Any:
        """vLLM's model runner; only of an engine in this process."""
        core = self._engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    @property
    def block_pool(self) -> Any:
        """vLLM's block pool; only of an engine in this process."""
        return self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool

    @property
    def caches_prefixes(self) -> bool:
        """vLLM turns prefix caching off for some models and devices, whatever was asked."""
        return bool(self._engine.vllm_config.cache_config.enable_prefix_caching)

    @property
    def model_config(self) -> Any:
        """vLLM's ModelConfig."""
        return self._engine.model_config

    def count_tokens(self, text: str) -> int:
        """Tokens of a text as a prompt."""
        return len(self._engine.get_tokenizer().encode(text))

    def image_placeholder(self) -> str | None:
        """What stands for an image in a prompt's text; None: the model takes no images."""
        if not self.model_config.is_multimodal_model:
            return None
        from vllm.model_executor.model_loader.utils import get_model_cls

        placeholder: str | None = get_model_cls(self.model_config).get_placeholder_str("image", 1)
        return placeholder

    def max_images(self) -> int:
        """Images that one prompt may hold; 0: the model takes none."""
        config = self.model_config.multimodal_config
        return 0 if config is None else int(config.get_limit_per_prompt("image"))

    @property
    def max_num_seqs(self) -> int:
        """Requests that may run at once."""
        return int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    @contextlib.contextmanager
    def limited_pool(self, num_blocks: int) -> Iterator[None]:
        """Leave that many free blocks to the requests; only of an idle engine in this process.

        The others are taken from the pool for the time, as a long-running request would. Blocks
        that are left keep what they cache: take the pool into an empty cache.
        """
        pool = self.block_pool
        taken = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - num_blocks))
        try:
            yield
        finally:
            pool.free_blocks(taken)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks. EngineFailedError: a request still holds some."""
        if not self._engine.reset_prefix_cache():
            raise EngineFailedError("vLLM did not reset its prefix cache: a request holds blocks")

    @contextlib.contextmanager
    def prefill_in_pieces(self, num_tokens: int) -> Iterator[None]:
        """Prefill at most that many tokens of a request in a step, 0: any number; only of an engine
        in this process."""
        config = self._engine.engine_core.engine_core.scheduler.scheduler_config
        before = config.long_prefill_token_threshold
        config.long_prefill_token_threshold = num_tokens
        try:
            yield
        finally:
            config.long_prefill_token_threshold = before

    def metrics(self) -> list[Any]:
        """vLLM's own metrics of this process; empty when its statistics are off."""
        return list(self._engine.get_metrics()) if self._engine.log_stats else []

    def _round(
        self,
        workload: Workload,
        number: int,
        names: Sequence[str] | None,
        sampling: Mapping[str, Any],
    ) -> Iterator[Outcome]:
        waiting = deque(enumerate(workload.prompts))
        if workload.has_arrivals:
            waiting = deque(sorted(waiting, key=lambda one: one[1].arrival_step or 0))
        step = 0
        running = 0
        while waiting or running:
            while waiting:
                index, prompt = waiting[0]
                if workload.has_arrivals:
                    if running and (prompt.arrival_step or 0) > step:
                        break
                elif running >= workload.concurrency:
                    break
                waiting.popleft()
                name = request_name(index, number, workload.num_rounds)
                self._add(name if names is None else names[index], prompt, workload, sampling)
                running += 1
            for outcome in self._step():
                running -= 1
                yield outcome
            step += 1

    def _add(
        self, name: str, prompt: Prompt, workload: Workload, sampling: Mapping[str, Any]
    ) -> None:
        from vllm.renderers.inputs.preprocess import parse_model_prompt
        from vllm.sampling_params import SamplingParams

        engine = self._engine
        request: dict[str, Any] = (
            {"prompt": prompt.text}
            if prompt.token_ids is None
            else {"prompt_token_ids": prompt.token_ids}
        )
        media = {"image": [read_image(one) for one in prompt.images]} if prompt.images else {}
        if prompt.audio:
            media["audio"] = [read_audio(one) for one in prompt.audio]
        if media:
            request["multi_modal_data"] = media
        if prompt.cache_salt is not None:
            request["cache_salt"] = prompt.cache_salt
        params = SamplingParams(
            temperature=0.0,
            max_tokens=prompt.max_tokens or workload.max_tokens,
            ignore_eos=workload.ignore_eos,
            **sampling,
        )
        try:
            parsed = parse_model_prompt(engine.model_config, request)
            (rendered,) = engine.renderer.render_cmpl([parsed])
            engine.add_request(name, rendered, params, lora_request=self._lora(prompt.lora))
        except Exception as error:
            raise BadInputError(f"vLLM refuses request {name}: {first_line(error)}") from error

    def _step(self) -> Iterator[Outcome]:
        try:
            outputs = self._engine.step()
        except Exception as error:
            raise EngineFailedError(f"the engine failed in a step: {first_line(error)}") from error
        for output in outputs:
            if output.finished:
                yield Outcome(
                    output.request_id,
                    len(output.prompt_token_ids or ()),
                    int(output.num_cached_tokens or 0),
                    tuple(output.outputs[0].token_ids),
                    tuple(
                        {token: float(one.logprob) for token, one in position.items()}
                        for position in output.outputs[0].logprobs or ()
                    ),
                )

    def _remove_sockets(self) -> None:
        if self._sockets is not None:
            os.environ.pop("VLLM_RPC_BASE_PATH", None)
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None

    def _lora(self, lora: Lora | None) -> Any:
        if lora is None:
            return None
        from vllm.lora.request import LoRARequest

        if lora not in self._loras:
            self._loras[lora] = LoRARequest(lora.name or lora.path, len(self._loras) + 1, lora.path)
        return self._loras[lora]


def _fail_when_dead(client: Any, closed: threading.Event) -> None:
    """vLLM's client waits for ever for an engine core that was killed: end its wait."""
    from vllm.v1.engine.exceptions import EngineDeadError

    while not closed.wait(0.5):
        if client.resources.engine_dead:
            client.outputs_queue.put(EngineDeadError())
            return
