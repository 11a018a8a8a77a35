"""`omnicache profile`: py-spy on the processes of an engine, beside a trace of its steps."""

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnicache_cli.cli.commands import COMMAND_TO_RUN
from omnicache_cli.cli.profile_compare import DEFAULT_PAIRS, compare_from_options
from omnicache_cli.cli.trace import OF_A_MODEL, check_surroundings, say_untraced, trace
from omnicache_cli.errors import (
    EXIT_DONE,
    EXIT_ENGINE_FAILED,
    EngineFailedError,
    OmnicacheError,
    UsageError,
)
from omnicache_cli.profile.compare import MIN_PAIRS
from omnicache_cli.report.formats import format_for, render
from omnicache_cli.report.layout import quoted
from omnicache_cli.report.output import check_output, deliver, note
from omnicache_cli.trace.files import is_traced
from omnicache_cli.trace.folder import check_folder

if TYPE_CHECKING:
    from omnicache_cli.cli.profile_run import Plan
    from omnicache_cli.profile.results import Profile
    from omnicache_cli.trace.run import Run

OF_A_RUN = (*OF_A_MODEL, "with_token_ids", "check_hashes", "all_ranks", "live", "startup")
"""Options that say nothing to a process that runs already."""

MAX_SECONDS = 1_000_000


def with_options_of(other: Callable[..., None]) -> Callable[[Callable[..., None]], Any]:
    """Gives a command another one's parameters too, as `**given`. Its own win."""

    def combine(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        named = {name: one for name, one in own.items() if one.kind is not one.VAR_KEYWORD}
        combined = {**inspect.signature(other).parameters, **named}
        command.__signature__ = inspect.Signature(list(combined.values()))  # type: ignore[attr-defined]
        command.__annotations__ = {name: one.annotation for name, one in combined.items()}
        return command

    return combine


@with_options_of(trace)
def profile(
    context: typer.Context,
    pid: Annotated[
        int | None,
        typer.Option("--pid", min=1, help="Sample this process and those below it; no trace."),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Sample this long. Default: to the end, or to Ctrl-C."
        ),
    ] = None,
    rate: Annotated[int, typer.Option(metavar="HZ", help="Samples a second.")] = 100,
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE",
            help="engine-core, worker, in-process-engine, api-server, coordinator, other, all; "
            "repeatable. Default: the first three.",
        ),
    ] = None,
    timeline: Annotated[
        bool,
        typer.Option("--timeline", help="Record when: a Chrome trace too, of all threads."),
    ] = False,
    startup: Annotated[
        bool, typer.Option("--startup", help="Sample the start of the engine too.")
    ] = False,
    native: Annotated[bool, typer.Option("--native", help="Frames of C and C++ too.")] = False,
    idle: Annotated[bool, typer.Option("--idle", help="Threads that wait too.")] = False,
    gil: Annotated[bool, typer.Option("--gil", help="Only threads that hold the GIL.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report here instead of stdout."),
    ] = None,
    compare_cache: Annotated[
        bool,
        typer.Option(
            "--compare-cache", help="The same workload with the prefix cache and without."
        ),
    ] = False,
    pairs: Annotated[
        int,
        typer.Option(
            metavar="N",
            help=f"Runs with and without, of --compare-cache; at least {MIN_PAIRS}.",
        ),
    ] = DEFAULT_PAIRS,
    stage: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of --compare-cache: a stage of an omni model."),
    ] = None,
    **given: Any,
) -> None:
    """Sample the processes of a vLLM engine with py-spy, and say where its time goes.

    With MODEL, or a command behind --, a run is recorded as by omnicache trace, with its options,
    and the engine is sampled while it steps; with --pid an engine that runs already. The engine
    core and the workers are found by themselves. Needs the extra omnicache-cli[profile].
    --compare-cache samples nothing: it says whether the prefix cache pays off on this workload.

    Example: omnicache profile tiny --block-size 32 --prompt "$(cat README.md)" --rounds 20 -o run

    Example: omnicache profile --pid 4711 --duration 10

    Example: omnicache profile tiny --compare-cache --prompts prompts.jsonl --rounds 2
    """
    if compare_cache:
        compare_from_options(context)
        return
    if stage is not None or pairs != DEFAULT_PAIRS:
        raise UsageError("--pairs and --stage are of --compare-cache; give it, or leave them out")
    from omnicache_cli.cli.profile_run import Plan, profile_process
    from omnicache_cli.profile.pyspy import check_permission, find_py_spy, py_spy_version
    from omnicache_cli.profile.roles import parse_roles
    from omnicache_cli.profile.sampling import Sampling

    sampling = Sampling(rate, native=native, idle=idle, gil=gil, timeline=timeline)
    if duration is not None and not 0 < duration <= MAX_SECONDS:
        raise UsageError(
            f"--duration {duration:g} is not a time to sample; give seconds above 0 and up to "
            f"{MAX_SECONDS:,}"
        )
    roles = parse_roles(role or [])
    check_output(report, force=given["force"], option="--report")
    format_for(given["format"], report)
    if pid is not None:
        _refuse_options_of_a_run(context)
    program = find_py_spy()
    plan = Plan(program, py_spy_version(program), sampling, roles, duration, bool(role))
    if pid is not None:
        folder = given["run"] or Path(time.strftime("profile-%Y%m%d-%H%M%S"))
        _deliver(context, folder, profile_process(plan, pid, folder, force=given["force"]), None)
        return
    check_surroundings()
    folder = given["run"] or Path(time.strftime("run-%Y%m%d-%H%M%S"))
    check_folder(folder, force=given["force"])
    check_permission(program)
    _profile_run(context, plan, folder, startup=startup)


