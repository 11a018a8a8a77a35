"""`omnicache trace`: run a workload through a real vLLM engine and record every step."""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnicache_cli.cli.commands import COMMAND_TO_RUN
from omnicache_cli.cli.engine_args import engine_args
from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.live import live_view
from omnicache_cli.cli.options import (
    EnforceEager,
    EngineArgument,
    EngineFraction,
    EngineInteger,
    EngineText,
    Force,
    Quiet,
    TrustRemoteCode,
)
from omnicache_cli.cli.progress import request_progress
from omnicache_cli.errors import (
    EXIT_DIFFERS,
    EXIT_DONE,
    EXIT_ENGINE_FAILED,
    BadInputError,
    EngineFailedError,
    RefusedOutputError,
    UsageError,
)
from omnicache_cli.report.formats import Format, render
from omnicache_cli.report.layout import quoted
from omnicache_cli.report.output import deliver, note
from omnicache_cli.trace.files import is_traced
from omnicache_cli.trace.folder import check_folder
from omnicache_cli.trace.workload import Prompt, Workload

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from omnicache_cli.engine.environment import Recording
    from omnicache_cli.engine.options import EngineOptions
    from omnicache_cli.trace.summary import Summary

ENGINE_PARAMETERS = (
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "seed",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enforce_eager",
    "trust_remote_code",
)
"""Options that are engine arguments by the same name."""

OF_A_MODEL = (
    *("model", "prompt", "prompts", "rounds", "concurrency", "max_tokens", "ignore_eos"),
    *("engine_process", "engine"),
    *ENGINE_PARAMETERS,
)
"""Options that say nothing to a command behind `--`."""


