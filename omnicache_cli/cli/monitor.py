"""`omnicache monitor`: a live server's cache, judged by rules."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnicache_cli.cli.options import Force, Output, OutputFormat, Quiet
from omnicache_cli.errors import EXIT_BAD_INPUT, EXIT_DIFFERS, BadInputError, UsageError
from omnicache_cli.report.formats import Format, format_for, render
from omnicache_cli.report.output import check_output, deliver, note

if TYPE_CHECKING:
    from omnicache_cli.monitor.emit import Emitted
    from omnicache_cli.monitor.fleet import Fleet, Sample
    from omnicache_cli.monitor.traced import TracedRun
    from omnicache_cli.monitor.watching import Plan

DEFAULT_URL = "http://localhost:8000"


def monitor(
    context: typer.Context,
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL...", help="Servers, or their /metrics. Default: port 8000."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Two samples, one interval apart. Default in a pipe.")
    ] = False,
    lifetime: Annotated[
        bool, typer.Option("--lifetime", help="One sample: what was counted since the start.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(min=0.1, max=3600, metavar="S", help="Between samples. Default: 2."),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, metavar="S", help="Watch so long. Default: no end.")
    ] = None,
    window: Annotated[
        float, typer.Option(min=0.1, max=86400, metavar="S", help="Rates are over so long.")
    ] = 60.0,
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", metavar="RULE", help="As kv_cache_hit_rate<0.85; repeatable."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules. Default: omnicache.toml here.")
    ] = None,
    events: Annotated[
        list[str] | None,
        typer.Option("--events", metavar="ENDPOINT", help="KV events: tcp://host:5557; repeatable"),
    ] = None,
    events_replay: Annotated[
        list[str] | None,
        typer.Option("--events-replay", metavar="ENDPOINT", help="Where missed ones are asked for"),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A recorded run of the server: modalities, stages."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, metavar="S", help="For one page.")
    ] = 5.0,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME: VALUE", help="Sent to every server; repeatable."),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="grafana or alerts: write that, and ask no server."),
    ] = None,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Watch the cache of running vLLM servers: hit rates, evictions, pool and latencies.

    Reads their /metrics, and KV events where they publish them, and judges both by rules. Several
    URLs stand side by side and are summed. Exit 1 when a rule holds, 5 when a server is away.

    Example: omnicache monitor http://localhost:8000 --once
    """
    given = context.params
    check_output(output, force=force)
    if emit is not None:
        emitted = emitted_for(emit, given)
        deliver(emitted.text, output, quiet=quiet)
        if not quiet:
            note(emitted.next_step)
        return
    plan = plan_of(given)
    traced = traced_run(run)
    fleet = watched(plan, given, traced)
    finish(fleet, given, read_again(traced))


def plan_of(given: dict[str, Any]) -> "Plan":
    """UsageError, BadInputError: options that contradict, a URL or a rule that is none."""
    from omnicache_cli.monitor.config import rules_of
    from omnicache_cli.monitor.default_rules import default_rules
    from omnicache_cli.monitor.scrape import headers_of, target_of
    from omnicache_cli.monitor.watching import Plan

    if given["lifetime"] and (given["interval"] or given["duration"] or given["fail_on"]):
        raise UsageError(
            "--lifetime takes one sample, which no rule judges; leave out --interval, --duration "
            "and --fail-on"
        )
    if given["once"] and given["duration"]:
        raise UsageError("--once takes two samples; leave it out, or --duration")
    if given["events_replay"] and not given["events"]:
        raise UsageError("--events-replay is for what --events misses; give --events too")
    targets = [target_of(url) for url in given["urls"] or [DEFAULT_URL]]
    if len({target.url for target in targets}) < len(targets):
        raise UsageError("a server is named twice and would count twice; name each once")
    run = str(given["run"]) if given["run"] is not None else None
    return Plan(
        targets,
        rules_of(default_rules(run), given["config"], given["fail_on"] or []),
        headers_of(given["header"] or []),
        given["events"] or [],
        given["events_replay"] or [],
        interval=given["interval"] or 2.0,
        window=given["window"],
        timeout=given["timeout"],
        duration=given["duration"],
        num_samples=num_samples(given),
    )


