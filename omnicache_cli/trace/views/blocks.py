"""`show RUN --blocks`: who owned which block when, and how full the pool was."""

from collections.abc import Sequence
from typing import Any

from omnicache_cli.report.model import Cell, Facts, Lines, Mark, Picture, Report, Section, Table
from omnicache_cli.trace.block_map import BlockMap, Column
from omnicache_cli.trace.pool import (
    CACHED,
    FREE,
    IN_USE,
    SHARED,
    STATE_NAMES,
    BlockPool,
    BlockUse,
    Hold,
)
from omnicache_cli.trace.records import NO_REQUEST, EngineSource
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Step
from omnicache_cli.trace.views.view import View, engine_title, of_engine, steps_of
from omnicache_cli.trace.views.words import counted, runs_text, who

TEXT_ROWS = 40
JSON_USES = 20_000
"""Uses of blocks kept of each engine; all are counted."""

TEXT_RUNS = 4
TEXT_HOLDS = 2
STACK_ROWS = 8

MARKS = (
    Mark("free", 0.0),
    Mark("free, cached", 0.25),
    Mark("in use", 0.75),
    Mark("in use by several", 1.0),
)
"""By state of trace/pool.py."""


class PoolHistory:
    """One engine's pool from its first step to its last."""

    def __init__(self, engine: EngineSource) -> None:
        self.map = BlockMap()
        self.pool = BlockPool(engine, ended=self._keep, moved=self.map.move)
        self.uses: list[BlockUse] = []  # the first JSON_USES to end, and the current ones
        self.num_uses = 0
        self.in_use_steps = 0  # blocks in use, summed over the steps
        self.peak_in_use = 0
        self.peak_step: int | None = None

    def add(self, step: Step) -> None:
        in_use = self.pool.num_usable - self.pool.add(step)
        self.map.tick(step.number)
        self.in_use_steps += in_use
        if self.peak_step is None or in_use > self.peak_in_use:
            self.peak_in_use, self.peak_step = in_use, step.number

    def close(self) -> None:
        """After the last step."""
        self.pool.close()
        self.map.close()
        self.uses.sort(key=lambda use: (_or_first(use.taken_step), use.block))

    @property
    def mean_in_use(self) -> float:
        return self.in_use_steps / self.pool.num_steps

    def _keep(self, use: BlockUse) -> None:
        self.num_uses += 1
        if len(self.uses) < JSON_USES:
            self.uses.append(use)


def _or_first(step: int | None) -> int:
    return -1 if step is None else step


def show_blocks(run: Run, engine: str | None) -> View:
    histories: dict[str, PoolHistory] = {}
    for step in steps_of(run, engine):
        name = step.engine.engine
        if name not in histories:
            histories[name] = PoolHistory(step.engine)
        histories[name].add(step)
    sections: list[Section] = []
    for name, history in histories.items():
        history.close()
        sections += _sections(engine_title(run, name), history)
    if not histories:
        sections.append(Lines("", ["no step was recorded"]))
    report = Report(
        "show",
        f"Blocks of {run.folder.name or run.folder}",
        {"run": str(run.folder), "engines": [_data(one) for one in histories.values()]},
        tuple(sections),
        run.vllm_version,
    )
    return View(report, _next(run, histories))


def _next(run: Run, histories: dict[str, PoolHistory]) -> str | None:
    for name in run.engines:
        uses = histories[name].uses if name in histories else []
        if uses:
            use = next((one for one in uses if one.evicted_step is not None), uses[0])
            return of_engine(run, f"--block {use.block}", name)
    return None


def _sections(title: str, history: PoolHistory) -> list[Section]:
    sections: list[Section] = [Facts(title, _facts(history))]
    if history.map.num_rows:
        sections += [_stack(history), _map(history)]
    rows = _use_rows(history)
    several = len(history.pool.engine.groups) > 1
    columns = ("blocks", *(["group"] if several else []), "taken by", "steps", "reused by")
    columns = (*columns, "cached", "freed", "evicted")
    sections.append(Table("Owners, by step", columns, rows[:TEXT_ROWS]))
    more = len(rows) - TEXT_ROWS
    notes = [f"… and {counted(more, 'more row')}; --block N or --format json"] if more > 0 else []
    if history.num_uses > len(history.uses):
        listed = len(history.uses)
        notes.append(f"of {history.num_uses:,} uses the {listed:,} that ended first were kept")
    return [*sections, Lines("", notes)] if notes else sections


