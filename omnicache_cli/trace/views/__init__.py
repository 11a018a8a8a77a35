"""What `omnicache show` prints: one module per view, each a function from a run to a `View`."""

from omnicache_cli.trace.run import Run
from omnicache_cli.trace.views.block import show_block
from omnicache_cli.trace.views.blocks import show_blocks
from omnicache_cli.trace.views.check import show_check
from omnicache_cli.trace.views.evictions import show_evictions
from omnicache_cli.trace.views.request import show_request
from omnicache_cli.trace.views.requests import show_requests
from omnicache_cli.trace.views.rounds import show_rounds
from omnicache_cli.trace.views.step import show_step
from omnicache_cli.trace.views.steps import show_steps
from omnicache_cli.trace.views.totals import show_summary
from omnicache_cli.trace.views.two_runs import show_two
from omnicache_cli.trace.views.view import View

__all__ = ["View", "show_two", "show_view"]


def show_view(
    run: Run,
    *,
    mode: str | None = None,
    step: int | None = None,
    request: str | None = None,
    block: int | None = None,
    engine: str | None = None,
    every_row: bool = False,
) -> View:
    """The view that the options ask for; `mode` is the option's name, None the table of steps.

    `every_row`: long lists are for a script (JSON), not for a reader.
    """
    if mode == "--step" and step is not None:
        return show_step(run, step, engine)
    if mode == "--request" and request is not None:
        return show_request(run, request, engine)
    if mode == "--rounds":
        return show_rounds(run, engine)
    if mode == "--check":
        return show_check(run, engine)
    if mode == "--summary":
        return show_summary(run, engine)
    if mode == "--requests":
        return show_requests(run, engine, every_request=every_row)
    if mode == "--blocks":
        return show_blocks(run, engine)
    if mode == "--block" and block is not None:
        return show_block(run, block, engine)
    if mode == "--evictions":
        return show_evictions(run, engine, every_eviction=every_row)
    return show_steps(run, engine, every_step=every_row)