def _refuse_options_of_a_run(context: typer.Context) -> None:
    if context.meta.get(COMMAND_TO_RUN) is not None:
        raise UsageError("--pid cannot be combined with a command; leave one of them out")
    for name in OF_A_RUN:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            shown = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{shown} cannot be combined with --pid, which starts no engine")


def _profile_run(context: typer.Context, plan: "Plan", folder: Path, *, startup: bool) -> None:
    from omnicache_cli.cli.profile_run import profiled_run
    from omnicache_cli.profile.results import write_profile
    from omnicache_cli.trace.run import Run

    runs_a_command = context.meta.get(COMMAND_TO_RUN) is not None
    with profiled_run(context, plan, folder, startup=startup) as ended:
        code = ended.code
        if not is_traced(folder):
            if ended.has_failed:
                raise typer.Exit(code)
            if code != EXIT_DONE and not runs_a_command:
                raise EngineFailedError(
                    f"the engine's process ended with exit code {code} before its first step"
                )
            raise typer.Exit(say_untraced(folder, code, runs_a_command=runs_a_command))
        try:
            found = write_profile(folder, ended.sampled, plan.sampling, plan.py_spy_version)
        except OmnicacheError as error:
            if code in (EXIT_DONE, EXIT_ENGINE_FAILED):
                raise
            note(f"omnicache: {error}")
            raise typer.Exit(code) from error
    _deliver(context, folder, found, Run(folder))
    if code != EXIT_DONE:
        raise typer.Exit(code)


def _deliver(context: typer.Context, folder: Path, found: "Profile", run: "Run | None") -> None:
    from omnicache_cli.profile.report import profile_report

    given = context.params
    text = render(profile_report(folder, found, run), given["format"], given["report"])
    if given["report"] is None and context.meta.get(COMMAND_TO_RUN) is not None:
        for line in text.splitlines():  # stdout is the command's
            note(line)
    else:
        deliver(text, given["report"], quiet=given["quiet"])
    if given["quiet"]:
        return
    if run is not None and plan_has_a_clock(found):
        note(f"next: omnicache export {quoted(str(folder))} --to perfetto")
    elif run is not None:
        note(f"next: omnicache show {quoted(str(folder))}")
    else:
        picture = folder / found.manifest.processes[0].files["flamegraph"]
        note(f"next: open {quoted(str(picture))} in a browser")


def plan_has_a_clock(found: "Profile") -> bool:
    """The samples can be laid beside the steps."""
    return any("chrometrace" in one.files for one in found.manifest.processes)