def _facts(history: PoolHistory) -> dict[str, Cell]:
    pool, counts = history.pool, history.pool.counts
    engine = pool.engine
    end = pool.num_in_state()
    facts: dict[str, Cell] = {
        "pool": f"{counted(pool.num_usable, 'block')} that can be handed out, and the null block 0"
    }
    for number, group in enumerate(engine.groups):
        facts[f"KV cache group {number}"] = f"{group.spec}, {counted(group.block_size, 'token')}"
    facts["in use"] = (
        f"{history.mean_in_use:.1f} blocks on average, "
        f"{history.peak_in_use:,} at most (step {history.peak_step})"
    )
    facts["at the end"] = (
        f"{end[IN_USE] + end[SHARED]:,} in use, {end[CACHED]:,} free and cached, {end[FREE]:,} free"
    )
    facts["taken"] = counted(counts["taken"], "block")
    facts["reused"] = counted(counts["hit"], "block")
    facts["cached"] = counted(counts["cached"], "block")
    facts["evicted"] = counted(counts["evicted"], "block")
    if counts["reset"]:
        facts["prefix cache resets"] = counts["reset"]
    facts["free blocks"] = _agreement(pool)
    return facts


def _agreement(pool: BlockPool) -> str:
    """Do the events say what the engine counted?"""
    steps = counted(pool.num_steps, "step")
    if not pool.num_disagreements:
        return f"as the engine counted them, in {steps}"
    first = "; ".join(
        f"step {one.step}: {one.rebuilt} by the events, {one.recorded} by the engine"
        for one in pool.disagreements
    )
    lost = "" if pool.first_gap is None else f" (records were lost before step {pool.first_gap})"
    return f"events and engine differ in {pool.num_disagreements:,} of {steps}{lost}: {first}"


# -- pictures -------------------------------------------------------------------------------------


def _stack(history: PoolHistory) -> Picture:
    """How much of the pool was in which state, by step: a bar of each column, from below."""
    usable = history.pool.num_usable
    height = min(STACK_ROWS, usable)
    columns = history.map.columns
    rows = []
    for row in range(height, 0, -1):
        below = (row - 1) * usable / height  # a row begun is drawn in full
        cells = [_stacked(column, below) for column in columns]
        rows.append((f"{round(row * usable / height):,}", cells))
    title = f"Blocks of the pool by step{_scale(history.map, with_rows=False)}"
    return _picture(title, rows, columns)


def _stacked(column: Column, below: float) -> int:
    filled = 0.0
    for state in (SHARED, IN_USE, CACHED):
        filled += column.total(state) / column.num_steps
        if filled > below:
            return state
    return FREE


def _map(history: PoolHistory) -> Picture:
    """What most blocks of a row were for most of the steps of a column."""
    block_map, rows = history.map, []
    for row in range(block_map.num_rows):
        first, last = _row_blocks(history, row)
        cells = [_most(column, row, last - first + 1) for column in block_map.columns]
        rows.append((str(first) if first == last else f"{first} .. {last}", cells))
    title = f"Each block by step{_scale(block_map, with_rows=True)}"
    return _picture(title, rows, block_map.columns)


def _row_blocks(history: PoolHistory, row: int) -> tuple[int, int]:
    first = history.map.first_block(row)
    last = min(first + history.map.blocks_per_row - 1, history.pool.num_usable)
    return first, last


def _most(column: Column, row: int, num_blocks: int) -> int:
    shares = list(column.rows[row])
    shares[FREE] = num_blocks * column.num_steps - sum(shares)
    return max(range(len(shares)), key=lambda state: (shares[state], state))


def _scale(block_map: BlockMap, *, with_rows: bool) -> str:
    merged = []
    if with_rows and block_map.blocks_per_row > 1:
        merged.append(f"a row is {counted(block_map.blocks_per_row, 'block')}")
    if block_map.steps_per_column > 1:
        merged.append(f"a column is {counted(block_map.steps_per_column, 'step')}")
    return f" ({', '.join(merged)})" if merged else ""


def _picture(title: str, rows: Sequence[tuple[str, list[int]]], columns: list[Column]) -> Picture:
    return Picture(
        title, MARKS, rows, f"step {columns[0].first_step}", f"step {columns[-1].last_step}"
    )


# -- owners ---------------------------------------------------------------------------------------


def _use_rows(history: PoolHistory) -> list[tuple[Cell, ...]]:
    """Blocks that were used alike share a row."""
    alike: dict[tuple[Cell, ...], list[int]] = {}
    several = len(history.pool.engine.groups) > 1
    for use in history.uses:
        cells = _use_cells(use)
        alike.setdefault((use.group, *cells) if several else cells, []).append(use.block)
    return [(runs_text(blocks, most=TEXT_RUNS), *cells) for cells, blocks in alike.items()]


