"""What `omnicache show` prints: one module per view, each a function from a run to a `View`."""

from omnicache_cli.trace.run import Run
from omnicache_cli.trace.views.check import show_check
from omnicache_cli.trace.views.request import show_request
from omnicache_cli.trace.views.rounds import show_rounds
from omnicache_cli.trace.views.step import show_step
from omnicache_cli.trace.views.steps import show_steps
from omnicache_cli.trace.views.totals import show_summary
from omnicache_cli.trace.views.view import View

__all__ = ["View", "show_view"]


def show_view(
    run: Run,
    *,
    mode: str | None = None,
    step: int | None = None,
    request: str | None = None,
    engine: str | None = None,
    every_step: bool = False,
) -> View:
    """The view that the options ask for; `mode` is the option's name, None the table of steps."""
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
    return show_steps(run, engine, every_step=every_step)
