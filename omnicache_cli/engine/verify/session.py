"""Two engines of one model in this process, one with a prefix cache and one without."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self

from omnicache_cli.engine.launch import Engine, Outcome
from omnicache_cli.engine.options import EngineOptions, engine_config
from omnicache_cli.engine.tiny_images import write_test_image
from omnicache_cli.engine.verify.builtin import BuiltinCache
from omnicache_cli.engine.verify.capture import AttachedCache, Capture, layer_paths
from omnicache_cli.engine.verify.lint import refuse, refuse_groups
from omnicache_cli.engine.verify.upstream import UpstreamCache
from omnicache_cli.trace.workload import Lora, Prompt, Workload
from omnicache_cli.verify.run import Shape
from omnicache_cli.verify.runs import How, RequestRun, RunRows, SampledToken
from omnicache_cli.verify.scenarios import ModelFacts

CacheKind = Literal["builtin", "vllm-omni"]
CACHES: tuple[CacheKind, ...] = ("builtin", "vllm-omni")
Baseline = Literal["engine", "in-engine"]

PICTURE_SIZE = (336, 224)
"""Of the pictures that scenarios send, pixels: enough placeholder tokens for several blocks."""

SAMPLING = {"logprobs": 2, "seed": 0}
"""The runner-up's log probability says how close a choice was."""


@dataclasses.dataclass(frozen=True, slots=True)
class SessionOptions:
    """What to verify, beyond the engine's own arguments."""

    cache: CacheKind = "builtin"
    baseline: Baseline = "engine"
    layers: tuple[int, ...] | None = None  # None: the first and the middle one
    loras: tuple[Lora, ...] = ()  # the engine must be started for them


