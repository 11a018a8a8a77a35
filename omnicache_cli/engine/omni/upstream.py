"""vLLM-Omni itself: is it there, is it the version that omnicache knows, which pipelines has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from omnicache_cli import advice
from omnicache_cli.engine.options import engine_args_class, first_line
from omnicache_cli.errors import BadInputError, EngineMissingError


def require_omni() -> str:
    """The installed version. EngineMissingError: it, or vLLM, is missing or another one."""
    engine_args_class()
    try:
        version = metadata.version("vllm-omni")
    except metadata.PackageNotFoundError as error:
        raise EngineMissingError(f"vLLM-Omni is not installed; {advice.install_omni()}") from error
    if not is_known(version):
        raise EngineMissingError(
            f"vLLM-Omni {version} is installed, and omnicache knows the stages of "
            f"{advice.VLLM_VERSION} only; {advice.install_omni()}"
        )
    try:
        import vllm_omni  # noqa: F401  it changes vLLM, and does so before anything else is loaded
    except Exception as error:
        raise EngineMissingError(
            f"vLLM-Omni does not import: {first_line(error)}; "
            f"{advice.mend_for(error) or advice.ASK_THE_DOCTOR}"
        ) from error
    return version


def is_known(version: str) -> bool:
    """0.30.0, 0.30.1, 0.30.0+cpu; no release candidate of it."""
    public = version.partition("+")[0]
    numbers = public.split(".")
    return ".".join(numbers[:2]) == advice.VLLM_VERSION and all(part.isdigit() for part in numbers)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a model's pipeline, as vLLM-Omni knows it."""

    stage_id: int
    name: str  # vLLM-Omni's model_stage
    kind: str  # llm_ar, llm_generation, diffusion
    input_sources: tuple[int, ...]  # ids of the stages that it takes its input from
    config: Any  # vLLM-Omni's StagePipelineConfig


def pipeline_of(model: str, *, trust_remote_code: bool = False, key: str | None = None) -> Any:
    """vLLM-Omni's PipelineConfig of a model. `key`: as a deploy file names it.

    BadInputError: it has none. EngineMissingError: see `require_omni`.
    """
    require_omni()
    from vllm.transformers_utils.config import get_config
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, resolve_pipeline_config

    try:
        config = get_config(model, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise BadInputError(f"cannot read the model {model}: {first_line(error)}") from error
    name = key or str(config.model_type)
    if name not in OMNI_PIPELINES:
        raise BadInputError(
            f"vLLM-Omni has no pipeline for {name}; name an omni model, or leave out --stage and "
            "--deploy-config"
        )
    try:
        return resolve_pipeline_config(name, config)
    except Exception as error:
        raise BadInputError(f"vLLM-Omni's pipeline {name}: {first_line(error)}") from error


def stages_of(pipeline: Any) -> list[Stage]:
    """In the order of the pipeline."""
    return [
        Stage(
            int(one.stage_id),
            str(one.model_stage),
            str(one.execution_type.value),
            tuple(one.input_sources),
            one,
        )
        for one in pipeline.stages
    ]


def stage_named(stages: Sequence[Stage], name: str) -> Stage:
    """By name or id. BadInputError: there is none."""
    for stage in stages:
        if name in (stage.name, str(stage.stage_id)):
            return stage
    known = ", ".join(stage.name for stage in stages)
    raise BadInputError(f"the model has no stage {name!r}; choose: {known}")
