"""`show A B`: what two runs have different, and where they part."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.parting import Parting, first_parting
from omnicache_cli.trace.phases import ALWAYS_RECORDED, PHASES
from omnicache_cli.trace.records import EngineSource
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import Summary, summarize
from omnicache_cli.trace.views.requests import RequestRow, request_rows, row_data
from omnicache_cli.trace.views.totals import summary_data
from omnicache_cli.trace.views.view import View, engine_choices, is_engine, steps_of
from omnicache_cli.trace.views.words import counted, milliseconds, runs_text

TEXT_ROWS = 40
MAX_REQUESTS = 100_000
"""Requests of each run that are compared one by one, in the order in which they end."""

TEXT_RUNS = 4
MAX_TEXT = 200
"""Characters of one side of a difference in the text."""

_COMPARED = (
    *("num_prompt_tokens", "queried_tokens", "hit_tokens", "resumed_hit_tokens"),
    *("computed_tokens", "num_steps", "num_preemptions", "most_blocks", "status"),
    *("num_output_tokens", "lora_name", "has_cache_salt", "multimodal_items"),
)
"""What of a request is compared: nothing that a busy machine could change."""

_TOTALS = (
    *("steps", "forwards", "requests", "finished_requests", "unfinished_requests"),
    *("prompt_tokens", "scheduled_tokens", "queried_tokens", "hit_tokens", "resumed_hit_tokens"),
    *("external_tokens", "kv_cache_hit_rate", "modal_cache_ratio", "evicted_blocks"),
    *("eviction_frequency", "preemptions", "prefix_cache_resets", "dropped_records"),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One request in both runs; None where the other run has no such request."""

    one: RequestRow | None
    other: RequestRow | None
    matched_by: str | None = None  # id, arrival

    @property
    def differs_in(self) -> list[str]:
        if self.one is None or self.other is None:
            return []
        mine, theirs = row_data(self.one), row_data(self.other)
        return [name for name in _COMPARED if mine[name] != theirs[name]]


class _Side:
    """One of the two runs: what is compared of it, read once each."""

    def __init__(self, run: Run, engine: str | None) -> None:
        self.folder = run.folder
        steps = None if engine is None else steps_of(run, engine)
        self.summary: Summary = summarize(run, steps)
        self.totals = {name: summary_data(self.summary)[name] for name in _TOTALS}
        self.vllm_version = run.vllm_version
        self.engines = [one for name, one in run.engines.items() if is_engine(run, name, engine)]
        self.choices = engine_choices(run)
        again = Run(run.folder)
        rows = islice(request_rows(again, engine), MAX_REQUESTS)
        self.rows = sorted(
            rows, key=lambda row: (row.number, list(again.engines).index(row.engine))
        )

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"vllm_version": self.vllm_version, "engines": len(self.engines)}
        for number, engine in enumerate(self.engines):
            prefix = f"engine {number}: " if len(self.engines) > 1 else ""
            found |= {f"{prefix}{name}": value for name, value in _options(engine).items()}
        return found


def show_two(first: Run, second: Run, engine: str | None) -> View:
    """A view and no judgement: it ends well whatever differs. Each run is read three times.

    BadInputError: one of them has no such engine.
    """
    a, b = _Side(first, engine), _Side(second, engine)
    pairs = _matched(a.rows, b.rows)
    partings = [
        (one, other, first_parting(_steps(a, one), _steps(b, other)))
        for one, other in zip(a.engines, b.engines, strict=False)
    ]
    sections: list[Section] = [
        Facts("", {"A": str(a.folder), "B": str(b.folder)}),
        _difference_table("Engine options that differ", "option", a.options(), b.options()),
        _difference_table("Totals that differ", "total", a.totals, b.totals),
        *_request_sections(pairs),
        Lines("First step that differs", _parting_lines(partings)),
        _phases(a.summary, b.summary),
    ]
    report = Report(
        "show", "Two runs", _data(a, b, pairs, partings), tuple(sections), a.vllm_version
    )
    return View(report)


def _steps(side: _Side, engine: EngineSource) -> Any:
    return steps_of(Run(side.folder), engine.engine)