def num_samples(given: dict[str, Any]) -> int | None:
    """None: until --duration is over, or without end."""
    if given["lifetime"]:
        return 1
    if given["once"]:
        return 2
    watches = given["interval"] is not None or given["duration"] is not None
    return None if watches or shows_live(given) else 2


def shows_live(given: dict[str, Any]) -> bool:
    """On a terminal, where text is wanted there, and nothing else was asked for."""
    shown = format_for(given["format"], given["output"])
    at_terminal = sys.stdout is not None and sys.stdout.isatty()
    one_look = given["once"] or given["lifetime"]
    return shown == "text" and given["output"] is None and at_terminal and not one_look


def traced_run(folder: Path | None) -> "TracedRun | None":
    if folder is None:
        return None
    from omnicache_cli.monitor.traced import read_traced

    return read_traced(folder)


def read_again(former: "TracedRun | None") -> "TracedRun | None":
    """What a live server has recorded while it was watched; the former where it is gone."""
    if former is None:
        return None
    from omnicache_cli.monitor.traced import read_traced

    try:
        return read_traced(Path(former.folder))
    except BadInputError as error:
        note(f"omnicache: {error}; the run is shown as it was before the first sample")
        return former


def watched(plan: "Plan", given: dict[str, Any], traced: "TracedRun | None") -> "Fleet":
    """Watch to the end; samples go where they are wanted while they come."""
    from omnicache_cli.monitor.watching import watch

    if shows_live(given):
        from omnicache_cli.monitor.live import live_view

        with live_view() as view:
            return watch(plan, view.show)
    is_stream = plan.num_samples is None and given["output"] is None
    shown: Format = format_for(given["format"], given["output"])
    if is_stream and shown == "json":
        return watch(plan, lambda fleet, sample: say_json(sample, traced))
    if is_stream and shown == "text":
        return watch(plan, lambda fleet, sample: say_line(sample))
    return watch(plan, lambda fleet, sample: None)


def say_json(sample: "Sample", traced: "TracedRun | None") -> None:
    """One object, on one line."""
    from omnicache_cli.monitor.report import monitor_report
    from omnicache_cli.report.json import as_json_line

    deliver(as_json_line(monitor_report(sample, run=traced)), None)


def say_line(sample: "Sample") -> None:
    from omnicache_cli.monitor.lines import lines_of

    deliver(lines_of(sample), None)


def finish(fleet: "Fleet", given: dict[str, Any], traced: "TracedRun | None") -> None:
    """The whole of it, and the exit code that follows."""
    from omnicache_cli.monitor.report import monitor_report
    from omnicache_cli.monitor.verdict import exit_code_of, final_line, not_judged
    from omnicache_cli.monitor.watching import worst
    from omnicache_cli.report.json import as_json_line

    whole = fleet.whole()
    if whole is None:  # KeyboardInterrupt before the first sample has been raised already
        return
    output: Path | None = given["output"]
    shown = format_for(given["format"], output)
    report = monitor_report(whole, list(fleet.history), traced)
    is_stream = shown == "json" and num_samples(given) is None and output is None
    text = as_json_line(report) if is_stream else render(report, shown, output)
    deliver(text, output, quiet=given["quiet"])
    for line in not_judged(whole):
        note(f"omnicache: {line}")
    if whole.errors:
        raise worst(whole.errors)
    if not given["quiet"]:
        note(final_line(whole))
    code = exit_code_of(whole)
    if code in (EXIT_DIFFERS, EXIT_BAD_INPUT):
        raise typer.Exit(code)


def emitted_for(what: str, given: dict[str, Any]) -> "Emitted":
    """UsageError: neither of the two, or with options of watching."""
    from omnicache_cli.monitor.emit import EMITTERS

    if what not in EMITTERS:
        raise UsageError(f"--emit {what!r} is none of {', '.join(EMITTERS)}; choose one")
    watching = ("urls", "once", "lifetime", "interval", "duration", "events", "run", "fail_on")
    if used := [name for name in watching if given[name]]:
        raise UsageError(f"--emit asks no server; leave out {used[0].replace('_', '-')}")
    return EMITTERS[what]()