def trace(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="A model folder, or a hub id.")] = None,
    run: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="RUN", help="Run folder. Default: run-DATE-TIME."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A prompt; repeatable."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines, - for stdin. Fields: prompt or prompt_token_ids, images, audio, "
            "cache_salt, lora, max_tokens, arrival_step.",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Send the whole workload this often."),
    ] = 1,
    concurrency: Annotated[
        int,
        typer.Option(min=1, help="Requests at a time, without arrival_step."),
    ] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 16,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Always give max-tokens."),
    ] = False,
    engine_process: Annotated[
        bool,
        typer.Option(
            "--engine-process", help="Engine core and workers as children, as in a server."
        ),
    ] = False,
    dtype: EngineText = None,
    kv_cache_dtype: EngineText = None,
    block_size: EngineInteger = None,
    max_model_len: EngineInteger = None,
    max_num_seqs: EngineInteger = None,
    max_num_batched_tokens: EngineInteger = None,
    num_gpu_blocks_override: EngineInteger = None,
    gpu_memory_utilization: EngineFraction = None,
    tensor_parallel_size: EngineInteger = None,
    seed: EngineInteger = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching"),
    ] = None,
    enable_chunked_prefill: Annotated[
        bool | None,
        typer.Option("--enable-chunked-prefill/--no-enable-chunked-prefill"),
    ] = None,
    enforce_eager: EnforceEager = None,
    trust_remote_code: TrustRemoteCode = None,
    engine: EngineArgument = None,
    with_token_ids: Annotated[
        bool, typer.Option("--with-token-ids", help="Record the prompts' token ids too.")
    ] = False,
    check_hashes: Annotated[
        bool,
        typer.Option(
            "--check-hashes", help="Check the hash of each block against the tokens in it."
        ),
    ] = False,
    all_ranks: Annotated[
        bool,
        typer.Option(
            "--all-ranks", help="Record every tensor-parallel rank in full, not by a digest."
        ),
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Totals on stderr while the engine runs.")
    ] = False,
    format: Annotated[
        Format | None, typer.Option("--format", "-f", help="Of the totals at the end.")
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Record what every step of a vLLM engine does to the KV cache.

    With MODEL the prompts are sent to an engine of our own: one request follows the other, or
    --concurrency N at a time, or each at its arrival_step. Sampling is greedy. Behind -- any
    command may stand that ends in a vLLM engine: a server, a benchmark, your own script.

    Example: omnicache trace tiny --block-size 32 --prompt "$(cat README.md)" --rounds 2 -o run

    Example: omnicache trace -o run -- python -m vllm.entrypoints.openai.api_server --model tiny
    """
    check_surroundings()
    folder = run or Path(time.strftime("run-%Y%m%d-%H%M%S"))
    check_folder(folder, force=force)
    runs_a_command = context.meta.get(COMMAND_TO_RUN) is not None
    code, dropped = record_run(context, folder)
    if not is_traced(folder):
        raise typer.Exit(say_untraced(folder, code, runs_a_command=runs_a_command))
    summary = report_run(folder, format, dropped=dropped, to_stderr=runs_a_command)
    if not quiet:
        hint = " --check" if summary.broken_invariants else ""
        note(f"next: omnicache show {quoted(str(folder))}{hint}")
    if code == EXIT_DONE:
        if summary.dropped_records:
            raise EngineFailedError(
                f"at least {summary.dropped_records} records could not be written; {folder} is "
                "incomplete: free some space or name another folder, and record again"
            )
        if not summary.num_steps:
            code = EXIT_ENGINE_FAILED
        elif summary.broken_invariants:
            code = EXIT_DIFFERS
    if code != EXIT_DONE:
        raise typer.Exit(code)


def record_run(
    context: typer.Context,
    folder: Path,
    around: "AbstractContextManager[None] | None" = None,
) -> tuple[int, int]:
    """Record the model or the command of this command line; its exit code, and lost records.

    `around`: what to enter when an engine of our own is up, and to leave before it is stopped.
    """
    command = context.meta.get(COMMAND_TO_RUN)
    if command is not None:
        return _trace_command(context, command, folder), 0
    return EXIT_DONE, _trace_model(context, folder, around)


def check_surroundings() -> None:
    """What vLLM needs and would fail for after half a minute, without saying so."""
    try:
        os.getcwd()
    except OSError as error:
        raise BadInputError("the current folder was removed; change to another one") from error
    if sys.stdout is None:
        raise RefusedOutputError("stdout is closed; vLLM needs one: redirect it to a file")


def _trace_model(
    context: typer.Context, folder: Path, around: "AbstractContextManager[None] | None"
) -> int:
    """Send the workload to an engine of our own; the number of records that were lost."""
    from omnicache_cli.engine.tracing import trace_workload

    given = context.params
    options, workload = model_and_workload(given, context.info_name)
    progress = request_progress(workload.num_requests, quiet=given["quiet"] or given["live"])
    view = live_view(folder) if given["live"] else contextlib.nullcontext()
    with termination_as_interrupt(), view, progress as advance:
        traced = trace_workload(
            options,
            workload,
            folder,
            force=given["force"],
            what=_recording(given),
            on_finished=advance,
            around=around,
        )
    if not given["quiet"]:
        for line in traced.notes:
            note(line)
    return traced.dropped_records


def model_and_workload(
    given: Mapping[str, Any], command: str | None
) -> "tuple[EngineOptions, Workload]":
    """What a command line says of an engine of our own. UsageError: no model, or no prompt."""
    from omnicache_cli.engine.options import EngineOptions, check_model

    if given["model"] is None:
        raise UsageError(
            f"nothing to {command}; name a model folder, or a command behind --: "
            f"omnicache {command} -o RUN -- python serve.py"
        )
    sent = read_workload(given["prompt"] or [], given["prompts"])
    args = engine_args(given, ENGINE_PARAMETERS)
    options = EngineOptions(check_model(given["model"]), args, given["engine_process"])
    workload = Workload(
        sent, given["rounds"], given["concurrency"], given["max_tokens"], given["ignore_eos"]
    )
    return options, workload


def _trace_command(context: typer.Context, command: list[str], folder: Path) -> int:
    """Run the command behind `--`; its exit code."""
    from omnicache_cli.engine.command import trace_command

    for name in OF_A_MODEL:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            shown = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{shown} cannot be combined with a command; leave it out")
    if not command:
        raise UsageError(
            f"no command behind --; write: omnicache {context.info_name} -o RUN -- python serve.py"
        )
    given = context.params
    with live_view(folder, beside_a_command=True) if given["live"] else contextlib.nullcontext():
        return trace_command(command, folder, force=given["force"], what=_recording(given))


def _recording(given: Mapping[str, Any]) -> "Recording":
    from omnicache_cli.engine.environment import Recording

    return Recording(
        token_ids=given["with_token_ids"],
        all_ranks=given["all_ranks"],
        check_hashes=given["check_hashes"],
    )


def say_untraced(folder: Path, code: int, *, runs_a_command: bool) -> int:
    """No vLLM process wrote a record: the command's own exit code, or that of a failed engine."""
    if not runs_a_command:
        raise EngineFailedError(
            f"no record could be kept in {folder}: the folder was removed, or there is no "
            "room; name another folder"
        )
    if code == EXIT_DONE:
        raise EngineFailedError(
            f"no process wrote a trace into {folder}; the command must start a vLLM engine, and "
            "omnicache-cli must be installed beside that vLLM (VLLM_PLUGINS must not leave it out)"
        )
    note(
        f"no process wrote a trace into {folder}; the command ended with exit code {code} before "
        "any engine was traced"
    )
    return code


def report_run(
    folder: Path, format: Format | None, *, dropped: int = 0, to_stderr: bool = False
) -> "Summary":
    """Read the run back, check its invariants, and print its totals.

    `dropped`: lost records that this process knows of; a full disk may not hold their count.
    stdout belongs to a command that was run: then the totals go to stderr.
    """
    from omnicache_cli.trace.invariants import InvariantChecker
    from omnicache_cli.trace.run import Run
    from omnicache_cli.trace.summary import summarize
    from omnicache_cli.trace.views.totals import summary_report, version_remark

    run = Run(folder)
    summary = summarize(run, checker=InvariantChecker())
    summary.dropped_records = max(summary.dropped_records, dropped)
    text = render(summary_report(run, summary, "trace"), format, None)
    if to_stderr:
        for line in text.splitlines():
            note(line)
    else:
        deliver(text, None)
        remark = version_remark(summary)
        if remark is not None:
            note(f"omnicache: {remark}")
    return summary


def read_workload(texts: list[str], prompts: str | None) -> tuple[Prompt, ...]:
    """The prompts of --prompt and --prompts. UsageError: there are none."""
    from omnicache_cli.trace.lines import bounded_lines
    from omnicache_cli.trace.workload import read_prompts

    workload = [Prompt(text, None) for text in texts]
    if "" in texts:
        raise UsageError("a --prompt is empty; vLLM needs at least one token")
    if prompts == "-" and sys.stdin is None:
        raise UsageError("--prompts - reads stdin, which is closed; name a file")
    if prompts == "-":
        stdin = bounded_lines(sys.stdin.buffer, "stdin")
        workload += read_prompts(stdin, name="stdin", folder=Path())
    elif prompts is not None:
        path = Path(prompts)
        try:
            with path.open("rb") as stream:
                lines = bounded_lines(stream, prompts)
                workload += read_prompts(lines, name=prompts, folder=path.parent)
        except OSError as error:
            raise BadInputError(
                f"cannot read {prompts}: {error.strerror or error}; name a JSON-lines file"
            ) from error
    if not workload:
        what = "--prompts names no prompt" if prompts else "no prompt"
        raise UsageError(f'{what}; give --prompt "TEXT" or --prompts FILE.jsonl')
    return tuple(workload)
