"""Copies a small tensor from a device beside the step, and never waits for it.

The copy goes into pinned memory on the current stream, with an event behind it; it is read when
the event has passed, at the earliest in the next step. A copy that is not there by then is given
up: the record says that the tensor was not read.
"""

import math
from typing import Any

import numpy as np


class PinnedCopy:
    """One tensor's copies, step after step, in one pinned buffer of `capacity` entries."""

    def __init__(self, torch: Any, capacity: int, dtype: Any) -> None:
        self._buffer = torch.empty(capacity, dtype=dtype, pin_memory=True)
        self._event = torch.cuda.Event()
        self._shape: tuple[int, ...] = ()
        self._in_flight = False
        self._wanted = False  # the copy in flight is that of the step that will take it

    def start(self, tensor: Any) -> bool:
        """Begin to copy; False: the copy before is still on its way, or the tensor is too large."""
        shape = tuple(tensor.shape)
        size = math.prod(shape)
        self._wanted = False
        if size > len(self._buffer) or (self._in_flight and not self._event.query()):
            return False
        self._buffer[:size].view(shape).copy_(tensor, non_blocking=True)
        self._event.record()
        self._shape = shape
        self._in_flight = self._wanted = True
        return True

    def take(self) -> np.ndarray | None:
        """What `start` was last asked to copy; None: it did not begin, or has not arrived."""
        wanted, self._wanted = self._wanted, False
        if not wanted or not self._event.query():
            return None
        self._in_flight = False
        flat = self._buffer[: math.prod(self._shape)].numpy()
        values: np.ndarray = flat.copy().reshape(self._shape)
        return values
