"""The rows of one key on the CPU, found by block id and offset.

A block that has rows owns a frame, block_size rows of one growing tensor: memory grows with the
blocks that are in use, not with the pool. A frame goes back when its block is dropped. For each row
the store knows which write wrote it (0: none), so a late write never lands on a newer one's row.
Frame 0 belongs to all blocks without one, and nobody ever writes there.

The store copies what it is given, and gives copies. Knows nothing of requests, steps or devices.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnicache_cli.tensor_cache.layout import Ints

Item = TypeVar("Item", bound=np.generic)

FIRST_FRAMES = 16
ROWS_PER_RUN = 64  # with longer runs than this, on average, slices are copied and not single rows

HUGE_BYTES = 8 * 1024 * 1024  # from here on, fewer page faults outweigh another allocator's memory
NOTHING_TO_DO = nullcontext()


class Places(NamedTuple):
    """Where rows are: block id and offset of each, (rows,) both."""

    blocks: Ints
    offsets: Ints


class Span(NamedTuple):
    """Consecutive positions of one request: its blocks, without the first `skipped` rows."""

    blocks: Ints
    skipped: int  # less than a block
    num_rows: int

    def place_of(self, row: int, block_size: int) -> tuple[int, int]:
        """Block id and offset of one of these rows."""
        column, offset = divmod(self.skipped + row, block_size)
        return int(self.blocks[column]), offset


class RowStore:
    """Rows of one shape and dtype by block and offset."""

    def __init__(self, block_size: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.row_shape = row_shape
        self.dtype = dtype
        self._block_size = block_size
        self._offsets = np.arange(block_size)
        self._word = word_of(torch.Size(row_shape).numel() * dtype.itemsize)
        num_words = torch.Size(row_shape).numel() * dtype.itemsize // self._word.itemsize
        with plain_tensors():
            self._rows = empty_rows(0, num_words, self._word)
        self._writes = np.zeros(0, np.int64)  # by row: which write wrote it
        self._frame_of = np.zeros(1, np.int64)  # by block id; 0: none, as the last one always
        self._dropped = np.zeros(1, np.bool_)  # by block id: had a frame once and lost it
        self._free = np.zeros(0, np.int64)  # a stack of frames that were given back
        self._num_free = 0
        self._num_frames = 1  # that were ever in use
        self._make_room(FIRST_FRAMES)

    # ------------------------------------------------------------------ writing

    def claim(self, places: Places, write: int) -> Ints:
        """Gives these rows to write number `write`, and returns their indices for `put`."""
        index = self._index_for(places)
        self._writes[index] = write
        return index

    def put(self, index: Ints, rows: Tensor) -> None:
        """Copies rows, (index's length, *row shape), to where `claim` said."""
        source = as_words(rows, self._word)
        runs = runs_of(index)
        if runs is None:
            self._rows.index_copy_(0, torch.from_numpy(index), source)
            return
        for start, row, length in runs:
            self._rows[start : start + length].copy_(source[row : row + length])

    def put_if_owned(self, places: Places, rows: Tensor, write: int) -> None:
        """Copies the rows that still belong to `write`; others were written or dropped since."""
        index, writes = self.find(places)
        owned = writes == write
        if owned.all():
            self.put(index, rows)
        elif owned.any():
            self.put(index[owned], rows[torch.from_numpy(owned)])

    def void(self, places: Places) -> None:
        """Forgets these rows, whoever wrote them."""
        index, writes = self.find(places)
        self._writes[index[writes != 0]] = 0

    def drop(self, blocks: Ints) -> None:
        """Forgets all rows of these blocks and takes their frames back."""
        blocks = np.unique(blocks)
        frames = self._frames_at(blocks)
        held = frames != 0
        blocks, frames = blocks[held], frames[held]
        self._frame_of[blocks] = 0
        self._dropped[blocks] = True
        self._writes.reshape(-1, self._block_size)[frames] = 0
        self._free[self._num_free : self._num_free + len(frames)] = frames
        self._num_free += len(frames)

    # ------------------------------------------------------------------ reading

    def find(self, places: Places) -> tuple[Ints, Ints]:
        """Index and write number of each row, (rows,) both; 0 where nothing was written."""
        index = self._frames_at(places.blocks) * self._block_size + places.offsets
        return index, self._writes.take(index)

    def find_span(self, span: Span) -> tuple[Ints, Ints]:
        """The frame of each block, (blocks,), and the write number of each row, (rows,)."""
        frames = self._frames_at(span.blocks)
        writes = self._writes.reshape(-1, self._block_size).take(frames, axis=0).reshape(-1)
        return frames, writes[span.skipped : span.skipped + span.num_rows]

    def take_span(self, span: Span, frames: Ints) -> Tensor:
        """A copy of a span's rows, (rows, *row shape); `frames` are those of `find_span`."""
        where, rows = self._what_to_copy(span, frames)
        with plain_tensors():
            if len(where) * rows.shape[1] * self._word.itemsize < HUGE_BYTES:
                taken = rows.index_select(0, where)
            else:
                taken = empty_rows(len(where), rows.shape[1], self._word)
                torch.index_select(rows, 0, where, out=taken)
            typed = taken.view(-1).view(self.dtype).view(-1, *self.row_shape)
            return typed[: span.num_rows]

    def _what_to_copy(self, span: Span, frames: Ints) -> tuple[Tensor, Tensor]:
        """Indices and what they index: whole frames where the span begins with one, else rows."""
        if span.skipped == 0 and span.num_rows >= self._block_size:
            return torch.from_numpy(frames), self._rows.view(len(self._free), -1)
        index = (frames[:, None] * self._block_size + self._offsets).reshape(-1)
        return torch.from_numpy(index[span.skipped : span.skipped + span.num_rows]), self._rows

    def was_dropped(self, block: int) -> bool:
        """Whether this block had rows of this key once that were dropped."""
        return block < len(self._dropped) and bool(self._dropped[block])

    # ------------------------------------------------------------------ size

    @property
    def num_blocks(self) -> int:
        return self._num_frames - self._num_free - 1

    @property
    def num_rows(self) -> int:
        return int(np.count_nonzero(self._writes))

    @property
    def num_bytes(self) -> int:
        """Memory of the rows and of the tables beside them, free frames included."""
        tables = (self._writes, self._frame_of, self._dropped, self._free)
        rows = self._rows.numel() * self._rows.element_size()
        return rows + sum(table.nbytes for table in tables)

    # ------------------------------------------------------------------ frames

    def _frames_at(self, blocks: Ints) -> Ints:
        """The frame of each block, 0 where it has none. Block ids are not negative."""
        return self._frame_of.take(blocks, mode="clip")  # the last entry is always 0

    def _index_for(self, places: Places) -> Ints:
        blocks = places.blocks
        frames = self._frames_at(blocks)
        without = blocks[frames == 0]
        if len(without):
            self._give_frames(without[np.diff(without, prepend=-1) != 0])
            frames = self._frame_of[blocks]
        return frames * self._block_size + places.offsets

    def _give_frames(self, blocks: Ints) -> None:
        """A frame for each of these blocks, in their order; they are different and have none."""
        highest = int(blocks.max())
        if highest >= len(self._frame_of) - 1:
            size = max(highest + 2, 2 * len(self._frame_of))
            self._frame_of = grown(self._frame_of, size)
            self._dropped = grown(self._dropped, size)
        reused = min(len(blocks), self._num_free)
        self._num_free -= reused
        frames = np.sort(self._free[self._num_free : self._num_free + reused])
        if fresh := len(blocks) - reused:
            self._make_room(self._num_frames + fresh)
            more = np.arange(self._num_frames, self._num_frames + fresh)
            frames = np.concatenate((frames, more))
            self._num_frames += fresh
        self._frame_of[blocks] = frames

    def _make_room(self, num_frames: int) -> None:
        capacity = len(self._free)
        if num_frames <= capacity:
            return
        capacity = max(num_frames, 2 * capacity)
        num_rows = capacity * self._block_size
        with plain_tensors():
            rows = empty_rows(num_rows, self._rows.shape[1], self._word)
            rows[: len(self._rows)] = self._rows
        self._rows = rows
        self._writes = grown(self._writes, num_rows)
        self._free = grown(self._free, capacity)


def plain_tensors() -> AbstractContextManager[Any]:
    """Tensors made in here can be written to later, in inference mode and out of it."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return NOTHING_TO_DO


def word_of(row_bytes: int) -> torch.dtype:
    """The widest integer that divides a row: few wide words are copied faster than many narrow."""
    for word in (torch.int64, torch.int32, torch.int16):
        if row_bytes % word.itemsize == 0:
            return word
    return torch.int8


def empty_rows(num_rows: int, num_words: int, word: torch.dtype) -> Tensor:
    """Uninitialised rows in memory of numpy's: it asks for huge pages, which torch does not."""
    return torch.from_numpy(np.empty((num_rows, num_words), f"i{word.itemsize}"))


def as_words(rows: Tensor, word: torch.dtype) -> Tensor:
    """The bytes of CPU rows as (rows, words): a view where their memory allows one."""
    plain = rows.detach().resolve_conj().resolve_neg().contiguous()
    if plain.storage_offset() * plain.element_size() % word.itemsize:
        plain = plain.clone()
    return plain.view(len(plain), plain.shape[1:].numel()).view(word)


def runs_of(index: Ints) -> list[tuple[int, int, int]] | None:
    """Consecutive indices as (first index, first row, length); None where they are too short.

    There is at least one index.
    """
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    if len(breaks) and (len(breaks) + 1) * ROWS_PER_RUN > len(index):
        return None
    rows = [0, *breaks.tolist()]
    ends = [*rows[1:], len(index)]
    return [(int(index[row]), row, end - row) for row, end in zip(rows, ends, strict=True)]


def grown(table: NDArray[Item], size: int) -> NDArray[Item]:
    """A longer copy of a table, with zeros behind it."""
    longer = np.zeros(size, table.dtype)
    longer[: len(table)] = table
    return longer
