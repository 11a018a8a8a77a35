"""`omnicache explain`: why a prefix hit ended where it did."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnicache_cli.cli.engine_args import engine_args
from omnicache_cli.cli.options import Force, Output, OutputFormat, Quiet
from omnicache_cli.errors import EXIT_DIFFERS, EXIT_DONE, BadInputError, UsageError
from omnicache_cli.report.formats import Format, format_for, render
from omnicache_cli.report.layout import quoted
from omnicache_cli.report.output import check_output, deliver, note

if TYPE_CHECKING:
    from omnicache_cli.prefix.lint import LintFacts
    from omnicache_cli.trace.run import Run
    from omnicache_cli.trace.views.view import View

OF_PROMPTS = (
    *("tokenizer", "block_size", "group", "num_gpu_blocks", "match_unit", "retention_interval"),
    *("drop_unit", "hash_algo", "max_num_batched_tokens", "max_num_seqs"),
    *("long_prefill_token_threshold", "no_prefix_caching"),
)
"""Options that say nothing to a recorded run."""

KEEP_ALL = "null"


def explain(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A folder of `omnicache trace -o`.")
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only this request, in full: its id, or #N by arrival."),
    ] = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="With --request: its block hashes and their parts.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this engine: its id, or its number.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines, instead of a run: no engine is started."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --prompts: for prompts that are text.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --prompts: tokens. Default: 16.")
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            metavar="KIND:BLOCK",
            help="With --prompts: full:16, sliding:16:WINDOW or mamba:528; repeatable.",
        ),
    ] = None,
    num_gpu_blocks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --prompts. Default: 4096.")
    ] = None,
    match_unit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --prompts: prefix_match_unit.")
    ] = None,
    retention_interval: Annotated[
        str | None,
        typer.Option(metavar="N", help="With --prompts: tokens, or null. Default: 0, as vLLM."),
    ] = None,
    drop_unit: Annotated[
        bool | None,
        typer.Option("--drop-unit", help="With --prompts: as EAGLE and MTP drop one."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --prompts. Default: 8192.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --prompts. Default: 64.")
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --prompts. Default: none.")
    ] = None,
    no_prefix_caching: Annotated[
        bool | None, typer.Option("--no-prefix-caching", help="With --prompts: the cache is off.")
    ] = None,
    hash_algo: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --prompts. Default: sha256.")
    ] = None,
    lint: Annotated[
        bool,
        typer.Option("--lint", help="What the configuration costs: of RUN, --prompts or --model."),
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --lint: a model folder, or a hub id.")
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-arg", metavar="KEY=VALUE", help="With --model: an argument; repeatable."
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", metavar="REASON", help="Exit 1 if a hit ended so; repeatable."),
    ] = None,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Explain why each prefix hit ended where it did, with the evidence.

    Of a recorded run, or of prompts that go through vLLM's own hasher and block pool. Without
    --request every lookup is listed, one a line.

    Example: omnicache explain run --request p1
    """
    check_modes(context.params)
    check_reasons(fail_on or [], lint=lint)
    check_output(output, force=force)
    if model is not None:
        args = engine_args({"engine": engine_arg}, ())
        show_lint(model, model_facts(model, args), fail_on or [], format, output, quiet=quiet)
    elif prompts is not None:
        with tempfile.TemporaryDirectory(prefix="omnicache-") as folder:
            pool_run = run_prompts(prompts, Path(folder), context.params)
            again = f"explain --prompts {quoted(str(prompts))} …"
            subject = {"prompts": str(prompts)}
            show(pool_run, subject, again, context.params)
    elif run is not None:
        from omnicache_cli.trace.run import Run

        show(Run(run), {"run": str(run)}, f"explain {quoted(str(run))}", context.params)


def show(run: "Run", subject: dict[str, str], again: str, given: dict[str, Any]) -> None:
    """The report on a run, recorded before or just now."""
    from omnicache_cli.prefix.lint import facts_of_run
    from omnicache_cli.prefix.report import explain_request, explain_requests

    format, output, quiet = given["format"], given["output"], given["quiet"]
    reasons = given["fail_on"] or []
    if given["lint"]:
        (name,) = subject.values()
        show_lint(name, facts_of_run(run), reasons, format, output, quiet=quiet)
        return
    view: View
    if given["request"] is not None:
        view = explain_request(
            run,
            given["request"],
            given["engine"],
            subject=subject,
            with_chain=given["chain"],
            fail_on=reasons,
        )
    else:
        every = format_for(format, output) == "json"
        view = explain_requests(
            run, given["engine"], every_request=every, subject=subject, fail_on=reasons
        )
    deliver(render(view.report, format, output), output, quiet=quiet)
    if view.next_options is not None and not quiet:
        note(f"next: omnicache {again} {view.next_options}")
    if view.exit_code != EXIT_DONE:
        raise typer.Exit(view.exit_code)


