"""The tracks of a timeline: a process per file of the run, a thread per scheduler and runner.

Process numbers are the real ones where they name one process of the run only; where a number was
used again, or two machines have it, the later file gets one that is free. Threads get small
numbers of their own, since the records do not say in which thread they were made.
"""

from collections.abc import Iterable, Iterator

from omnicache_cli.export.event import Args, TraceEvent
from omnicache_cli.trace.records import EngineSource, Header, WorkerSource
from omnicache_cli.trace.run import RankFile, Run


class Tracks:
    """Gives out process and thread numbers, and the metadata events that name them."""

    def __init__(self, files: Iterable[RankFile]) -> None:
        """Number the processes of these files, in their order."""
        self.metadata: list[TraceEvent] = []  # not written yet
        self._pids: dict[str, int] = {}  # by file name
        self._taken: set[int] = set()
        self._headers: dict[str, Header] = {}
        self._tids: dict[tuple[int, object], int] = {}
        self._num_threads: dict[int, int] = {}
        for file in files:
            header = file.header
            self._headers[file.path.name] = header
            label = f"{header.process} ({header.host}, pid {header.pid})"
            self._pids[file.path.name] = self._new_process(header.pid, label)

    def process_of(self, file: RankFile) -> int:
        return self._pids[file.path.name]

    def sampled_process(self, host: str, pid: int, role: str, ended_unix_ns: int) -> int:
        """The process that was sampled: that of a file, the last one that had begun by the end of
        the sampling where the number was used again; or one of its own that wrote no file."""
        found = [
            (header.started_unix_ns, name)
            for name, header in self._headers.items()
            if (header.host, header.pid) == (host, pid)
        ]
        begun = [one for one in found if one[0] <= ended_unix_ns]
        if begun:
            return self._pids[max(begun)[1]]
        return self._new_process(pid, f"{role} ({host}, pid {pid})")

    def thread(self, pid: int, key: object, name: str) -> int:
        """The number of one thread of a process; its metadata when it is asked for first."""
        tid = self._tids.get((pid, key))
        if tid is None:
            tid = self._num_threads[pid] = self._num_threads[pid] + 1
            self._tids[pid, key] = tid
            self.metadata += [
                TraceEvent("M", pid, tid, name="thread_name", args={"name": name}),
                TraceEvent("M", pid, tid, name="thread_sort_index", args={"sort_index": tid}),
            ]
        return tid

    def scheduler(self, run: Run, engine: EngineSource) -> tuple[int, int]:
        """Process and thread of a scheduler."""
        pid = self.process_of(run.file_of(engine))
        stage = "" if engine.stage is None else f", stage {engine.stage_id} {engine.stage}"
        return pid, self.thread(pid, engine.engine, f"scheduler {engine.engine}{stage}")

    def runner(self, run: Run, worker: WorkerSource) -> tuple[int, int]:
        """Process and thread of a model runner."""
        file = run.file_of(worker)
        pid = self.process_of(file)
        name = f"model runner, rank {worker.rank} of {worker.engine} on {worker.device}"
        return pid, self.thread(pid, (file.path.name, worker.source), name)

    def take_metadata(self) -> Iterator[TraceEvent]:
        """What names tracks that were given out since the last time."""
        yield from self.metadata
        self.metadata = []

    def _new_process(self, wanted: int, label: str) -> int:
        pid = wanted if wanted not in self._taken else max(self._taken) + 1
        self._taken.add(pid)
        self._num_threads[pid] = 0
        order: Args = {"sort_index": len(self._taken)}
        self.metadata += [
            TraceEvent("M", pid, name="process_name", args={"name": label}),
            TraceEvent("M", pid, name="process_sort_index", args=order),
        ]
        return pid
