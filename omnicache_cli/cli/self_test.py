"""`omnicache verify --self-test`: does `verify` find the faults that are planted for it?"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import typer

from omnicache_cli.cli.engine_args import engine_args
from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.progress import request_progress
from omnicache_cli.errors import EXIT_DONE, UsageError
from omnicache_cli.report.formats import render
from omnicache_cli.report.output import deliver, note

if TYPE_CHECKING:
    from omnicache_cli.engine.verify.session import CacheKind

DTYPES = ("bfloat16", "float32")


def run_self_test(
    context: typer.Context,
    model: str,
    cache: "CacheKind | None",
    baseline: Literal["engine", "in-engine"],
    layers: tuple[int, ...] | None,
) -> None:
    """With every cache that is here and in both dtypes, unless asked for one. `context`: of
    `verify`, with its other options. Exit 1: a fault was not found, or a clean run accused."""
    from omnicache_cli.cli.verify import ENGINE_PARAMETERS
    from omnicache_cli.engine.options import (
        EngineOptions,
        check_engine_args,
        check_model,
        prepare_environment,
        vllm_version,
    )
    from omnicache_cli.engine.verify.selftest import SelfTestSession
    from omnicache_cli.engine.verify.session import SessionOptions
    from omnicache_cli.verify.selftest import PLANTS, SelfTest, add_session
    from omnicache_cli.verify.selftest_report import (
        self_test_exit_code,
        self_test_line,
        self_test_report,
    )

    if layers == ():
        raise UsageError("--self-test damages the rows of a layer; leave out --layers none")
    options = context.params
    quiet = options["quiet"]
    prepare_environment(engine_process=False)
    checked = EngineOptions(check_model(model), engine_args(options, ENGINE_PARAMETERS))
    check_engine_args(checked)
    caches = caches_here(quiet=quiet) if cache is None else (cache,)
    dtypes = (checked.args["dtype"],) if "dtype" in checked.args else DTYPES
    total = len(dtypes) * len(caches) * (1 + len(PLANTS))
    test = SelfTest()
    facts: dict[str, Any] = {}
    with (
        termination_as_interrupt(),
        request_progress(total, quiet=quiet, noun="runs", doing="testing") as advance,
    ):
        for dtype in dtypes:
            engine = EngineOptions(checked.model, {**checked.args, "dtype": dtype})
            with SelfTestSession(engine, SessionOptions(caches[0], baseline, layers)) as session:
                for line in [] if quiet or facts else session.notes:
                    note(line)
                for one in caches:
                    session.use_cache(one)
                    facts = facts or session.described()
                    add_session(test, session, f"{dtype}, {one}", advance)
    facts |= {"dtype": ", ".join(dtypes), "cache": ", ".join(caches)}
    report = self_test_report(test, facts, vllm_version=vllm_version())
    output = options["output"]
    deliver(render(report, options["format"], output), output, quiet=quiet)
    if output is not None:
        note(self_test_line(test))
    code = self_test_exit_code(test)
    if code != EXIT_DONE:
        raise typer.Exit(code)


def caches_here(*, quiet: bool) -> "tuple[CacheKind, ...]":
    """Those that can be tested on this machine."""
    if find_spec("vllm_omni") is not None:
        return ("builtin", "vllm-omni")
    if not quiet:
        note("vLLM-Omni is not installed: its cache is left out")
    return ("builtin",)
