"""Turns the live batches of one model runner into the fields of its `forward` records.

Owns what a reader already knows: row names, block tables. Only changes to that are written.
"""

from typing import Any

import numpy as np

from omnicache_cli.engine.adapter import plain
from omnicache_cli.engine.probe.device import PinnedCopy
from omnicache_cli.engine.probe.live import LiveGroup
from omnicache_cli.engine.probe.vectors import (
    FULL_COMPARE_CELLS,
    TableMirror,
    encode_slots,
    starts_of,
)
from omnicache_cli.trace.records import GroupForward, Runs


class BatchEncoder:
    """State of what was written; a fresh one writes a batch in full."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}  # internal request id -> row name
        self._free_names: list[int] = []
        self._batch: list[str] = []
        self._tables: list[TableMirror] = []

    def forget(self, request_id: str) -> None:
        """The request is finished: its row name may be used again."""
        name = self._names.pop(request_id, None)
        if name is not None:
            self._free_names.append(name)

    def fields(self, request_ids: list[str], live: list[LiveGroup]) -> dict[str, Any]:
        """Fields of ForwardStep about the batch; `groups` as dicts, see `group_records`."""
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

    def table_changes(
        self, number: int, table: np.ndarray, used: np.ndarray, *, reordered: bool
    ) -> list[tuple[int, int, Runs]]:
        """What a reader does not know yet of the block table of group `number`."""
        return self._tables[number].changes(table, used, reordered=reordered)

    def _group_fields(
        self, number: int, group: LiveGroup, first: LiveGroup, *, reordered: bool
    ) -> dict[str, Any]:
        starts, lens = group.query_start_loc, group.seq_lens
        shared = group is not first
        return {
            "num_actual_tokens": group.num_actual_tokens,
            "max_query_len": group.max_query_len,
            "max_seq_len": group.max_seq_len,
            "query_start_loc": None
            if starts is None or (shared and _same(starts, first.query_start_loc))
            else starts_of(starts),
            "seq_lens": None
            if lens is None or (shared and _same(lens, first.seq_lens))
            else lens.tolist(),
            "table_shape": group.table_shape,
            "block_table": None
            if group.block_table is None
            else self.table_changes(
                number, group.block_table, group.num_blocks, reordered=reordered
            ),
            "causal": group.causal,
            "use_cascade": group.use_cascade,
            "common_prefix_len": group.common_prefix_len,
            **encode_slots(group.slot_mapping, one_each=group.max_query_len == 1),
        }

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


class DeviceCopies:
    """Slot mappings and block tables that are on a device, on their way to their step's record.

    Of a block table the used columns of the batch, up to FULL_COMPARE_CELLS cells (1 MiB); a
    larger one is not read.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._slots: dict[int, PinnedCopy] = {}  # per group
        self._tables: dict[int, PinnedCopy] = {}
        self._used: dict[int, np.ndarray] = {}  # columns of each row of the table on its way

    def __bool__(self) -> bool:
        return bool(self._slots or self._tables)

    def start(self, live: list[LiveGroup]) -> None:
        for number, group in enumerate(live):
            if group.device_slot_mapping is not None:
                slots = group.device_slot_mapping
                _copy_of(self._slots, number, slots, self._max_num_tokens).start(slots)
            if group.device_block_table is not None:
                used = group.num_blocks
                table = group.device_block_table[: len(used), : int(used.max(initial=0))]
                _copy_of(self._tables, number, table, FULL_COMPARE_CELLS).start(table)
                self._used[number] = used.copy()

    def take(self, fields: dict[str, Any], encoder: BatchEncoder) -> None:
        """Into the fields of the step what has arrived; the rest stays unread.

        `fields` and `encoder`: as `BatchEncoder.fields` gave them for the step of the last
        `start`, with no other step in between.
        """
        groups = fields["groups"]
        for number, copy in self._slots.items():
            slots = copy.take()
            if slots is not None and number < len(groups):
                group = groups[number]
                group |= encode_slots(slots, one_each=group["max_query_len"] == 1)
        for number, copy in self._tables.items():
            table = copy.take()
            if table is not None and number < len(groups):
                groups[number]["block_table"] = encoder.table_changes(
                    number, table, self._used[number], reordered=fields["rows"] is not None
                )


def group_records(groups: list[dict[str, Any]]) -> list[GroupForward]:
    return [GroupForward(**fields) for fields in groups]


def _copy_of(copies: dict[int, PinnedCopy], number: int, tensor: Any, capacity: int) -> PinnedCopy:
    if number not in copies:
        import torch

        copies[number] = PinnedCopy(torch, capacity, tensor.dtype)
    return copies[number]


def _same(values: np.ndarray, base: np.ndarray | None) -> bool:
    return values is base or (base is not None and np.array_equal(values, base))