def _use_cells(use: BlockUse) -> tuple[Cell, ...]:
    taker = _taker(use)
    readers = use.holds if taker is None else use.holds[1:]
    texts = [f"{who(one.request)} {_span(one)}" for one in readers[:TEXT_HOLDS]]
    more = use.num_holds - (taker is not None) - len(texts)
    if more:
        texts.append(f"{more:,} more")
    cached: Cell = None if use.cached_step is None else str(use.cached_step)
    if use.cached_by is not None and use.cached_by != use.taken_by:
        cached = f"{cached} by {who(use.cached_by)}"
    if use.evicted_step is not None:
        evicted: Cell = f"{use.evicted_step} for {who(use.evicted_for or 0)}"
    else:
        evicted = None if use.reset_step is None else f"{use.reset_step} by a reset"
    return (
        "not known" if use.taken_by is None else who(use.taken_by),
        None if taker is None else _span(taker),
        ", ".join(texts) or None,
        cached,
        None if use.freed_step is None else str(use.freed_step),
        evicted,
    )


def _taker(use: BlockUse) -> Hold | None:
    return use.holds[0] if use.taken_by not in (None, NO_REQUEST) else None


def _span(hold: Hold) -> str:
    if hold.last_step is None:
        return f"{hold.first_step} .."
    if hold.last_step == hold.first_step:
        return str(hold.first_step)
    return f"{hold.first_step} .. {hold.last_step}"


# -- for scripts ----------------------------------------------------------------------------------


def _data(history: PoolHistory) -> dict[str, Any]:
    pool = history.pool
    return {
        "engine": pool.engine.engine,
        "num_gpu_blocks": pool.engine.num_gpu_blocks,
        "usable_blocks": pool.num_usable,
        "groups": [
            {"group": number, "spec": group.spec, "block_size": group.block_size}
            for number, group in enumerate(pool.engine.groups)
        ],
        "num_steps": pool.num_steps,
        "mean_blocks_in_use": history.mean_in_use,
        "peak_blocks_in_use": history.peak_in_use,
        "peak_step": history.peak_step,
        "at_the_end": dict(zip(STATE_NAMES, pool.num_in_state(), strict=True)),
        **{
            f"{name}_blocks": pool.counts[name]
            for name in ("taken", "hit", "cached", "freed", "evicted")
        },
        "prefix_cache_resets": pool.counts["reset"],
        "steps_that_disagree": pool.num_disagreements,
        "disagreements": [
            {"step": one.step, "by_events": one.rebuilt, "num_free_blocks": one.recorded}
            for one in pool.disagreements
        ],
        "records_lost_before": pool.first_gap,
        "occupancy": _occupancy(history),
        "num_uses": history.num_uses,
        "uses": [_use_data(use) for use in history.uses],
    }


def _occupancy(history: PoolHistory) -> dict[str, Any]:
    """Means over the steps of a column, in blocks; `rows` goes by `columns[].rows[]`."""
    block_map, usable = history.map, history.pool.num_usable
    columns = []
    for column in block_map.columns:
        means = [column.total(state) / column.num_steps for state in range(len(STATE_NAMES))]
        means[FREE] = usable - sum(means[1:])
        columns.append(
            {
                "first_step": column.first_step,
                "last_step": column.last_step,
                "num_steps": column.num_steps,
                **dict(zip(STATE_NAMES, means, strict=True)),
                "peak_in_use": column.peak_in_use,
                "rows": [
                    {STATE_NAMES[state]: cell[state] / column.num_steps for state in range(1, 4)}
                    for cell in column.rows
                ],
            }
        )
    rows = [_row_blocks(history, row) for row in range(block_map.num_rows)]
    return {
        "steps_per_column": block_map.steps_per_column,
        "blocks_per_row": block_map.blocks_per_row,
        "rows": [{"first_block": first, "last_block": last} for first, last in rows],
        "columns": columns,
    }


def _use_data(use: BlockUse) -> dict[str, Any]:
    return {
        "block": use.block,
        "group": use.group,
        "taken_step": use.taken_step,
        "taken_by": use.taken_by,
        "holders": [
            {"request": one.request, "first_step": one.first_step, "last_step": one.last_step}
            for one in use.holds
        ],
        "num_holders": use.num_holds,
        "num_hits": use.num_hits,
        "cached_step": use.cached_step,
        "cached_by": use.cached_by,
        "hash": use.hash,
        "freed_step": use.freed_step,
        "evicted_step": use.evicted_step,
        "evicted_for": use.evicted_for,
        "reset_step": use.reset_step,
    }
