"""`omnicache verify`: do restored tensors equal those of a run without a cache?"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from omnicache_cli.cli.engine_args import engine_args
from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.options import (
    EnforceEager,
    EngineArgument,
    EngineFraction,
    EngineInteger,
    EngineText,
    Force,
    Output,
    OutputFormat,
    Quiet,
    TrustRemoteCode,
)
from omnicache_cli.cli.progress import request_progress
from omnicache_cli.cli.trace import read_workload
from omnicache_cli.cli.verify_omni import check_stage_options, open_session, verify_pipeline
from omnicache_cli.cli.verify_omni import lint as run_lint
from omnicache_cli.errors import EXIT_DONE, BadInputError, RefusedOutputError, UsageError
from omnicache_cli.report.formats import render
from omnicache_cli.report.output import check_output, deliver, note
from omnicache_cli.trace.workload import Lora, Prompt
from omnicache_cli.verify.results import Verdict

if TYPE_CHECKING:
    from omnicache_cli.verify.judge import Tolerance

ENGINE_PARAMETERS = (
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "seed",
    "enforce_eager",
    "trust_remote_code",
)
"""Options that are engine arguments by the same name."""


def verify(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder, or a hub id.")],
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", metavar="NAME", help="Only this one; repeatable."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines, as for `trace`: your own, sent twice."),
    ] = None,
    cache: Annotated[
        Literal["builtin", "vllm-omni"] | None,
        typer.Option(
            help="Whose tensor cache is verified: omnicache's own, the default, or vLLM-Omni's."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="0,7,...", help="Layers to capture, or none. Default: first and middle."
        ),
    ] = None,
    lora: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="A LoRA adapter, for scenarios with one; repeatable."),
    ] = None,
    baseline: Annotated[
        Literal["engine", "in-engine"],
        typer.Option(help="An engine without a cache, or requests that do not read it."),
    ] = "engine",
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A stage of vLLM-Omni, such as thinker: its own runner, cache and payload.",
        ),
    ] = None,
    deploy_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A deploy file of vLLM-Omni: every stage of it."),
    ] = None,
    lint: Annotated[
        bool,
        typer.Option("--lint", help="With --deploy-config: say what would be cached, run nothing."),
    ] = False,
    atol: Annotated[
        float | None, typer.Option(min=0, help="With --rtol: instead of the noise floor.")
    ] = None,
    rtol: Annotated[float | None, typer.Option(min=0)] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep rows that differ here, as safetensors."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of --prompts.")] = 16,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Plant known faults, and see that each is found."),
    ] = False,
    dtype: EngineText = None,
    kv_cache_dtype: EngineText = None,
    block_size: EngineInteger = None,
    max_model_len: EngineInteger = None,
    max_num_seqs: EngineInteger = None,
    max_num_batched_tokens: EngineInteger = None,
    num_gpu_blocks_override: EngineInteger = None,
    gpu_memory_utilization: EngineFraction = None,
    seed: EngineInteger = None,
    enforce_eager: EnforceEager = None,
    trust_remote_code: TrustRemoteCode = None,
    engine: EngineArgument = None,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Verify that a tensor prefix cache gives back what a run without a cache computes.

    Runs the model with a prefix cache and without, captures hidden states and layer outputs token
    by token, and compares: restored rows must be the rows that were written, bit for bit, and all
    rows must be as close to the run without a cache as such runs are to each other. Exit 1: they
    are not. Exit 3: no hit happened, so nothing was verified. With --stage or --deploy-config:
    vLLM-Omni's own runner, or a whole pipeline (docs/omni.md).

    Example: omnicache verify tiny --block-size 32
    """
    from omnicache_cli.verify.scenarios import OWN, SCENARIOS, check_names

    check_output(output, force=force)
    check_names(scenario or ())
    if OWN in (scenario or ()) and prompts is None:
        raise UsageError(f"--scenario {OWN} is about prompts of your own; name them with --prompts")
    check_stage_options(context)
    if deploy_config is not None:
        (run_lint if lint else verify_pipeline)(context, model, deploy_config)
        return
    if save is not None:
        check_save_folder(save)
    if self_test and any(one is not None for one in (prompts, save, atol, rtol, *(scenario or ()))):
        raise UsageError(
            "--self-test has scenarios and a noise floor of its own; leave out --scenario, "
            "--prompts, --save, --atol and --rtol"
        )
    tolerance = tolerance_of(atol, rtol)
    wanted_layers = parse_layers(layers)
    loras = tuple(adapter_in(folder) for folder in lora or ())
    own = () if prompts is None else read_workload([], str(prompts))
    if self_test:
        from omnicache_cli.cli.self_test import run_self_test

        return run_self_test(context, model, cache, baseline, wanted_layers)
    total = len(scenario or SCENARIOS) + (bool(own) and OWN not in (scenario or ()))
    with (
        termination_as_interrupt(),
        request_progress(total, quiet=quiet, noun="scenarios", doing="verifying") as advance,
    ):
        from omnicache_cli.engine.options import (
            EngineOptions,
            check_model,
            lora_args,
            prepare_environment,
            vllm_version,
        )
        from omnicache_cli.engine.verify.session import SessionOptions
        from omnicache_cli.verify.report import EXIT_CODES, summary_line, verify_report
        from omnicache_cli.verify.run import verify as run_and_judge
        from omnicache_cli.verify.scenarios import choose

        prepare_environment(engine_process=False)
        needed = lora_args((*own, *(Prompt(None, [], lora=one) for one in loras)))
        asked = engine_args(context.params, ENGINE_PARAMETERS)
        args = EngineOptions(check_model(model), {**needed, **asked})
        options = SessionOptions(cache or "builtin", baseline, wanted_layers, loras)
        with open_session(args, options, stage) as session:
            for line in [] if quiet else session.notes:
                note(line)
            wanted = choose(session.facts(), scenario or (), own, max_tokens)
            result = run_and_judge(session, wanted, tolerance, advance)
            facts = session.described()
    if tolerance is not None:
        facts["tolerance"] = f"atol {tolerance.atol:g}, rtol {tolerance.rtol:g}"
    if save is not None:
        save_failures(result, save, quiet=quiet)
    report = verify_report(result, facts, vllm_version=vllm_version())
    deliver(render(report, format, output), output, quiet=quiet)
    if output is not None:
        note(summary_line(result))
    code = EXIT_CODES[result.verdict]
    if not quiet and result.verdict is Verdict.CORRUPTION and save is None:
        note("next: the same with --save DIR keeps the rows that differ")
    if code != EXIT_DONE:
        raise typer.Exit(code)


