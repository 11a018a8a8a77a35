"""Reads a deploy file of vLLM-Omni and says what becomes of prefix caching, before anything starts.

The file is read and merged with the model's pipeline by vLLM-Omni's own code; the refusals are
those that its runner would make when the KV cache is set up (`core/prefix_cache/group_view.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnicache_cli.engine.omni.upstream import Stage, pipeline_of, require_omni, stages_of
from omnicache_cli.engine.options import first_line
from omnicache_cli.errors import BadInputError
from omnicache_cli.verify.deploy import StageLint

_CONSUMERS = ("kv_consumer", "kv_both")
_WINDOWS = ("sliding", "chunked", "linear", "mamba")
"""Parts of the names of layer types that get a KV cache group of their own."""


def lint_deploy(
    model: str, path: Path, *, trust_remote_code: bool = False
) -> tuple[str, list[StageLint]]:
    """The pipeline's name and all its stages. BadInputError: the file or the model cannot be read.

    EngineMissingError: vLLM-Omni is not there, or another version.
    """
    _check_there(path)
    require_omni()
    from vllm.transformers_utils.config import get_config
    from vllm_omni.config.stage_config import merge_pipeline_deploy, resolve_stage_async_chunk

    deploy = read_deploy(path)
    pipeline = pipeline_of(model, trust_remote_code=trust_remote_code, key=deploy.pipeline)
    try:
        merged = {one.stage_id: one for one in merge_pipeline_deploy(pipeline, deploy)}
    except Exception as error:
        raise BadInputError(f"vLLM-Omni refuses {path}: {first_line(error)}") from error
    config = get_config(model, trust_remote_code=trust_remote_code)
    by_id = {one.stage_id: one for one in deploy.stages}
    found = []
    for stage in stages_of(pipeline):
        args = merged[stage.stage_id].yaml_engine_args
        own = by_id.get(stage.stage_id)
        chunked = bool(resolve_stage_async_chunk(deploy, own)) and len(pipeline.stages) > 1
        caches = stage.kind == "llm_ar"
        enabled = args.get("enable_prefix_caching")
        found.append(
            StageLint(
                stage.stage_id,
                stage.name,
                stage.kind,
                caches and (True if enabled is None else bool(enabled)),
                tuple(_refusals(args, _text_config(config, stage))) if caches else (),
                tuple(_dangers(stage)) if caches else (),
                tuple(_remarks(stage, enabled, chunked, deploy.model_runner)) if caches else (),
            )
        )
    return str(pipeline.model_type), found


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise BadInputError(f"there is no deploy file {path}; name the YAML file of a deployment")


def read_deploy(path: Path) -> Any:
    """vLLM-Omni's DeployConfig of a file. BadInputError: it is none."""
    _check_there(path)
    from vllm_omni.config.stage_config import load_deploy_config

    try:
        return load_deploy_config(path)
    except Exception as error:
        raise BadInputError(f"{path} is no deploy file: {first_line(error)}") from error


def _refusals(args: Mapping[str, Any], text_config: Any) -> Iterator[str]:
    """Each with what to change."""
    transfer = _plain(args.get("kv_transfer_config"))
    if isinstance(transfer, Mapping) and transfer.get("kv_role") in _CONSUMERS:
        yield (
            f"kv_transfer_config has kv_role {transfer['kv_role']}: rows of tokens that come from "
            "another engine were never computed here"
        )
    if args.get("speculative_config") is not None:
        yield "speculative_config: drafts move the positions that rows are kept by"
    unit, block_size = args.get("prefix_match_unit"), args.get("block_size")
    if unit is not None and unit != block_size:
        size = "the device's default" if block_size is None else block_size
        yield f"prefix_match_unit {unit} with block_size {size}: hits would end inside a block"
    if _several_groups(text_config):
        yield (
            "the model's layers need several KV cache groups (a sliding window, or recurrent "
            "states), and tensors are kept for one of full attention only"
        )


def _dangers(stage: Stage) -> Iterator[str]:
    if stage.config.requires_full_payload_input:
        yield (
            "its prompt is placeholder ids, and what it runs on comes from the stage before: "
            "blocks of different requests would have the same hash"
        )


def _remarks(stage: Stage, enabled: Any, chunked: bool, model_runner: str) -> Iterator[str]:
    if enabled is None:
        yield "enable_prefix_caching is not set: vLLM's default counts, which is on"
    if model_runner == "v2":
        yield "model_runner v2 has no tensor cache: on a hit the next stage gets new rows only"
    if chunked and stage.input_sources:
        yield (
            "async_chunk: vLLM-Omni takes no hits of a request's later chunks into account; with "
            "the cache on, verify without async_chunk"
        )


def _plain(value: Any) -> Any:
    """YAML gives a mapping, the command line of vLLM-Omni gives JSON."""
    if not isinstance(value, str):
        return value
    import json

    try:
        return json.loads(value)
    except ValueError:
        return value


def _text_config(config: Any, stage: Stage) -> Any:
    """The part of the model's configuration that the stage's decoder has."""
    name = stage.config.hf_config_name
    part = getattr(config, name, None) if name else config
    return config if part is None else part


def _several_groups(config: Any) -> bool:
    """As far as the configuration tells: layer types that differ in what they keep."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = [str(kind) for kind in getattr(text, "layer_types", None) or ()]
    return any(any(part in kind for part in _WINDOWS) for kind in kinds)
