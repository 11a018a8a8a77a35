"""Follows one vLLM GPUModelRunner (the CPU's runner is one): one record a forward pass.

Nothing here waits for a kernel. The first tensor-parallel rank of a stage writes its batch in
full, the others a digest of it.
"""

from typing import Any

import numpy as np

from omnicache_cli.engine.adapter import plain
from omnicache_cli.engine.probe.device import PinnedCopy
from omnicache_cli.engine.probe.live import (
    LiveGroup,
    digest_of,
    parallel_rank,
    read_groups,
    worker_source,
)
from omnicache_cli.engine.probe.recorder import Recorder
from omnicache_cli.engine.probe.scheduler import STEP_ATTRIBUTE
from omnicache_cli.engine.probe.vectors import TableMirror, encode_slots, starts_of
from omnicache_cli.trace.records import BatchDescriptor, ForwardStep, GroupForward, RankStep


class RunnerProbe:
    """State of one traced model runner. Its methods are called by the wrappers in `hooks`."""

    def __init__(self, recorder: Recorder, runner: Any) -> None:
        self.recorder = recorder
        self.busy = False  # inside execute_model or sample_tokens
        self.forwarding = False  # inside _model_forward
        self.mark: tuple[str, int] | None = None  # engine and step of the current SchedulerOutput
        self.started = 0
        self._runner = runner
        self._source: int | None = None
        self._digest_only = False
        self._names: dict[str, int] = {}  # internal request id -> row name
        self._free_names: list[int] = []
        self._batch: list[str] = []
        self._tables: list[TableMirror] = []
        self._copies: dict[int, PinnedCopy] = {}  # per group, where slots are on a device
        self._pending: dict[str, Any] | None = None  # fields of the record of this step
        self._generation = recorder.generation
        recorder.on_close.append(self._write_pending)

    def begin(self, scheduler_output: Any, now: int) -> None:
        """execute_model starts."""
        self._write_pending()
        self.mark = getattr(scheduler_output, STEP_ATTRIBUTE, None)
        self.started = now
        for request_id in scheduler_output.finished_req_ids:
            name = self._names.pop(request_id, None)
            if name is not None:
                self._free_names.append(name)

    def forward(self, context: Any, now: int) -> None:
        """The model is about to be called: read the forward context."""
        if self._source is None or self._generation != self.recorder.generation:
            self._declare(context)
            if self._generation != self.recorder.generation:
                return  # the declaration was lost: without it nobody could read this step
        batch = self._runner.input_batch
        request_ids = batch.req_ids[: batch.num_reqs]
        microbatched = isinstance(context.attn_metadata, list)
        live = [] if microbatched else read_groups(self._runner, context, batch.num_reqs)
        pending: dict[str, Any] = {
            "source": self._source,
            "step": self.mark[1] if self.mark else -1,
            "start_ns": self.recorder.since_start(self.started),
            "prepare_ns": now - self.started,
            "forward_ns": 0,
            "sample_ns": None,
        }
        if self._digest_only:
            pending["digest"] = digest_of(request_ids, live)
        else:
            pending |= self._batch_fields(request_ids, live)
            pending["batch_descriptor"] = _descriptor(context.batch_descriptor)
            pending["cudagraph_mode"] = context.cudagraph_runtime_mode.name
            if microbatched:
                pending["num_ubatches"] = len(context.attn_metadata)
        self._pending = pending

    def forward_done(self, duration_ns: int) -> None:
        if self._pending is not None:
            self._pending["forward_ns"] = duration_ns

    def execute_done(self, *, sampled_later: bool) -> None:
        """execute_model returned; without a later sample_tokens the record is whole."""
        if not sampled_later and not self._copies:
            self._write_pending()

    def sample_done(self, duration_ns: int) -> None:
        if self._pending is not None:
            self._pending["sample_ns"] = duration_ns
            if not self._copies:  # else it waits for the copies, until the next step at most
                self._write_pending()

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if self._digest_only:
            self.recorder.write(RankStep(**pending))
            return
        for number, copy in self._copies.items():
            slots = copy.take()
            if slots is not None:
                fields = pending["groups"][number]
                fields |= encode_slots(slots, one_each=fields["max_query_len"] == 1)
        pending["groups"] = [GroupForward(**fields) for fields in pending["groups"]]
        self.recorder.write(ForwardStep(**pending))

    def _declare(self, context: Any) -> None:
        """Say who this is, at the first step and again after a lost record."""
        if self._source is None:
            self._source = self.recorder.new_source()
        self._generation = self.recorder.generation
        self._names.clear()
        self._free_names.clear()
        self._batch = []
        self._tables = []
        self._digest_only = (
            not self.recorder.settings.all_ranks and parallel_rank("get_tp_group") > 0
        )
        engine = self.mark[0] if self.mark else None
        self.recorder.write(
            worker_source(self._runner, context, source=self._source, engine=engine)
        )

    def _batch_fields(self, request_ids: list[str], live: list[LiveGroup]) -> dict[str, Any]:
        """Fields of ForwardStep about the batch, as changes to what was written before."""
        rows, new = (None, []) if request_ids == self._batch else self._row_names(request_ids)
        self._batch = request_ids
        while len(self._tables) < len(live):
            self._tables.append(TableMirror())
        return {
            "num_reqs": len(request_ids),
            "groups": [
                self._group_fields(number, group, live[0], reordered=rows is not None)
                for number, group in enumerate(live)
            ],
            "new_requests": new,
            "rows": rows,
        }

    def _group_fields(
        self, number: int, group: LiveGroup, first: LiveGroup, *, reordered: bool
    ) -> dict[str, Any]:
        starts, lens = group.query_start_loc, group.seq_lens
        shared = group is not first
        if group.device_slot_mapping is not None:
            self._copy(number, group.device_slot_mapping)
        return {
            "num_actual_tokens": group.num_actual_tokens,
            "max_query_len": group.max_query_len,
            "max_seq_len": group.max_seq_len,
            "query_start_loc": None
            if shared and _same(starts, first.query_start_loc)
            else starts_of(starts),
            "seq_lens": None if shared and _same(lens, first.seq_lens) else lens.tolist(),
            "table_shape": group.table_shape,
            "block_table": self._tables[number].changes(
                group.block_table, group.num_blocks, reordered=reordered
            ),
            "causal": group.causal,
            "use_cascade": group.use_cascade,
            "common_prefix_len": group.common_prefix_len,
            **encode_slots(group.slot_mapping, one_each=group.max_query_len == 1),
        }

    def _copy(self, number: int, tensor: Any) -> None:
        if number not in self._copies:
            import torch

            self._copies[number] = PinnedCopy(torch, self._runner.max_num_tokens, tensor.dtype)
        self._copies[number].start(tensor)

    def _row_names(self, request_ids: list[str]) -> tuple[list[int], list[tuple[int, str]]]:
        """Small numbers for the ids of a batch, and those that are new; numbers are used again."""
        new = []
        names = []
        for request_id in request_ids:
            name = self._names.get(request_id)
            if name is None:
                name = self._free_names.pop() if self._free_names else len(self._names)
                self._names[request_id] = name
                new.append((name, plain(request_id)))
            names.append(name)
        return names, new


def _same(values: np.ndarray, base: np.ndarray) -> bool:
    return values is base or np.array_equal(values, base)


def _descriptor(descriptor: Any) -> BatchDescriptor | None:
    if descriptor is None:
        return None
    return BatchDescriptor(
        num_tokens=int(descriptor.num_tokens),
        num_reqs=None if descriptor.num_reqs is None else int(descriptor.num_reqs),
        uniform=bool(descriptor.uniform),
        has_lora=bool(descriptor.has_lora),
        num_active_loras=int(descriptor.num_active_loras),
    )