def _options(engine: EngineSource) -> dict[str, Any]:
    """What the cache depends on, flat, by the names of the trace."""
    found: dict[str, Any] = {
        name: getattr(engine, name)
        for name in (
            *("model", "scheduler_class", "num_gpu_blocks", "block_size", "hash_block_size"),
            "enable_prefix_caching",
        )
    }
    for number, group in enumerate(engine.groups):
        for name in group.__struct_fields__:
            if name != "layer_names":  # num_layers says it shorter
                found[f"groups[{number}].{name}"] = getattr(group, name)
    found |= {f"parallel.{name}": value for name, value in engine.parallel.items()}
    return found | engine.options


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names, in order, that one of them lacks or that differ."""
    names = list(dict.fromkeys([*one, *other]))
    return [name for name in names if one.get(name) != other.get(name)]


def _matched(ours: Sequence[RequestRow], theirs: Sequence[RequestRow]) -> list[Pair]:
    """By external id, the first of a name with the first; what is left by arrival number."""
    waiting: defaultdict[str, list[RequestRow]] = defaultdict(list)
    for row in reversed(theirs):
        waiting[row.external_id].append(row)
    pairs, left = [], []
    for row in ours:
        same = waiting.get(row.external_id)
        if same:
            pairs.append(Pair(row, same.pop(), "id"))
        else:
            left.append(row)
    taken = {id(pair.other) for pair in pairs}
    rest = [row for row in theirs if id(row) not in taken]
    by_number = {(row.number, row.num_prompt_tokens): row for row in reversed(rest)}
    for row in left:
        match = by_number.pop((row.number, row.num_prompt_tokens), None)
        pairs.append(Pair(row, match, None if match is None else "arrival"))
    taken = {id(pair.other) for pair in pairs}
    pairs += [Pair(None, row) for row in rest if id(row) not in taken]
    return pairs


# -- text -----------------------------------------------------------------------------------------


def _difference_table(
    title: str, noun: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> Section:
    rows: list[tuple[Cell, ...]] = [
        (name, _cell(one.get(name)), _cell(other.get(name))) for name in _differing(one, other)
    ]
    return Table(title, (noun, "A", "B"), rows)


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{name} {_number(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list) and all(isinstance(one, int) for one in value):
        return runs_text(value, most=TEXT_RUNS) if value else "none"
    if isinstance(value, list):
        return ", ".join(_number(one) for one in value) or "none"
    return str(value)


def _number(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _request_sections(pairs: Sequence[Pair]) -> list[Section]:
    differ = [pair for pair in pairs if pair.differs_in]
    both = [pair for pair in pairs if pair.one is not None and pair.other is not None]
    by_arrival = sum(pair.matched_by == "arrival" for pair in both)
    facts: dict[str, Cell] = {
        "in both": len(both),
        "the same": len(both) - len(differ),
        "differ": len(differ),
        "only in A": sum(pair.other is None for pair in pairs),
        "only in B": sum(pair.one is None for pair in pairs),
    }
    if by_arrival:
        facts["matched by arrival"] = by_arrival
    sections: list[Section] = [Facts("Requests", facts)]
    if differ:
        columns = (
            *("request", "prompt", "hit A", "hit B", "computed A", "computed B"),
            *("steps A", "steps B", "differ in"),
        )
        rows = [_pair_cells(pair) for pair in differ[:TEXT_ROWS]]
        sections.append(Table("Requests that differ", columns, rows))
    if len(differ) > TEXT_ROWS:
        more = counted(len(differ) - TEXT_ROWS, "more request")
        sections.append(Lines("", [f"… and {more}; --format json"]))
    return sections


def _pair_cells(pair: Pair) -> tuple[Cell, ...]:
    one, other = pair.one, pair.other
    assert one is not None
    assert other is not None
    prompts = [one.num_prompt_tokens, other.num_prompt_tokens]
    return (
        f"#{one.number} {one.external_id}",
        prompts[0] if prompts[0] == prompts[1] else f"{prompts[0]} | {prompts[1]}",
        *(one.hit_tokens, other.hit_tokens, one.computed_tokens, other.computed_tokens),
        *(one.num_steps, other.num_steps),
        ", ".join(name.removeprefix("num_").replace("_", " ") for name in pair.differs_in),
    )


def _parting_lines(
    partings: Sequence[tuple[EngineSource, EngineSource, Parting | None]],
) -> list[str]:
    if not partings:
        return ["one of the runs has no engine to compare"]
    lines = []
    for number, (_, _, parting) in enumerate(partings):
        prefix = f"engine {number}: " if len(partings) > 1 else ""
        if parting is None:
            lines.append(f"{prefix}none: every step scheduled, hit, took and freed the same")
            continue
        steps = [parting.step, parting.other_step]
        same = steps[0] == steps[1] or None in steps
        number_text = f"step {next(one for one in steps if one is not None)}"
        where = number_text if same else f"step {steps[0]} of A, step {steps[1]} of B"
        lines.append(f"{prefix}{where}: {parting.what}")
        lines.append(f"  A: {_shortened(parting.value)}")
        lines.append(f"  B: {_shortened(parting.other_value)}")
    return lines


def _shortened(value: object) -> str:
    cell = _cell(value)
    text = "nothing" if cell is None else str(cell)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _phases(one: Summary, other: Summary) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (name, *(milliseconds(side.phases[name].percentile(50)) for side in (one, other)))
        for name in PHASES
        if name in ALWAYS_RECORDED or one.phases[name].count or other.phases[name].count
    ]
    return Table("Phase times, p50 in ms (never a difference above)", ("phase", "A", "B"), rows)


# -- for scripts ----------------------------------------------------------------------------------


def _data(
    a: _Side,
    b: _Side,
    pairs: Sequence[Pair],
    partings: Sequence[tuple[EngineSource, EngineSource, Parting | None]],
) -> dict[str, Any]:
    options, others = a.options(), b.options()
    return {
        "runs": [str(a.folder), str(b.folder)],
        "options": {
            name: [options.get(name), others.get(name)] for name in _differing(options, others)
        },
        "totals": {
            name: [a.totals[name], b.totals[name]] for name in _differing(a.totals, b.totals)
        },
        "requests": [
            {
                "matched_by": pair.matched_by,
                "differ_in": pair.differs_in,
                "a": None if pair.one is None else row_data(pair.one),
                "b": None if pair.other is None else row_data(pair.other),
            }
            for pair in pairs
        ],
        "first_differences": [
            {
                "engines": [one.engine, other.engine],
                "difference": None
                if parting is None
                else {
                    "steps": [parting.step, parting.other_step],
                    "what": parting.what,
                    "values": [parting.value, parting.other_value],
                },
            }
            for one, other, parting in partings
        ],
        "phases_p50_ns": {
            name: [side.summary.phases[name].percentile(50) for side in (a, b)] for name in PHASES
        },
    }
