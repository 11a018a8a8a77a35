"""`omnicache demo`: the main job on a model made on the spot, with what to look at."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.options import Force, Quiet
from omnicache_cli.cli.progress import request_progress
from omnicache_cli.errors import EXIT_DIFFERS, EXIT_DONE, EXIT_ENGINE_FAILED
from omnicache_cli.report.formats import render
from omnicache_cli.report.model import Lines, Report
from omnicache_cli.report.output import deliver, note
from omnicache_cli.trace.workload import Prompt, Workload

PROMPT = "<|vision_start|><|image_pad|><|vision_end|>Describe this picture in one line. "
IMAGE_SIZE = (1120, 672)
"""960 placeholder tokens; with two around them and 35 characters the prompt has 997."""

ENGINE_ARGS: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_seqs": 2,
    "num_gpu_blocks_override": 130,
    "enforce_eager": True,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
}


@dataclass(frozen=True, slots=True)
class Act:
    """One run of the demo and what it shows."""

    run: str  # name of its folder
    max_tokens: int
    lesson: str


ACTS = (
    Act(
        "run-long",
        40,
        "40 output tokens fill the last block of the first round, and it enters the cache. The\n"
        "second round reuses the blocks that its prompt shares and gets a new one for its tail.",
    ),
    Act(
        "run-short",
        4,
        "4 output tokens leave the last block of the first round unfilled. It is not cached, vLLM\n"
        "frees it to the front of the free queue, and the second round gets the same block again.",
    ),
)


def demo(
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the model and the runs here. Default: removed."),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Trace a tiny image model, show what the prefix cache did, and verify what it gives back.

    Builds a model with random weights and sends one image prompt of 997 tokens twice: first with
    enough output to fill the prompt's last block, then with little. Shows the rounds side by side,
    and compares the tensors that a hit restores with those of a run without a cache.

    Example: omnicache demo --keep demo
    """
    from omnicache_cli.engine.options import prepare_environment
    from omnicache_cli.engine.tiny_images import write_test_image
    from omnicache_cli.engine.tiny_models import build_tiny_model

    prepare_environment(engine_process=False)
    with termination_as_interrupt(), _folder(keep) as folder:
        picture = folder / "picture.png"
        _say("building a tiny Qwen2.5-VL with random weights", quiet)
        build_tiny_model("image", folder / "model", force=force)
        write_test_image(picture, width=IMAGE_SIZE[0], height=IMAGE_SIZE[1], seed=0)
        for act in ACTS:
            _perform(act, folder, picture, force=force, quiet=quiet)
        _verify(folder / "model", quiet=quiet)
    kept = keep or Path("demo")
    before = "" if keep is not None else f"omnicache demo --keep {kept}, then "
    _say(f"next: {before}omnicache show {kept / ACTS[0].run} --request p0-r2", quiet)


def _perform(act: Act, folder: Path, picture: Path, *, force: bool, quiet: bool) -> None:
    """Record one act, show its rounds and check every step."""
    from omnicache_cli.engine.options import EngineOptions
    from omnicache_cli.engine.tracing import trace_workload
    from omnicache_cli.trace.invariants import InvariantChecker
    from omnicache_cli.trace.run import Run
    from omnicache_cli.trace.summary import summarize
    from omnicache_cli.trace.views import show_view

    run = folder / act.run
    workload = Workload(
        (Prompt(PROMPT, None, (picture,)),), num_rounds=2, max_tokens=act.max_tokens
    )
    options = EngineOptions(str(folder / "model"), ENGINE_ARGS)
    with request_progress(workload.num_requests, quiet=quiet) as advance:
        trace_workload(options, workload, run, force=force, on_finished=advance)
    rounds = show_view(Run(run), mode="--rounds").report
    summary = summarize(Run(run), checker=InvariantChecker())
    totals = (
        f"{summary.num_steps} steps, {summary.hit_tokens} of {summary.queried_tokens} queried "
        f"tokens hit, {summary.broken_invariants} broken invariants"
    )
    lines = Lines("", (*act.lesson.splitlines(), totals))
    report = Report(
        "demo", f"{rounds.title}, {act.max_tokens} output tokens", {}, (lines, *rounds.sections)
    )
    deliver(render(report, "text", None) + "\n", None)
    if summary.dropped_records:
        raise typer.Exit(EXIT_ENGINE_FAILED)
    if summary.broken_invariants:
        raise typer.Exit(EXIT_DIFFERS)


def _verify(model: Path, *, quiet: bool) -> None:
    """Each tensor cache that is installed, on every scenario."""
    from omnicache_cli.engine.options import EngineOptions
    from omnicache_cli.engine.verify.session import CACHES, EngineSession, SessionOptions
    from omnicache_cli.verify.report import EXIT_CODES, summary_line
    from omnicache_cli.verify.run import verify
    from omnicache_cli.verify.scenarios import SCENARIOS, choose

    lines = []
    code = EXIT_DONE
    args = EngineOptions(str(model), ENGINE_ARGS)
    for cache in CACHES:
        if cache == "vllm-omni" and find_spec("vllm_omni") is None:
            continue
        total = len(SCENARIOS)
        with (
            request_progress(total, quiet=quiet, noun="scenarios", doing="verifying") as advance,
            EngineSession(args, SessionOptions(cache)) as session,
        ):
            result = verify(session, choose(session.facts(), (), (), 4), on_scenario=advance)
        lines.append(f"{cache}: {summary_line(result).removeprefix('verify: ')}")
        code = max(code, EXIT_CODES[result.verdict])
    title = "Tensors that a hit restores, against a run without a cache"
    deliver(render(Report("demo", title, {}, (Lines("", lines),)), "text", None), None)
    if code != EXIT_DONE:
        raise typer.Exit(code)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="omnicache-demo-") as folder:
        yield Path(folder)


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        note(text)
