"""Draws the totals of a running run: a table that stays in place on a terminal, else a line each
time something has changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Protocol

from omnicache_cli.live.totals import EngineTotals, RunTotals
from omnicache_cli.report.layout import escaped

COLUMNS = (
    *("engine", "step", "steps/s", "tokens/s", "run", "wait", "done", "hit %", "pool %"),
    *("evict", "preempt"),
)
"""`done`: requests that have ended, of those that have arrived."""

WAITING = "no step yet"


class Screen(Protocol):
    """Where the totals are drawn."""

    def draw(self, totals: RunTotals, remark: str) -> None:
        """Show the totals as they are now, and a remark under them where there is one."""


class LineScreen:
    """A line per engine, whenever it is not the one that was written last."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last: dict[str, str] = {}

    def draw(self, totals: RunTotals, remark: str) -> None:
        lines = {name: line_of(name, totals) for name in totals.engines}
        for name, line in (lines or {"": WAITING}).items():
            if self._last.get(name) != line:
                self._last[name] = line
                self._write(line)
        if remark and self._last.get("remark") != remark:
            self._last["remark"] = remark
            self._write(remark)


@contextmanager
def terminal_screen(stream: IO[str]) -> Iterator[Screen]:
    """A table that is drawn over and over in the same place, and stays there at last."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    class TerminalScreen:
        def draw(self, totals: RunTotals, remark: str) -> None:
            table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
            hidden = 1 if _is_alone(totals) else 0
            for column in COLUMNS[hidden:]:
                table.add_column(column, justify="left" if column == "engine" else "right")
            for name, engine in totals.engines.items():
                cells = cells_of(name, engine, totals)[hidden:]
                table.add_row(*(Text(cell) for cell in cells))
            shown = table if totals.engines else Text(WAITING)
            live.update(Group(shown, Text(remark)) if remark else shown, refresh=True)

    console = Console(file=stream, highlight=False)
    with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
        yield TerminalScreen()


def cells_of(name: str, engine: EngineTotals, totals: RunTotals) -> list[str]:
    """One row under COLUMNS; `-` is not known."""
    rate = engine.rate()
    return [
        label_of(name, totals),
        _number(engine.last_step),
        _decimal(None if rate is None else rate[0]),
        _decimal(None if rate is None else rate[1]),
        _number(engine.num_running),
        _number(engine.num_waiting),
        f"{engine.num_finished}/{engine.num_arrived}",
        _percent(engine.hit_rate),
        _percent(engine.occupancy),
        _number(engine.evicted_blocks),
        _number(engine.preemptions),
    ]


def line_of(name: str, totals: RunTotals) -> str:
    """The same in a line."""
    cells = dict(zip(COLUMNS, cells_of(name, totals.engines[name], totals), strict=True))
    if _is_alone(totals):
        del cells["engine"]
    return ", ".join(f"{column} {cell}" for column, cell in cells.items())


def _is_alone(totals: RunTotals) -> bool:
    """One engine, and no stage: it needs no name."""
    return [one.source.stage for one in totals.engines.values()] == [None]


def label_of(name: str, totals: RunTotals) -> str:
    """The stage of an engine, else its number in the run."""
    stage = totals.engines[name].source.stage
    return escaped(stage if stage is not None else str(list(totals.engines).index(name)))


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
