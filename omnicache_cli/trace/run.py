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
from omnicache_cli.trace.files import SUFFIX, rank_files, read_header, read_records
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
    _instants: list[int] = field(default_factory=list)  # of the events that `_between` gave last
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
        step.after_ns = self._instants
        self.state.forget(record.events)
        self.state.forget(step.after)
        for view in sorted(self.forwards.pop(record.step, []), key=lambda view: view.worker.rank):
            if isinstance(view, RankView):
                step.ranks.append(view)
            else:
                step.forwards.append(view)
        return step

    def drain(self) -> list[AnyEvent]:
        """Events after the last step, or of a run where no step was recorded."""
        events = self._between()
        self.state.forget(events)
        return events

    def _between(self) -> list[AnyEvent]:
        """Apply all that comes before the next step."""
        events: list[AnyEvent] = []
        self._instants = []
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
                self._instants += [record.at_ns] * len(record.events)
            elif isinstance(record, EngineSource):  # told again after a lost record
                self.state = SchedulerState(record)
                self.state.lossy = True
            else:
                self._gap = True
                self.state.lossy = True
        return events


class Run:
    """A run folder, read once from front to back.

    `files`, `unjoined_forwards` and `never_scheduled_on` are complete once `steps()` has ended.
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
        self.after_last: list[AnyEvent] = []  # events that follow no step
        self.never_scheduled_on: dict[str, list[Request]] = {}  # by engine: after its last step
        self.files: list[RankFile] = []
        self._declared_in: dict[str | int, RankFile] = {}  # engines by name, workers by identity
        for path in rank_files(folder):
            self.files.append(RankFile(path, read_header(path)))
        if not self.files:
            raise BadTraceError(_why_empty(folder, self.manifest))

    @property
    def vllm_version(self) -> str | None:
        return self.files[0].header.vllm_version

    @property
    def never_scheduled(self) -> list[Request]:
        """Requests that arrived after the last step of their engine."""
        return [request for mine in self.never_scheduled_on.values() for request in mine]

    @property
    def dropped(self) -> int:
        """Records that could not be written."""
        return sum(max(one.dropped, one.end.dropped if one.end else 0) for one in self.files)

    def file_of(self, source: EngineSource | WorkerSource) -> RankFile:
        """The file whose clock the records of this source go by; it has been read."""
        return self._declared_in[source.engine if isinstance(source, EngineSource) else id(source)]

    def declare(self, file: RankFile, source: EngineSource | WorkerSource) -> None:
        """Keep a source that was met for the first time, and where."""
        if isinstance(source, EngineSource):
            self.engines[source.engine] = source
            self._declared_in[source.engine] = file
        else:
            self.workers.append(source)
            self._declared_in[id(source)] = file

    def records(self) -> Iterator[tuple[RankFile, AnyRecord]]:
        """All records, the file that lags first, so that no file runs far ahead."""
        for one in self.files:  # read again: in the same order, and nothing is counted twice
            one.end, one.dropped, one.last_step, one.exhausted = None, 0, -1, False
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

    def steps(self) -> Iterator[Step]:
        """Engine steps in order; those of several engines interleaved."""
        merge = _Merge(self)
        for file, record in self.records():
            engine = merge.take(file, record)
            while engine is not None and engine.ready():
                yield engine.pop()
        for name, engine in merge.engines.items():
            while engine.steps:
                yield engine.pop()
            self.after_last += engine.drain()
            self.never_scheduled_on[name] = engine.arrived
        self.unjoined_forwards += merge.num_waiting()


class _Merge:
    """Hands every record to the engine that it belongs to."""

    def __init__(self, run: Run) -> None:
        self.engines: dict[str, _Engine] = {}
        self._run = run
        self._by_source: dict[tuple[int, int], _Engine] = {}
        self._workers: dict[tuple[int, int], WorkerState] = {}
        self._forwards: defaultdict[str | None, dict[int, list[ForwardView | RankView]]]
        self._forwards = defaultdict(dict)

    def take(self, file: RankFile, record: AnyRecord) -> _Engine | None:
        """The engine that this record may have completed a step of."""
        match record:
            case EngineSource():
                return self._declare(file, record)
            case WorkerSource():
                self._workers[id(file), record.source] = WorkerState(record)
                self._run.declare(file, record)
            case ForwardStep() | RankStep():
                return self._forward(file, record)
            case RequestRecord() | AfterStep() | SchedulerStep():
                engine = self._by_source.get((id(file), record.source))
                if engine is None and not file.dropped:
                    raise _undeclared(file, record.source)
                if engine is not None:
                    engine.queue.append(record)
                    if isinstance(record, SchedulerStep):
                        engine.steps.append(record)
                return engine
            case Gap():
                for (owner, _), engine in self._by_source.items():
                    if owner == id(file):
                        engine.queue.append(record)
        return None

    def num_waiting(self) -> int:
        """Forward passes whose step never came."""
        return sum(len(one) for mine in self._forwards.values() for one in mine.values())

    def _declare(self, file: RankFile, record: EngineSource) -> _Engine:
        engine = self.engines.get(record.engine)
        if engine is not None:  # told again after a lost record
            engine.queue.append(record)
            return engine
        engine = _Engine(SchedulerState(record), self._forwards[record.engine])
        self.engines[record.engine] = self._by_source[id(file), record.source] = engine
        self._run.declare(file, record)
        return engine

    def _forward(self, file: RankFile, record: ForwardStep | RankStep) -> _Engine | None:
        worker = self._workers.get((id(file), record.source))
        if worker is None and not file.dropped:
            raise _undeclared(file, record.source)
        if worker is None or record.step < 0:
            self._run.unjoined_forwards += 1
            return None
        view: ForwardView | RankView = (
            worker.step(record)
            if isinstance(record, ForwardStep)
            else RankView(worker.source, record)
        )
        waiting = self._forwards[worker.source.engine]
        waiting.setdefault(record.step, []).append(view)
        if len(waiting) > 2 * MAX_STEPS_APART:  # its scheduler's records never came
            self._run.unjoined_forwards += len(waiting.pop(min(waiting)))
        return self.engines.get(worker.source.engine or "")


def missing_parts(run: Run) -> list[str]:
    """What a run that was read to its end lacks, a line each."""
    lines = [
        f"{run.folder}: {file.path.name} has no end record: its process was stopped, or is still "
        "running; what it did later is not there"
        for file in run.files
        if file.exhausted and file.end is None
    ]
    if run.dropped:
        lines.append(f"{run.folder}: {run.dropped:,} records could not be written")
    return lines


def without_scheduler(run: Run) -> BadTraceError:
    """Why a run that was read to its end says nothing of a cache."""
    return BadTraceError(
        f"{run.folder} has no scheduler's records: the file of that process is missing, or ends "
        "before its first one; record the run again"
    )


def _why_empty(folder: Path, manifest: Manifest | None) -> str:
    if manifest is None:
        return f"{folder} is not a run folder: it holds no *{SUFFIX} file; name one of trace -o"
    if manifest.shell_code:
        return (
            f"{folder} holds no step: {manifest.program} ended with exit code "
            f"{manifest.shell_code} before any engine was traced; mend it, and record it again"
        )
    if manifest.layout == "command":
        return (
            f"{folder} holds no step: {manifest.program} started no traced vLLM engine; "
            "omnicache-cli must be installed beside that vLLM"
        )
    ended = f" ({manifest.error})" if manifest.error else ""
    return f"{folder} holds no step: the run ended before its first one{ended}; record it again"


def _undeclared(file: RankFile, source: int) -> BadTraceError:
    return BadTraceError(
        f"{file.path} has a record of source {source}, which no record before it declares; the "
        "trace is damaged, record it again"
    )
