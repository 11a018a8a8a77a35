"""What `omnicache verify` does with the stages of vLLM-Omni: see `verify`."""

import tempfile
from collections.abc import Set
from pathlib import Path
from typing import Any

import typer

from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.trace import read_workload
from omnicache_cli.errors import EXIT_DONE, UsageError
from omnicache_cli.report.formats import render
from omnicache_cli.report.output import deliver, note

_NOT_OF_A_STAGE = ("cache", "baseline", "layers", "lora", "self_test")
"""Options about the caches that omnicache itself puts beside a model."""

_OF_A_DEPLOY_FILE = frozenset(
    {"model", "deploy_config", "lint", "trust_remote_code", "output", "format", "force", "quiet"}
)
"""All that goes with --deploy-config; --prompts too, where something runs."""


def check_stage_options(context: typer.Context) -> None:
    """UsageError: options that do not go together with --stage, --deploy-config or --lint."""
    given = context.params
    if given["lint"] and given["deploy_config"] is None:
        raise UsageError("--lint reads a deploy file; name it with --deploy-config")
    if given["deploy_config"] is not None and given["stage"] is not None:
        raise UsageError("--deploy-config is about all stages; leave out --stage")
    if given["deploy_config"] is not None:
        allowed = _OF_A_DEPLOY_FILE if given["lint"] else _OF_A_DEPLOY_FILE | {"prompts"}
        _refuse(context, given.keys() - allowed, "the deploy file says the rest")
    elif given["stage"] is not None:
        _refuse(context, set(_NOT_OF_A_STAGE), "a stage of vLLM-Omni brings its own cache and keys")


def _refuse(context: typer.Context, names: Set[str], why: str) -> None:
    """UsageError: one of these options was given."""
    wrong = sorted(name for name in names if _is_given(context, name))
    if wrong:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise UsageError(f"{why}; leave out {options}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def lint(context: typer.Context, model: str, path: Path) -> None:
    """Say what a deploy file makes of prefix caching. Exit 1: it asks for what is refused."""
    from omnicache_cli.engine.omni.deploy import lint_deploy
    from omnicache_cli.engine.options import check_model, prepare_environment, vllm_version
    from omnicache_cli.verify.deploy import deploy_report, exit_code, summary

    given = context.params
    prepare_environment(engine_process=False)
    trust = bool(given["trust_remote_code"])
    pipeline, stages = lint_deploy(check_model(model), path, trust_remote_code=trust)
    facts: dict[str, Any] = {
        "model": model,
        "deploy config": str(path),
        "pipeline": pipeline,
    }
    report = deploy_report(stages, facts, vllm_version=vllm_version())
    deliver(render(report, given["format"], given["output"]), given["output"], quiet=given["quiet"])
    if given["output"] is not None:
        note(summary(stages))
    code = exit_code(stages)
    if code != EXIT_DONE:
        raise typer.Exit(code)


def verify_pipeline(context: typer.Context, model: str, path: Path) -> None:
    """Run the whole pipeline with the cache off and on; compare what passes between its stages."""
    from omnicache_cli.engine.omni.pipeline import (
        TEXTS,
        chat_prompts,
        run_pipeline,
        stage_hits,
    )
    from omnicache_cli.engine.options import check_model, prepare_environment, vllm_version
    from omnicache_cli.verify.pipeline_report import judge_pipeline, pipeline_report, summary_line
    from omnicache_cli.verify.report import EXIT_CODES

    given = context.params
    quiet = given["quiet"]
    prepare_environment(engine_process=True)
    model = check_model(model)
    trust = bool(given["trust_remote_code"])
    prompts = own_texts(given["prompts"]) or chat_prompts(model, TEXTS, trust_remote_code=trust)
    with (
        termination_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="omnicache-") as folder,
    ):
        runs = run_pipeline(
            model,
            path,
            prompts,
            Path(folder),
            trust_remote_code=trust,
            on_run=None if quiet else _told,
        )
        hits = stage_hits(runs)
        verified = judge_pipeline(runs.off.crossings, runs.on.crossings, len(prompts), hits)
    facts: dict[str, Any] = {
        "model": model,
        "deploy config": str(path),
        "pipeline": runs.pipeline,
        "cache on": ", ".join(runs.cached),
        "prompts": len(prompts),
    }
    report = pipeline_report(verified, facts, vllm_version=vllm_version())
    deliver(render(report, given["format"], given["output"]), given["output"], quiet=quiet)
    if given["output"] is not None:
        note(summary_line(verified))
    code = EXIT_CODES[verified.verdict]
    if code != EXIT_DONE:
        raise typer.Exit(code)


def own_texts(prompts: Path | None) -> list[str]:
    """The texts of a prompts file, as they are. UsageError: a prompt is more than a text."""
    if prompts is None:
        return []
    texts = []
    for one in read_workload([], str(prompts)):
        if one.text is None or one.images or one.audio or one.lora is not None:
            raise UsageError("a pipeline is verified with prompts of text; leave out the others")
        texts.append(one.text)
    return texts


def _told(run: str) -> None:
    note(f"the pipeline with the cache {run}: its stages start one after the other, for minutes")


def open_session(args: Any, options: Any, stage: str | None) -> Any:
    """A session on the model, or on one of its stages."""
    if stage is not None:
        from omnicache_cli.engine.omni.session import StageSession

        return StageSession(args, stage)
    from omnicache_cli.engine.options import check_engine_args
    from omnicache_cli.engine.verify.session import EngineSession

    check_engine_args(args)
    return EngineSession(args, options)