class EngineSession:
    """`verify.run.Session` on vLLM. Use as a context manager."""

    def __init__(self, engine: EngineOptions, options: SessionOptions) -> None:
        """BadInputError: this cannot be verified. EngineFailedError: an engine does not start."""
        self.notes: list[str] = []
        self._options = options
        self._model = engine.model
        args = dict(engine.args)
        if options.layers != ():
            self._force_eager(args)
        args.setdefault("enable_prefix_caching", True)
        refuse(engine_config(EngineOptions(engine.model, args)))
        self._stack = contextlib.ExitStack()
        try:
            self._open(engine.model, args, options)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, model: str, args: dict[str, Any], options: SessionOptions) -> None:
        self.warm_engine = self._stack.enter_context(Engine(EngineOptions(model, args)))
        self.notes += self.warm_engine.notes
        runner = self.warm_engine.model_runner
        refuse_groups(runner.kv_cache_config.kv_cache_groups)
        layers = default_layers(runner) if options.layers is None else options.layers
        self.warm_capture = Capture(runner, layers)
        self.attached: AttachedCache | None = _attach(options.cache, runner)
        self._stack.callback(self._close_cache)
        self.warm_capture.enabled = True
        if options.baseline == "in-engine":
            self._cold, self._cold_capture = self.warm_engine, self.warm_capture
            self._cold_sampling: dict[str, Any] = {"skip_reading_prefix_cache": True}
        else:
            cold_args = {**args, "enable_prefix_caching": False}
            self._cold = self._stack.enter_context(Engine(EngineOptions(model, cold_args)))
            self._cold_capture = Capture(self._cold.model_runner, layers)
            self._cold_capture.enabled = True
            self._cold_sampling = {}

    def _close_cache(self) -> None:
        if self.attached is not None:
            self.attached.close()

    def _force_eager(self, args: dict[str, Any]) -> None:
        """Layer outputs are read by hooks, which no compiled graph calls."""
        if not args.get("enforce_eager"):
            args["enforce_eager"] = True
            self.notes.append(
                "runs in eager mode, to read the outputs of layers; --layers none leaves them out"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def block_size(self) -> int:
        groups = self.warm_engine.model_runner.kv_cache_config.kv_cache_groups
        return int(groups[0].kv_cache_spec.block_size)

    @property
    def keys(self) -> Sequence[str]:
        return self.warm_capture.keys

    def described(self) -> dict[str, Any]:
        """What ran, for a report."""
        runner = self.warm_engine.model_runner
        return {
            "model": self._model,
            "cache": self._options.cache,
            "baseline": self._options.baseline,
            "dtype": str(self.warm_engine.model_config.dtype).removeprefix("torch."),
            "device": str(runner.device),
            "block size": self.block_size,
            "attention": runner.attn_groups[0][0].backend.get_name(),
            "keys": ", ".join(self.keys),
        }

    def facts(self) -> ModelFacts:
        """For the scenarios. Pictures are made for the time of the session."""
        model = self.warm_engine.model_config
        placeholder = self.warm_engine.image_placeholder()
        return ModelFacts(
            block_size=self.block_size,
            max_model_len=int(model.max_model_len),
            vocab_size=int(model.get_vocab_size()),
            count_tokens=self.warm_engine.count_tokens,
            image_placeholder=placeholder,
            max_images=self.warm_engine.max_images(),
            max_num_seqs=self.warm_engine.max_num_seqs,
            pictures=None if placeholder is None else self._pictures(),
            loras=self._options.loras,
        )

    def _pictures(self) -> tuple[Path, Path]:
        folder = self._folder()
        paths = folder / "one.png", folder / "other.png"
        for seed, path in enumerate(paths):
            write_test_image(path, width=PICTURE_SIZE[0], height=PICTURE_SIZE[1], seed=seed)
        return paths

    def _folder(self) -> Path:
        """For files of the session's time."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="omnicache-")))

    def with_cache(self, prompts: Mapping[str, Prompt], max_tokens: int, how: How) -> RunRows:
        """Through the prefix cache and the tensor cache."""
        engine, capture = self.warm_engine, self.warm_capture
        many = max(1, len(prompts)) if how.together else 1
        capture.cache = self.attached
        try:
            with engine.prefill_in_pieces(how.pieces or 0):
                return run_prompts(engine, capture, prompts, max_tokens, {}, concurrency=many)
        finally:
            capture.cache = None

    def without_cache(
        self, prompts: Mapping[str, Prompt], max_tokens: int, shape: Shape, cut: Mapping[str, int]
    ) -> RunRows:
        """The same without any cache; `cut`: tokens per piece, for the shape CUT."""
        run = (self._cold, self._cold_capture)
        if shape is not Shape.CUT:
            many = len(prompts) if shape is Shape.TOGETHER else 1
            return run_prompts(*run, prompts, max_tokens, self._cold_sampling, concurrency=many)
        rows = RunRows()
        for name, tokens in cut.items():
            with self._cold.prefill_in_pieces(tokens):
                one = run_prompts(*run, {name: prompts[name]}, max_tokens, self._cold_sampling)
            rows.requests |= one.requests
            rows.computed += one.computed
        return rows

    def empty_cache(self) -> None:
        self.warm_engine.reset_prefix_cache()

    @property
    def capturing(self) -> bool:
        """Whether runs leave rows behind; without, they cost what they cost."""
        return self.warm_capture.enabled

    @capturing.setter
    def capturing(self, enabled: bool) -> None:
        self.warm_capture.enabled = self._cold_capture.enabled = enabled

    @property
    def cache_kind(self) -> CacheKind:
        return self._options.cache

    def use_cache(self, kind: CacheKind) -> None:
        """From now on, and a new one: it holds nothing yet."""
        self.empty_cache()
        self._close_cache()
        self.attached = _attach(kind, self.warm_engine.model_runner)
        self._options = dataclasses.replace(self._options, cache=kind)

    def limited_pool(self, num_blocks: int | None) -> AbstractContextManager[None]:
        if num_blocks is None:
            return contextlib.nullcontext()
        return self.warm_engine.limited_pool(num_blocks)


def default_layers(runner: Any) -> tuple[int, ...]:
    """The first decoder layer and the one in the middle."""
    known = sorted(layer_paths(runner))
    return tuple(sorted({known[0], known[len(known) // 2]})) if known else ()


def _attach(kind: CacheKind, runner: Any) -> AttachedCache:
    if kind == "vllm-omni":
        return UpstreamCache(runner)
    groups = runner.kv_cache_config.kv_cache_groups
    return BuiltinCache(int(groups[0].kv_cache_spec.block_size))


def run_prompts(
    engine: Engine,
    capture: Capture,
    prompts: Mapping[str, Prompt],
    max_tokens: int,
    sampling: Mapping[str, Any],
    concurrency: int = 1,
) -> RunRows:
    capture.take()
    workload = Workload(
        tuple(prompts.values()),
        concurrency=concurrency,
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    outcomes = engine.run(workload, names=tuple(prompts), sampling={**SAMPLING, **sampling})
    recorded = capture.take()
    done = {outcome.request_id: _request_run(outcome) for outcome in outcomes}
    requests = {name: done[name] for name in prompts}
    return RunRows(requests, recorded.computed, recorded.delivered, recorded.num_resumed)


def _request_run(outcome: Outcome) -> RequestRun:
    tokens = []
    for token_id, logprobs in zip(outcome.token_ids, outcome.logprobs, strict=True):
        others = [value for other, value in logprobs.items() if other != token_id]
        margin = logprobs[token_id] - max(others) if others else None
        tokens.append(SampledToken(token_id, logprobs[token_id], margin))
    return RequestRun(
        outcome.request_id, outcome.num_prompt_tokens, outcome.num_cached_tokens, tuple(tokens)
    )
