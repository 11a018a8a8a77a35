"""Two engines of one stage of an omni model: vLLM-Omni's own runner, with its cache and without."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from omnicache_cli.engine.launch import Engine
from omnicache_cli.engine.omni.capture import HIDDEN, StageCapture
from omnicache_cli.engine.omni.sound import write_test_sound
from omnicache_cli.engine.omni.upstream import Stage, pipeline_of, stage_named, stages_of
from omnicache_cli.engine.options import EngineOptions, check_engine_args, engine_config
from omnicache_cli.engine.verify.lint import refuse, refuse_groups
from omnicache_cli.engine.verify.session import EngineSession, SessionOptions
from omnicache_cli.errors import BadInputError, EngineFailedError
from omnicache_cli.verify.scenarios import ModelFacts

SOUND_SECONDS = 4
"""Of the sounds that scenarios send: more than a block of 32 tokens."""

DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_cudagraph_capture_size": 0,
    "async_scheduling": False,
    "enable_prefix_caching": True,
    "limit_mm_per_prompt": {"image": 2, "audio": 1, "video": 0},
}
"""Engine arguments of a stage, unless given."""


class StageSession(EngineSession):
    """`verify.run.Session` on one stage of vLLM-Omni. Use as a context manager."""

    def __init__(self, engine: EngineOptions, stage: str) -> None:
        """BadInputError: this cannot be verified. EngineMissingError: vLLM-Omni is not there.
        EngineFailedError: an engine does not start."""
        self.notes = []
        self._model = engine.model
        self._options = SessionOptions(cache="vllm-omni", layers=())
        trust = bool(engine.args.get("trust_remote_code"))
        pipeline = pipeline_of(engine.model, trust_remote_code=trust)
        self._stage = stage_named(stages_of(pipeline), stage)
        self._args_class = omni_args_class()
        args = {**stage_args(pipeline, self._stage), **DEFAULTS, **engine.args}
        options = EngineOptions(engine.model, args)
        check_engine_args(options, self._args_class)
        refuse(engine_config(options, self._args_class))
        self._stack = contextlib.ExitStack()
        try:
            self._open(engine.model, args, self._options)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, model: str, args: dict[str, Any], options: SessionOptions) -> None:
        self.warm_engine, self.warm_capture = self._started(model, args)
        self.notes += self.warm_engine.notes
        runner = self.warm_engine.model_runner
        refuse_groups(runner.kv_cache_config.kv_cache_groups)
        if runner._omni_prefix_cache_cfg is None and runner.omni_prefix_cache is None:
            raise BadInputError(
                f"vLLM-Omni builds no tensor cache for stage {self._stage.name}: nothing to verify"
            )
        self.attached = None
        self._cold, self._cold_capture = self._started(
            model, {**args, "enable_prefix_caching": False}
        )
        self._cold_sampling = {}

    def _started(self, model: str, args: dict[str, Any]) -> tuple[Engine, StageCapture]:
        engine = self._stack.enter_context(Engine(EngineOptions(model, args), self._args_class))
        runner = engine.model_runner
        if not hasattr(runner, "_prefix_cache_save_step"):
            raise EngineFailedError(
                f"stage {self._stage.name} runs on {type(runner).__name__}, which has no tensor "
                "cache of vLLM-Omni's"
            )
        capture = StageCapture(runner)
        capture.enabled = True
        return engine, capture

    def described(self) -> dict[str, Any]:
        """What ran, for a report."""
        runner = self.warm_engine.model_runner
        policy = runner._omni_cache_policy
        without_hidden = "" if policy.needs_full_hidden_states else "; hidden is not cached"
        deferred = ", ".join(sorted(policy.deferred_keys))
        return {
            "model": self._model,
            "stage": f"{self._stage.stage_id} {self._stage.name}",
            "runner": runner_name(runner),
            "cache": "vllm-omni's own",
            "dtype": str(self.warm_engine.model_config.dtype).removeprefix("torch."),
            "device": str(runner.device),
            "block size": self.block_size,
            "attention": runner.attn_groups[0][0].backend.get_name(),
            "keys": ", ".join(self.keys),
            "policy": f"deferred: {deferred or 'none'}{without_hidden}",
        }

    def facts(self) -> ModelFacts:
        """For the scenarios. Pictures and sounds are made for the time of the session."""
        facts = super().facts()
        images, sounds = (self._placeholder(kind) for kind in ("image", "audio"))
        return dataclasses.replace(
            facts,
            image_placeholder=images,
            pictures=self._pictures() if images is not None else None,
            audio_placeholder=sounds,
            sounds=self._sounds() if sounds is not None else None,
        )

    def _placeholder(self, modality: str) -> str | None:
        """What stands for one item in a prompt's text; None: the stage takes none.

        vLLM-Omni's wrapper around the stages has no answer of its own, the stage's model has.
        """
        config = self.warm_engine.model_config.multimodal_config
        if config is None or not config.get_limit_per_prompt(modality):
            return None
        outer = self.warm_engine.model_runner.get_model()
        for model in (outer, *(child for _, child in outer.named_children())):
            ask = getattr(type(model), "get_placeholder_str", None)
            with contextlib.suppress(ValueError):  # how a model says that it knows no such modality
                placeholder = None if ask is None else ask(modality, 1)
                if placeholder:
                    return str(placeholder)
        return None

    def _sounds(self) -> Any:
        folder = self._folder()
        paths = folder / "one.wav", folder / "other.wav"
        for seed, path in enumerate(paths):
            write_test_sound(path, seconds=SOUND_SECONDS, seed=seed)
        return paths

    @property
    def keys(self) -> Sequence[str]:
        """Those with rows per token that the model's policy caches."""
        seen = dict.fromkeys((*self.warm_capture.keys, *self._cold_capture.keys))
        if not self.warm_engine.model_runner._omni_cache_policy.needs_full_hidden_states:
            seen.pop(HIDDEN, None)
        return tuple(seen)


def stage_args(pipeline: Any, stage: Stage) -> dict[str, Any]:
    """Fields of OmniEngineArgs that make an engine of this stage alone.

    BadInputError: the stage has no cache to verify, or cannot run alone.
    """
    if stage.kind != "llm_ar":
        raise BadInputError(
            f"stage {stage.name} is of kind {stage.kind}: vLLM-Omni caches no tensors there"
        )
    if stage.input_sources:
        sources = ", ".join(str(one) for one in stage.input_sources)
        raise BadInputError(
            f"stage {stage.name} takes its input from stage {sources} and cannot run alone; verify "
            "the whole pipeline with --deploy-config"
        )
    config = stage.config
    # "latent" is what makes the runner hand a payload on; a pipeline that ends here says "text".
    kind = config.engine_output_type
    return {
        "stage_id": stage.stage_id,
        "model_stage": stage.name,
        "model_arch": config.model_arch or pipeline.model_arch,
        "hf_config_name": config.hf_config_name,
        "worker_type": "ar",
        "engine_output_type": "latent" if kind in (None, "text") else kind,
        "scheduler_cls": config.scheduler_cls
        or "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
    }


def runner_name(runner: Any) -> str:
    """The first class of the runner that is vLLM-Omni's own."""
    names = [base for base in type(runner).__mro__ if base.__module__.startswith("vllm_omni.")]
    return (names or [type(runner)])[0].__name__


def omni_args_class() -> Any:
    """OmniEngineArgs, vLLM-Omni's fields beside vLLM's."""
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    return OmniEngineArgs
