"""The rows of one forward pass, and the slots that each of them wrote, as runs.

A run is (first slot, number of slots). Knows the records, judges nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from omnicache_cli.trace.records import MAX_VECTOR_LENGTH, Runs, from_runs
from omnicache_cli.trace.steps import ForwardView, GroupView, ScheduledRequest

SlotRuns = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Row:
    """One request's row: tokens [first_token, end_token) of the batch's flat vectors."""

    number: int
    name: str  # external id
    scheduled: ScheduledRequest | None  # None: the step does not schedule this request
    first_token: int
    end_token: int
    first_position: int  # position of first_token in its request

    @property
    def end_position(self) -> int:
        return self.first_position + self.end_token - self.first_token


def rows_of(
    view: ForwardView, group: GroupView, names: Sequence[tuple[str, ScheduledRequest | None]]
) -> list[Row] | None:
    """The real rows of a group by its live vectors; None where those were not read.

    Positions come from seq_lens and query_start_loc, so that a wrong block table shows.
    """
    starts, seq_lens = group.query_start_loc, group.seq_lens
    if starts is None or seq_lens is None:
        return None
    rows = []
    for number in range(min(view.record.num_reqs, len(starts) - 1, len(seq_lens), len(names))):
        first, end = starts[number], starts[number + 1]
        name, scheduled = names[number]
        if 0 <= first < end <= first + seq_lens[number]:
            position = seq_lens[number] - (end - first)
            rows.append(Row(number, name, scheduled, first, end, position))
    return rows


def ascending(runs: Runs) -> Runs:
    """The same vector without runs that count down. BadRunsError: it is no vector."""
    lengths = runs[1::2]
    if len(runs) % 2 == 0 and min(lengths, default=1) > 0 and sum(lengths) <= MAX_VECTOR_LENGTH:
        return runs
    return [part for value in from_runs(runs) for part in (value, 1)]


def split_by_row(runs: Runs, rows: Sequence[Row]) -> list[SlotRuns]:
    """Each row's part of the slot mapping, in as few runs as there can be."""
    parts: list[SlotRuns] = []
    index = 0
    run_token = 0  # token at which run `index` begins
    for row in rows:
        part: SlotRuns = []
        token = row.first_token
        while index and run_token > token:
            index -= 2
            run_token -= runs[index + 1]
        while token < row.end_token and index < len(runs):
            start, length = runs[index], runs[index + 1]
            if run_token + length <= token:
                index += 2
                run_token += length
                continue
            stop = min(row.end_token, run_token + length)
            append_run(part, start + token - run_token, stop - token)
            token = stop
        parts.append(part)
    return parts


def slots_by_table(table: Sequence[int], block_size: int, first: int, end: int) -> SlotRuns:
    """Where positions [first, end) belong by the block table; shorter when it ends before."""
    runs: SlotRuns = []
    position = first
    while position < end:
        column, offset = divmod(position, block_size)
        if column >= len(table):
            break
        stop = min(end, position - offset + block_size)
        append_run(runs, table[column] * block_size + offset, stop - position)
        position = stop
    return runs


def append_run(runs: SlotRuns, start: int, length: int) -> None:
    if runs and sum(runs[-1]) == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + length)
    else:
        runs.append((start, length))


def expand(runs: SlotRuns) -> list[int]:
    return [slot for start, length in runs for slot in range(start, start + length)]


def blocks_under(runs: SlotRuns, block_size: int) -> list[int]:
    """The blocks that these slots lie in, each once, in order; -1 lies in none."""
    blocks: dict[int, None] = {}
    for start, length in runs:
        first = max(start, 0)
        if first < start + length:
            blocks.update(
                dict.fromkeys(range(first // block_size, (start + length - 1) // block_size + 1))
            )
    return list(blocks)
