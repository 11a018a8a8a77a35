"""A damaged trace is one clear line, whatever was damaged: never a traceback, never a hang."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.errors import BadTraceError
from omnicache_cli.export.perfetto import write_timeline
from omnicache_cli.export.rows import TableRows
from omnicache_cli.export.timeline import Timeline
from omnicache_cli.trace.invariants import InvariantChecker
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import summarize
from omnicache_cli.trace.views import show_two, show_view
from tests.unit.run_builder import two_rounds, write_manifest

VIEWS: dict[str, Callable[[Run], object]] = {
    "steps": show_view,
    "step": lambda run: show_view(run, mode="--step", step=0),
    "request": lambda run: show_view(run, mode="--request", request="#0"),
    "rounds": lambda run: show_view(run, mode="--rounds"),
    "check": lambda run: show_view(run, mode="--check"),
    "summary": lambda run: show_view(run, mode="--summary"),
    "requests": lambda run: show_view(run, mode="--requests"),
    "blocks": lambda run: show_view(run, mode="--blocks"),
    "block": lambda run: show_view(run, mode="--block", block=3),
    "evictions": lambda run: show_view(run, mode="--evictions"),
    "two runs": lambda run: show_two(run, Run(run.folder), None),
    "totals": lambda run: summarize(run, checker=InvariantChecker()),
    "timeline": lambda run: write_timeline(Timeline(run, None), io.BytesIO()),
    "tables": lambda run: list(TableRows(run).rows()),
}


def damaged(folder: Path, kind: str, *path: str | int, value: Any) -> Path:
    """Two rounds of one prompt; in the first record of a kind one value is another."""
    (file,) = two_rounds().write(folder).glob("*.trace.jsonl")
    write_manifest(folder)
    lines = []
    done = False
    for line in file.read_text().splitlines():
        record = json.loads(line)
        if record["type"] == kind and not done:
            place = record
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value
            done = True
        lines.append(json.dumps(record))
    assert done
    file.write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("engine", ("groups", 0, "block_size"), 0),
        ("engine", ("groups", 0, "block_size"), -1),
        ("engine", ("hash_block_size",), 0),
        ("worker", ("kernel_block_sizes",), [0]),
        ("worker", ("kernel_block_sizes",), [-5]),
        ("forward", ("num_reqs",), 10**9),
        ("forward", ("num_reqs",), -1),
        ("forward", ("groups", 0, "num_slot_padding"), 10**10),
        ("forward", ("groups", 0, "num_actual_tokens"), -(10**18)),
        ("forward", ("groups", 0, "seq_lens"), [10**12]),
        ("forward", ("groups", 0, "block_table"), [[0, 0, [1, 1 << 40]]]),
        ("forward", ("groups", 0, "block_table"), [[0, 9, [1, 1]]]),
        ("forward", ("forward_ns",), 10**400),
        ("schedule", ("num_scheduled_tokens",), [10**12]),
        ("schedule", ("admitted", 0, "hit_tokens"), -100),
        ("schedule", ("scheduled",), [7]),
        ("request", ("num_prompt_tokens",), 10**12),
        ("request", ("request",), 99),
    ],
)
def test_an_impossible_number_is_refused_in_every_view(
    tmp_path: Path, kind: str, path: tuple[str | int, ...], value: Any
) -> None:
    folder = damaged(tmp_path / "run", kind, *path, value=value)
    names = ("steps", "check", "summary", "totals", "requests", "blocks", "evictions", "two runs")
    for view in names:
        with pytest.raises(BadTraceError):
            VIEWS[view](Run(folder))


def test_a_vector_that_is_none_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    folder = damaged(tmp_path / "run", "forward", "groups", 0, "slot_mapping", value=[1, 2, 3])
    for view in ("step", "rounds", "check", "totals"):
        with pytest.raises(BadTraceError, match="runs need pairs"):
            VIEWS[view](Run(folder))


def test_a_pipe_with_the_name_of_a_rank_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    import os

    folder = two_rounds().write(tmp_path / "run")
    os.mkfifo(folder / "x.trace.jsonl")
    with pytest.raises(BadTraceError, match="is no regular file"):
        Run(folder)


def test_a_run_without_its_schedulers_file_has_no_totals_of_zero(tmp_path: Path) -> None:
    recording = two_rounds()
    kinds = {"Header", "WorkerSource", "ForwardStep", "End"}
    recording.records[:] = [one for one in recording.records if type(one).__name__ in kinds]
    run = Run(recording.write(tmp_path / "run"))
    with pytest.raises(BadTraceError, match="has no scheduler's records"):
        summarize(run)
