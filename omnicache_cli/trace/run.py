"""A run folder: the files of all its processes, merged into steps.

Owns the join of scheduler and workers. Memory is bounded by the live requests and by how far the
files run apart, not by the length of the trace. It does not judge what it reads: see
`invariants`.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.files import SUFFIX, rank_files, read_records
from omnicache_cli.trace.manifest import Manifest, read_manifest
from omnicache_cli.trace.records import (
    AfterStep,
    AnyEvent,
    AnyRecord,
    End,
    EngineSource,
    ForwardStep,
    Gap,
    Header,
    RankStep,
    RequestRecord,
    SchedulerStep,
    WorkerSource,
)
from omnicache_cli.trace.steps import (
    ForwardView,
    RankView,
    Request,
    SchedulerState,
    Step,
    WorkerState,
)

MAX_STEPS_APART = 1024
"""Steps that the reader waits for a worker's record before it goes on without."""


@dataclass(slots=True)
class RankFile:
    """One file of the run and what is known of it so far; complete once `steps()` has ended."""

    path: Path
    header: Header
    end: End | None = None  # None: the process was cut short, or the file is not read yet
    dropped: int = 0
    last_step: int = -1
    exhausted: bool = False


@dataclass(slots=True)
class _Engine:
    """One scheduler's records that wait for their workers."""

    state: SchedulerState
    forwards: dict[int, list[ForwardView | RankView]]  # by step, of all ranks
    queue: deque[RequestRecord | AfterStep | SchedulerStep | Gap | EngineSource] = field(
        default_factory=deque
    )
    steps: deque[SchedulerStep] = field(default_factory=deque)  # those of the queue
    arrived: list[Request] = field(default_factory=list)  # since the last step
    _gap: bool = False  # records were lost since the last step
    _num_arrived: int = 0

    @property
    def num_workers(self) -> int:
        return self.state.source.parallel.get("world_size", 1)

    def ready(self) -> bool:
        """The oldest step has all its ranks, and the step behind it has come."""
        if len(self.steps) > MAX_STEPS_APART:
            return True
        arrived = self.forwards.get(self.steps[0].step, []) if self.steps else []
        return len(self.steps) > 1 and len(arrived) >= self.num_workers

    def pop(self) -> Step:
        """The oldest step, with the events that follow it. Needs a step in the queue."""
        before = self._between()
        record = self.queue.popleft()
        assert isinstance(record, SchedulerStep)
        self.steps.popleft()
        step = self.state.step(record)
        step.before, step.arrived, step.gap = before, self.arrived, self._gap
        self.arrived, self._gap = [], False
        step.after = self._between()
        self.state.forget(record.events)
        self.state.forget(step.after)
        for view in sorted(self.forwards.pop(record.step, []), key=lambda view: view.worker.rank):
            if isinstance(view, RankView):
                step.ranks.append(view)
            else:
                step.forwards.append(view)
        return step

    def drain(self) -> None:
        """Read what follows the last step, or stands alone where no step was recorded."""
        self.state.forget(self._between())

    def _between(self) -> list[AnyEvent]:
        """Apply all that comes before the next step."""
        events: list[AnyEvent] = []
        while self.queue and not isinstance(record := self.queue[0], SchedulerStep):
            self.queue.popleft()
            if isinstance(record, RequestRecord):
                request = self.state.add_request(record)
                if request.number >= self._num_arrived:  # else told again after a lost record
                    self._num_arrived = request.number + 1
                    self.arrived.append(request)
            elif isinstance(record, AfterStep):
                self.state.apply(record.events)
                events += record.events
            elif isinstance(record, EngineSource):  # told again after a lost record
                self.state = SchedulerState(record)
            else:
                self._gap = True
        return events