def tolerance_of(atol: float | None, rtol: float | None) -> "Tolerance | None":
    """None: the noise floor judges. UsageError: one without the other."""
    if (atol is None) != (rtol is None):
        raise UsageError("--atol and --rtol belong together; give both, or none")
    if atol is None or rtol is None:
        return None
    from omnicache_cli.verify.judge import Tolerance

    return Tolerance(atol, rtol)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """None: the default. UsageError: not a list of layer numbers."""
    if text is None:
        return None
    if text == "none":
        return ()
    try:
        layers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        layers = (-1,)
    if layers[0] < 0:
        raise UsageError(f"--layers {text!r} is no list of layer numbers; write 0,7 or none")
    return layers


def adapter_in(folder: Path) -> Lora:
    """BadInputError: there is no adapter."""
    if not (folder / "adapter_config.json").is_file():
        raise BadInputError(
            f"no LoRA adapter in {folder}: it has no adapter_config.json; name the adapter's folder"
        )
    return Lora(str(folder.absolute()), folder.absolute().name)


def check_save_folder(folder: Path) -> None:
    """RefusedOutputError: rows could not be kept there."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RefusedOutputError(
            f"cannot keep rows in {folder}: {there} is no folder that can be written; name another"
        )


def save_failures(result: Any, folder: Path, *, quiet: bool) -> None:
    """Write the rows of every corrupt pair."""
    from omnicache_cli.verify.keep import write_rows

    written = write_rows(result, folder)
    if not quiet:
        note(f"wrote {written} files into {folder}" if written else "no row differs: nothing saved")
