"""Copies a small tensor from a device beside the step, and never waits for it.

The copy goes into pinned memory on the current stream, with an event behind it; it is read when
the event has passed, at the earliest in the next step. A copy that is not there by then is given
up: the record says that the tensor was not read.
"""

from typing import Any

import numpy as np


class PinnedCopy:
    """One tensor's copies, step after step, in one pinned buffer."""

    def __init__(self, torch: Any, capacity: int, dtype: Any) -> None:
        self._buffer = torch.empty(capacity, dtype=dtype, pin_memory=True)
        self._event = torch.cuda.Event()
        self._length = 0
        self._in_flight = False
        self._wanted = False  # the copy in flight is that of the step that will take it

    def start(self, tensor: Any) -> bool:
        """Begin to copy; False: the copy before is still on its way, or the tensor is too long."""
        length = len(tensor)
        self._wanted = False
        if length > len(self._buffer) or (self._in_flight and not self._event.query()):
            return False
        self._buffer[:length].copy_(tensor, non_blocking=True)
        self._event.record()
        self._length = length
        self._in_flight = self._wanted = True
        return True

    def take(self) -> np.ndarray | None:
        """What `start` was last asked to copy; None: it did not begin, or has not arrived."""
        wanted, self._wanted = self._wanted, False
        if not wanted or not self._event.query():
            return None
        self._in_flight = False
        values: np.ndarray = self._buffer[: self._length].numpy().copy()
        return values
