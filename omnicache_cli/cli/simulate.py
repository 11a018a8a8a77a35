"""`omnicache simulate`: what another pool would do with a workload, without a model."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnicache_cli.cli.options import Force, Output, OutputFormat, Quiet
from omnicache_cli.cli.simulate_plan import Planned, plan_of, refuse_contradictions
from omnicache_cli.report.formats import render
from omnicache_cli.report.output import check_output, deliver, note
from omnicache_cli.simulate.forms import Form, TimeUnit
from omnicache_cli.simulate.replay import ArrivalMode, Route

if TYPE_CHECKING:
    from omnicache_cli.simulate.forms import Tokenizer
    from omnicache_cli.simulate.report import Subject
    from omnicache_cli.simulate.request import SimRequest
    from omnicache_cli.simulate.study import Study

PIECES = "pieces"


def simulate(
    context: typer.Context,
    workload: Annotated[
        str, typer.Argument(metavar="WORKLOAD", help="A run, a file of JSON lines, or - for stdin.")
    ],
    blocks: Annotated[
        list[str] | None,
        typer.Option(metavar="N,N,...", help="Usable blocks of the pool. Of a run: near its own."),
    ] = None,
    kv_memory: Annotated[
        list[str] | None,
        typer.Option(metavar="GIB,...", help="In place of --blocks: as much KV cache memory."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --kv-memory: a folder or config.json.")
    ] = None,
    current: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The size there is, marked in the plot.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="ID", help="Of a run with several: its id or number.")
    ] = None,
    input_format: Annotated[
        Form | None, typer.Option(help="Default: by the fields of the first line.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="For text: a model folder, or pieces (of words)."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of requests that do not say it. Default: 1."),
    ] = None,
    hash_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens under a hash id: 512 or 16.")
    ] = None,
    time_unit: Annotated[
        TimeUnit | None, typer.Option(help="Of times of arrival. Default: by the form.")
    ] = None,
    arrivals: Annotated[
        ArrivalMode | None, typer.Option(help="Default: by what the workload says.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="That many at a time, whatever it says.")
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1e6, metavar="MS", help="By clock: what a step takes. Default: 20."
        ),
    ] = None,
    token_us: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1e6, metavar="US", help="By clock: and each of its tokens. Default: 20."
        ),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(min=1, max=1000, metavar="N", help="Engines, each with a pool of its own."),
    ] = 1,
    route: Annotated[
        Route | None,
        typer.Option(help="How requests go to --replicas. Default: round-robin."),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens. Default: the run's, else 16.")
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group", metavar="KIND:BLOCK", help="As of explain: full:16, sliding:16:64, mamba:528"
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="As vLLM's. Default: the run's, or any.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="As vLLM's. Default: the run's, or 8192.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="As vLLM's. Default: the run's, or 256.")
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="As vLLM's. Default: none.")
    ] = None,
    match_unit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="prefix_match_unit, tokens.")
    ] = None,
    retention_interval: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens, or null. Default: the run's, or 0.")
    ] = None,
    drop_unit: Annotated[
        bool | None, typer.Option("--drop-unit", help="As EAGLE and MTP drop one.")
    ] = None,
    hash_algo: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of token ids. Default: sha256.")
    ] = None,
    bound: Annotated[
        bool, typer.Option("--bound", help="Also how much could hit at most, whatever is evicted.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="One small pool, block by block and step by step.")
    ] = False,
    requests: Annotated[
        bool, typer.Option("--requests", help="The hit of every request, at every size.")
    ] = False,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Replay a workload on other pool sizes, through vLLM's own scheduler, without a model.

    From a recorded run, prompts, request logs or a trace of hash ids: hits, evictions, preemptions
    and occupancy at each size. vLLM must be installed; no model, no GPU.

    Example: omnicache simulate run --blocks 1000,2000,4000
    """
    given = context.params
    refuse_contradictions(given)
    check_output(output, force=force)
    planned = plan_of(given)
    if not quiet:
        note("asking vLLM's own scheduler and block pool; its imports take half a minute")
    with ExitStack() as stack:
        study, subject = run(given, planned, stack)
    from omnicache_cli.simulate.report import study_report

    report = study_report(study, planned.setup, subject)
    deliver(render(report, format, output), output, quiet=quiet)


def run(given: dict[str, Any], planned: Planned, stack: ExitStack) -> "tuple[Study, Subject]":
    """The study, and what it is about once the workload has been read."""
    from dataclasses import replace

    from omnicache_cli.engine.modelfree.replay import ReplayPool, SharedHashes
    from omnicache_cli.engine.options import prepare_environment, vllm_version
    from omnicache_cli.simulate.report import Subject
    from omnicache_cli.simulate.study import run_study

    prepare_environment(engine_process=False)
    shared = SharedHashes()
    requests, form, notes = opened(given, planned, stack)
    study = run_study(
        requests,
        planned.setup,
        lambda num_blocks: ReplayPool(replace(planned.pool, num_blocks=num_blocks), shared),
    )
    subject = Subject(
        given["workload"],
        form(),
        planned.pool.groups[0].block_size,
        planned.groups,
        planned.current_blocks,
        tuple(notes()),
        vllm_version(),
    )
    return study, subject


def opened(
    given: dict[str, Any], planned: Planned, stack: ExitStack
) -> tuple[Iterator["SimRequest"], Any, Any]:
    """The requests; and, to be called once they are read, their form and what is to be said."""
    from omnicache_cli.simulate.forms import Lines, Reading
    from omnicache_cli.simulate.recorded import RecordedRequests
    from omnicache_cli.simulate.source import open_lines
    from omnicache_cli.trace.run import Run

    if planned.recorded is not None:
        recorded = RecordedRequests(Run(Path(given["workload"])), planned.recorded)
        return iter(recorded), lambda: "run", lambda: [*planned.notes, *recorded.notes()]
    reading = Reading(
        given["input_format"],
        tokenizer_of(given["tokenizer"]),
        given["max_tokens"] or 1,
        given["time_unit"],
        given["hash_tokens"],
    )
    lines = Lines(stack.enter_context(open_lines(given["workload"])), given["workload"], reading)
    return iter(lines), lambda: lines.form, lambda: [*planned.notes, *lines.notes()]


def tokenizer_of(name: str | None) -> "Tokenizer | None":
    if name is None:
        return None
    if name == PIECES:
        from omnicache_cli.simulate.forms import Pieces

        return Pieces()
    from omnicache_cli.engine.modelfree.tokenizer import model_tokenizer

    return model_tokenizer(name)
