"""Invariant 4: the batch that the worker ran is the batch that the scheduler asked for."""

from collections.abc import Iterator, Mapping, Sequence

from omnicache_cli.trace.steps import ForwardView, GroupView, ScheduledRequest

Finding = tuple[int | None, str | None, str, str, str]
"""Row, request, what, expected, found."""


def is_padded(view: ForwardView) -> bool:
    """A full CUDA graph: the attention metadata has the padded shape of the batch descriptor."""
    return view.record.cudagraph_mode == "FULL" and view.record.batch_descriptor is not None


def wrong_rows(
    view: ForwardView,
    names: Sequence[tuple[str, ScheduledRequest | None]],
    scheduled: Mapping[str, ScheduledRequest],
) -> Iterator[Finding]:
    """Rows against the scheduler's requests, joined by vLLM's internal request id."""
    num_reqs = view.record.num_reqs
    if len(names) != num_reqs:
        yield None, None, "requests named by the batch", f"num_reqs {num_reqs}", str(len(names))
    for row, (name, request) in enumerate(names):
        if request is None:
            yield row, name, "request of the row", "a request of this step", name
    missing = scheduled.keys() - set(view.request_ids)
    for request_id, one in scheduled.items():
        if request_id in missing:
            what = f"row of request #{one.request.number}"
            yield None, one.request.external_id, what, "one row", "none"


def wrong_group(
    view: ForwardView,
    group: GroupView,
    names: Sequence[tuple[str, ScheduledRequest | None]],
) -> Iterator[Finding]:
    """One group's shape and vectors. Vectors that are group 0's own are checked there."""
    num_reqs = view.record.num_reqs
    allowed = {num_reqs}
    descriptor = view.record.batch_descriptor
    if is_padded(view) and descriptor is not None and descriptor.num_reqs is not None:
        allowed.add(descriptor.num_reqs)
    rows_wanted = " or ".join(f"{rows}" for rows in sorted(allowed)) + " rows (num_reqs)"
    own = group.record
    if own.table_shape is not None and own.table_shape[0] not in allowed:
        yield None, None, "rows of block_table", rows_wanted, str(own.table_shape[0])
    if own.query_start_loc is not None or group.group == 0:
        starts = group.query_start_loc
        if starts is not None:
            if len(starts) - 1 not in allowed:
                found = str(len(starts) - 1)
                yield None, None, "len(query_start_loc) - 1", rows_wanted, found
            yield from _wrong_starts(starts, names)
    if (own.seq_lens is not None or group.group == 0) and group.seq_lens is not None:
        if len(group.seq_lens) not in allowed:
            yield None, None, "len(seq_lens)", rows_wanted, str(len(group.seq_lens))
        yield from _wrong_seq_lens(group.seq_lens, names)
    yield from _wrong_totals(view, group, names)


def _wrong_starts(
    starts: Sequence[int], names: Sequence[tuple[str, ScheduledRequest | None]]
) -> Iterator[Finding]:
    if starts and starts[0] != 0:
        yield None, None, "query_start_loc[0]", "0", str(starts[0])
    for row, (name, one) in enumerate(names[: len(starts) - 1]):
        found = starts[row + 1] - starts[row]
        if one is not None and found != one.num_scheduled_tokens:
            what = f"query_start_loc[{row + 1}] - query_start_loc[{row}]"
            yield row, name, what, f"{one.num_scheduled_tokens} scheduled tokens", str(found)


def _wrong_seq_lens(
    seq_lens: Sequence[int], names: Sequence[tuple[str, ScheduledRequest | None]]
) -> Iterator[Finding]:
    for row, ((name, one), found) in enumerate(zip(names, seq_lens, strict=False)):
        if one is None:
            continue
        expected = one.num_computed_tokens + one.num_scheduled_tokens
        if found != expected:
            words = (
                f"{expected} = {one.num_computed_tokens} computed"
                f" + {one.num_scheduled_tokens} scheduled"
            )
            yield row, name, f"seq_lens[{row}]", words, str(found)


def _wrong_totals(
    view: ForwardView,
    group: GroupView,
    names: Sequence[tuple[str, ScheduledRequest | None]],
) -> Iterator[Finding]:
    tokens = [one.num_scheduled_tokens for _, one in names if one is not None]
    if not tokens or len(tokens) != len(names):
        return  # named row by row already
    descriptor = view.record.batch_descriptor
    padded = descriptor.num_tokens if is_padded(view) and descriptor is not None else None
    total = sum(tokens)
    found = group.num_actual_tokens
    if found is not None and found not in {total, padded}:
        yield None, None, "num_actual_tokens", f"{total} scheduled tokens", str(found)
    found = group.max_query_len
    if found is not None and found != max(tokens) and (padded is None or found < max(tokens)):
        yield None, None, "max_query_len", str(max(tokens)), str(found)
    longest = max(
        one.num_computed_tokens + one.num_scheduled_tokens for _, one in names if one is not None
    )
    found = group.max_seq_len
    if found is not None and found < longest:
        yield None, None, "max_seq_len", f"{longest} or more", str(found)