class Run:
    """A run folder, read once from front to back.

    `files`, `unjoined_forwards` and `never_scheduled` are complete once `steps()` has ended.
    """

    def __init__(self, folder: Path) -> None:
        """Read the manifest and every header. BadTraceError: not a run folder."""
        if not folder.is_dir():
            raise BadTraceError(
                f"{folder} is not a run folder; name the folder given to `omnicache trace -o`"
            )
        self.folder = folder
        self.manifest: Manifest | None = read_manifest(folder)
        self.engines: dict[str, EngineSource] = {}
        self.workers: list[WorkerSource] = []
        self.unjoined_forwards = 0  # forward passes whose step carried no mark
        self.never_scheduled: list[Request] = []  # arrived after the last step
        self.files: list[RankFile] = []
        for path in rank_files(folder):
            header = next(read_records(path))
            assert isinstance(header, Header)
            self.files.append(RankFile(path, header))
        if not self.files:
            raise BadTraceError(
                f"{folder} holds no *{SUFFIX} file: no process wrote a trace; check that the "
                "command starts a vLLM engine"
            )

    @property
    def vllm_version(self) -> str | None:
        return self.files[0].header.vllm_version

    @property
    def dropped(self) -> int:
        """Records that could not be written."""
        return sum(max(one.dropped, one.end.dropped if one.end else 0) for one in self.files)

    def records(self) -> Iterator[tuple[RankFile, AnyRecord]]:
        """All records, the file that lags first, so that no file runs far ahead."""
        streams = {id(one): read_records(one.path) for one in self.files}
        waiting = list(self.files)
        while waiting:
            current = min(waiting, key=lambda one: one.last_step)
            for record in streams[id(current)]:
                yield current, record
                if isinstance(record, SchedulerStep | ForwardStep | RankStep):
                    current.last_step = max(current.last_step, record.step)
                    if len(waiting) > 1:
                        break
                elif isinstance(record, Gap):
                    current.dropped += record.dropped
                elif isinstance(record, End):
                    current.end = record
            else:
                current.exhausted = True
                waiting.remove(current)

    def steps(self) -> Iterator[Step]:  # noqa: PLR0912  one branch per type of record
        """Engine steps in order; those of several engines interleaved."""
        engines: dict[str, _Engine] = {}
        by_source: dict[tuple[int, int], _Engine] = {}
        forwards: defaultdict[str | None, dict[int, list[ForwardView | RankView]]]
        forwards = defaultdict(dict)
        workers: dict[tuple[int, int], WorkerState] = {}
        for file, record in self.records():
            engine: _Engine | None = None
            if isinstance(record, EngineSource) and record.engine in engines:
                engines[record.engine].queue.append(record)
            elif isinstance(record, EngineSource):
                engine = _Engine(SchedulerState(record), forwards[record.engine])
                engines[record.engine] = by_source[id(file), record.source] = engine
                self.engines[record.engine] = record
            elif isinstance(record, WorkerSource):
                workers[id(file), record.source] = WorkerState(record)
                self.workers.append(record)
            elif isinstance(record, ForwardStep | RankStep):
                worker = workers.get((id(file), record.source))
                if worker is None:
                    raise _undeclared(file, record.source)
                view: ForwardView | RankView = (
                    worker.step(record)
                    if isinstance(record, ForwardStep)
                    else RankView(worker.source, record)
                )
                if record.step < 0:
                    self.unjoined_forwards += 1
                    continue
                mine = forwards[worker.source.engine]
                mine.setdefault(record.step, []).append(view)
                if len(mine) > 2 * MAX_STEPS_APART:  # its scheduler's records never came
                    self.unjoined_forwards += len(mine.pop(min(mine)))
                engine = engines.get(worker.source.engine or "")
            elif isinstance(record, RequestRecord | AfterStep | SchedulerStep):
                engine = by_source.get((id(file), record.source))
                if engine is None:
                    raise _undeclared(file, record.source)
                engine.queue.append(record)
                if isinstance(record, SchedulerStep):
                    engine.steps.append(record)
            elif isinstance(record, Gap):
                for (owner, _), one in by_source.items():
                    if owner == id(file):
                        one.queue.append(record)
            while engine is not None and engine.ready():
                yield engine.pop()
        for engine in engines.values():
            while engine.steps:
                yield engine.pop()
            engine.drain()
            self.never_scheduled += engine.arrived
        self.unjoined_forwards += sum(
            len(one) for mine in forwards.values() for one in mine.values()
        )


def _undeclared(file: RankFile, source: int) -> BadTraceError:
    return BadTraceError(
        f"{file.path} has a record of source {source}, which no record before it declares; the "
        "trace is damaged, record it again"
    )
