"""Follows one vLLM model runner: one record a forward pass.

Nothing here waits for a kernel. The first tensor-parallel rank of a stage writes its batch in
full. The others write a digest of theirs, and in full where it differs from the first rank's.
How a batch is read, this module does not know: see `live` for GPUModelRunner (the CPU's runner is
one) and `live_v2` for Model Runner V2.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnicache_cli.engine.probe.batch import BatchEncoder, DeviceCopies, group_records
from omnicache_cli.engine.probe.digest_board import DigestBoard, DigestReader
from omnicache_cli.engine.probe.live import (
    Layout,
    LiveBatch,
    LiveGroup,
    digest_of,
    layout_of,
    parallel_group,
    worker_source,
)
from omnicache_cli.engine.probe.recorder import Recorder
from omnicache_cli.engine.probe.scheduler import STEP_ATTRIBUTE
from omnicache_cli.trace.records import ForwardStep, RankStep

_OF_EVERY_RANK = (
    *("source", "step", "start_ns", "prepare_ns", "forward_ns", "sample_ns", "sample_start_ns"),
    *("save_ns", "restore_ns", "copy_ns", "prepare_tensor_ns", "sample_tensor_ns"),
)
"""Fields of ForwardStep that RankStep has too."""


class Running(threading.local):
    """The runner that is inside `execute_model` or `sample_tokens`, on this thread."""

    probe: "RunnerProbe | None" = None
    inner_ns: int = 0  # in calls of a tensor cache inside the one that runs


running = Running()


class RunnerProbe:
    """State of one traced model runner. Its methods are called by the wrappers in `hooks`."""

    def __init__(
        self,
        recorder: Recorder,
        runner: Any,
        layout: Callable[[Any, dict[str, Any]], Layout] = layout_of,
    ) -> None:
        self.recorder = recorder
        self.busy = False  # inside execute_model or sample_tokens
        self.forwarding = False  # inside _model_forward
        self.mark: tuple[str, int] | None = None  # engine and step of the current SchedulerOutput
        self.started = 0
        self._runner = runner
        self._layout = layout
        self._source: int | None = None
        self._encoder = BatchEncoder()
        self._copies = DeviceCopies(int(runner.max_num_tokens))
        self._board: DigestBoard | None = None  # of a first rank that has others beside it
        self._first_rank: DigestReader | None = None  # of the others
        self._seen: tuple[str, list[str], list[LiveGroup]] | None = None  # digest and batch
        self._pending: dict[str, Any] | None = None  # fields of the record of this step
        self._tensor: dict[str, int] = {}  # its times in a tensor cache, by field
        self._tensor_ns = 0  # of it: since execute_model or sample_tokens began
        self._generation = recorder.generation
        recorder.on_close.append(self._close)

    def begin(self, scheduler_output: Any, now: int) -> None:
        """execute_model starts."""
        self._write_pending()
        self._tensor = {}
        self._tensor_ns = 0
        self.mark = getattr(scheduler_output, STEP_ATTRIBUTE, None)
        self.started = now
        for request_id in scheduler_output.finished_req_ids:
            self._encoder.forget(request_id)

    def forward(self, batch: LiveBatch, now: int) -> None:
        """The model is about to be called with this batch."""
        if self._source is None or self._generation != self.recorder.generation:
            self._declare(batch.metadata)
            if self._generation != self.recorder.generation:
                return  # the declaration was lost: without it nobody could read this step
        if self._tensor_ns:
            self._tensor["prepare_tensor_ns"] = self._tensor_ns
        request_ids, live = batch.request_ids, batch.groups
        step = self.mark[1] if self.mark else -1
        self._copies.start(live)
        pending: dict[str, Any] = {
            "source": self._source,
            "step": step,
            "start_ns": self.recorder.since_start(self.started),
            "prepare_ns": now - self.started,
            "forward_ns": 0,
            "sample_ns": None,
            "batch_descriptor": batch.descriptor,
            "cudagraph_mode": batch.cudagraph_mode,
            "num_ubatches": batch.num_ubatches,
            "shared_buffers": batch.shared_buffers,
        }
        if self._first_rank is not None:
            digest = digest_of(request_ids, live)
            self._seen = digest, list(request_ids), [group.copied() for group in live]
        else:
            if self._board is not None:
                self._board.publish(step, digest_of(request_ids, live))
            pending |= self._encoder.fields(request_ids, live)
        self._pending = pending

    def forward_done(self, duration_ns: int) -> None:
        if self._pending is not None:
            self._pending["forward_ns"] = duration_ns

    def execute_done(self, *, sampled_later: bool) -> None:
        """execute_model returned; without a later sample_tokens the record is whole."""
        if not sampled_later and not self._must_wait():
            self._write_pending()

    def sample_begins(self) -> None:
        self._tensor_ns = 0

    def sample_done(self, started: int, ended: int) -> None:
        if self._pending is not None:
            self._pending["sample_start_ns"] = self.recorder.since_start(started)
            self._pending["sample_ns"] = ended - started
            if self._tensor_ns:
                self._tensor["sample_tensor_ns"] = self._tensor_ns
            if not self._must_wait():
                self._write_pending()

    def add_tensor_time(self, phase: str, duration_ns: int) -> None:
        """A call of a tensor cache has ended, which is none of another one's."""
        name = f"{phase}_ns"
        self._tensor[name] = self._tensor.get(name, 0) + duration_ns
        self._tensor_ns += duration_ns

    def _must_wait(self) -> bool:
        """The record is kept until the next step: for copies, or for the first rank's digest."""
        if self._copies:
            return True
        if self._first_rank is None or self._pending is None:
            return False
        return self._first_rank.digest_of(self._pending["step"]) is None

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, None
        seen, self._seen = self._seen, None
        encoder = self._encoder
        if pending is None:
            return
        pending |= self._tensor
        if self._first_rank is not None and seen is not None:
            digest, request_ids, live = seen
            expected = self._first_rank.digest_of(pending["step"])
            if expected in (None, digest):
                times = {name: pending[name] for name in _OF_EVERY_RANK if name in pending}
                self.recorder.write(RankStep(**times, digest=digest))
                return
            encoder = BatchEncoder()
            pending |= encoder.fields(request_ids, live)
            pending["restated"] = True
        self._copies.take(pending, encoder)
        pending["groups"] = group_records(pending["groups"])
        self.recorder.write(ForwardStep(**pending))

    def _declare(self, metadata: dict[str, Any]) -> None:
        """Say who this is, at the first step and again after a lost record."""
        if self._source is None:
            self._source = self.recorder.new_source()
            self._join_ranks()
        self._generation = self.recorder.generation
        self._encoder = BatchEncoder()
        engine = self.mark[0] if self.mark else None
        layout = self._layout(self._runner, metadata)
        self.recorder.write(
            worker_source(self._runner, layout, metadata, source=self._source, engine=engine)
        )

    def _join_ranks(self) -> None:
        """Take this rank's side of the board, where the stage has several ranks."""
        ranks = parallel_group("get_tp_group")
        if ranks.world_size == 1 or self.mark is None or self.recorder.settings.all_ranks:
            return
        place = (
            Path(self.recorder.settings.folder),
            self.mark[0],
            int(parallel_group("get_pp_group").rank_in_group),
        )
        if ranks.rank_in_group > 0:
            self._first_rank = DigestReader(*place)
            return
        try:
            self._board = DigestBoard(*place)
        except OSError as error:  # the others write digests, which are compared on reading
            self.recorder.note_error("digest board", error)

    def _close(self) -> None:
        self._write_pending()
        for side in (self._board, self._first_rank):
            if side is not None:
                side.close()