def show_lint(
    subject: str,
    facts: "dict[str, LintFacts]",
    fail_on: list[str],
    format: Format | None,
    output: Path | None,
    *,
    quiet: bool,
) -> None:
    from omnicache_cli.engine.options import vllm_version
    from omnicache_cli.prefix.lint import lint_report

    report, found = lint_report(subject, facts, vllm_version=vllm_version())
    deliver(render(report, format, output), output, quiet=quiet)
    if set(found) & set(fail_on):
        raise typer.Exit(EXIT_DIFFERS)


def check_modes(given: dict[str, Any]) -> None:
    """UsageError: options that say nothing to each other."""
    subjects = [name for name in ("run", "prompts", "model") if given[name] is not None]
    if len(subjects) != 1:
        raise UsageError("name one of RUN, --prompts FILE and --lint --model MODEL")
    if given["model"] is not None and not given["lint"]:
        raise UsageError("--model goes with --lint; to explain hits, trace a run first")
    if given["engine_arg"] and given["model"] is None:
        raise UsageError("--engine-arg goes with --lint --model MODEL; leave it out")
    if given["chain"] and given["request"] is None:
        raise UsageError("--chain is about one request; name it with --request ID")
    for name in OF_PROMPTS:
        if given[name] and given["prompts"] is None:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} goes with --prompts FILE; leave it out")
    if given["group"] and given["block_size"] is not None:
        raise UsageError("--group and --block-size cannot be combined; each --group has its block")


def check_reasons(names: list[str], *, lint: bool) -> None:
    """UsageError: one of them is no reason, or with --lint no finding."""
    from omnicache_cli.prefix.lint import FINDINGS
    from omnicache_cli.prefix.reasons import REASONS

    known, what = (FINDINGS, "finding") if lint else (REASONS, "reason")
    for name in names:
        if name not in known:
            raise UsageError(f"--fail-on {name}: no such {what}; choose of {', '.join(known)}")


def model_facts(model: str, args: dict[str, Any]) -> "dict[str, LintFacts]":
    """By engine: one without a name."""
    from dataclasses import asdict

    from omnicache_cli.engine.modelfree.lint import config_facts
    from omnicache_cli.engine.options import (
        EngineOptions,
        check_engine_args,
        check_model,
        prepare_environment,
    )
    from omnicache_cli.prefix.lint import LintFacts

    prepare_environment(engine_process=False)
    options = EngineOptions(check_model(model), args)
    check_engine_args(options)
    return {"": LintFacts(**asdict(config_facts(options)))}


def run_prompts(path: Path, folder: Path, given: dict[str, Any]) -> "Run":
    """The prompts of a file, through vLLM's own pool, as a run in an empty folder."""
    from omnicache_cli.engine.modelfree.prompts import parse_group, record_prompts
    from omnicache_cli.engine.modelfree.scheduler import GroupPlan, PoolPlan
    from omnicache_cli.prefix.prompts import read_asked
    from omnicache_cli.trace.lines import bounded_lines
    from omnicache_cli.trace.run import Run

    groups = tuple(parse_group(one) for one in given["group"] or [])
    plan = PoolPlan(
        groups or (GroupPlan("full", given["block_size"] or 16),),
        num_blocks=given["num_gpu_blocks"] or 4096,
        match_unit=given["match_unit"],
        retention_interval=parse_interval(given["retention_interval"]),
        drops_unit=bool(given["drop_unit"]),
        hash_algo=given["hash_algo"] or "sha256",
        max_num_batched_tokens=given["max_num_batched_tokens"] or 8192,
        max_num_seqs=given["max_num_seqs"] or 64,
        long_prefill_token_threshold=given["long_prefill_token_threshold"] or 0,
        enable_prefix_caching=not given["no_prefix_caching"],
    )
    try:
        with path.open("rb") as stream:
            asked = list(read_asked(bounded_lines(stream, str(path)), name=str(path)))
    except OSError as error:
        raise BadInputError(
            f"cannot read {path}: {error.strerror or error}; name a JSON-lines file"
        ) from error
    if not asked:
        raise BadInputError(f"{path} holds no prompt; write one JSON object a line")
    if not given["quiet"]:
        note("asking vLLM's own hasher and block pool; its imports take half a minute on two cores")
    record_prompts(asked, plan, folder, tokenizer=given["tokenizer"])
    return Run(folder)


def parse_interval(text: str | None) -> int | None:
    """Tokens; None: everything is kept. UsageError: neither a number nor null."""
    if text is None:
        return 0
    if text == KEEP_ALL:
        return None
    if not text.isdecimal():
        raise UsageError(f"--retention-interval {text!r}: write a number of tokens, or {KEEP_ALL}")
    return int(text)
