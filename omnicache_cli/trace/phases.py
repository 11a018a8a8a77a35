"""The phases of a step and what each of them took, as the records say. See docs/phases.md.

Phases do not overlap, with one exception: `lookup` and `allocate` lie inside `schedule`. What a
tensor cache did inside `prepare` or `sample` counts as `save`, `restore` or `copy`, not as theirs.
"""

from collections.abc import Iterable

from omnicache_cli.trace.records import ForwardStep, RankStep, SchedulerStep
from omnicache_cli.trace.steps import Step

PHASES = (
    *("schedule", "lookup", "allocate", "prepare", "forward", "sample", "output"),
    *("save", "restore", "copy"),
)

OF_SCHEDULER = ("schedule", "lookup", "allocate", "output")
OF_WORKER = ("prepare", "forward", "sample", "save", "restore", "copy")
TENSOR_PHASES = ("save", "restore", "copy")
ALWAYS_RECORDED = frozenset({"schedule", "prepare", "forward", "sample"})
"""By every version that wrote schema 1; the others came later or happen in few runs."""

INSIDE = {"lookup": "schedule", "allocate": "schedule"}
"""Phases that are a part of another one."""

Times = dict[str, int | None]
"""Phase -> nanoseconds; None: not recorded, or the step had no such phase."""


def scheduler_times(record: SchedulerStep) -> Times:
    return {
        "schedule": record.schedule_ns,
        "lookup": record.lookup_ns,
        "allocate": record.allocate_ns,
        "output": record.output_ns,
    }


def worker_times(record: ForwardStep | RankStep) -> Times:
    sample = record.sample_ns
    return {
        "prepare": record.prepare_ns - (record.prepare_tensor_ns or 0),
        "forward": record.forward_ns,
        "sample": None if sample is None else sample - (record.sample_tensor_ns or 0),
        "save": record.save_ns,
        "restore": record.restore_ns,
        "copy": record.copy_ns,
    }


def worker_records(step: Step) -> list[ForwardStep | RankStep]:
    """Of every rank that recorded the step."""
    return [*(view.record for view in step.forwards), *(view.record for view in step.ranks)]


def step_times(step: Step) -> Times:
    """Every phase of a step; of several ranks the slowest one's, for the step waits for it."""
    ranks = [worker_times(record) for record in worker_records(step)]
    return scheduler_times(step.record) | {
        phase: longest(times[phase] for times in ranks) for phase in OF_WORKER
    }


def longest(durations: Iterable[int | None]) -> int | None:
    """None: nobody has this phase."""
    return max((one for one in durations if one is not None), default=None)


def step_ns(record: SchedulerStep) -> int | None:
    """From the beginning of `schedule()` to the end of `update_from_output`; None: not recorded."""
    if record.output_start_ns is None or record.output_ns is None:
        return None
    return record.output_start_ns + record.output_ns - record.start_ns
