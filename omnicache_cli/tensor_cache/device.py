"""Rows on a device: how they are kept there, and how they come to the CPU without a wait.

The CUDA part has NOT been run on a device: it was written against torch's documentation, and the
order of its calls is tested against a stand-in for `torch.cuda`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class HostCopy(Protocol):
    """A copy to the CPU that was started."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Never waits."""
        ...

    def wait(self) -> Sequence[Tensor]:
        """The rows on the CPU, in the order in which they were given."""
        ...


class DeviceCopies(Protocol):
    """Keeps rows where they are, and copies them later."""

    def keeps(self, rows: Tensor) -> bool:
        """Whether rows of this tensor are kept and copied later. Others are copied at once."""
        ...

    def keep(self, rows: Tensor) -> Any:
        """A copy in the same place; the caller may overwrite `rows` once this returns."""
        ...

    def start(self, kept: Sequence[Any]) -> HostCopy:
        """Starts one copy of all of these to the CPU. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that is complete already."""

    rows: tuple[Tensor, ...]

    def done(self) -> bool:
        return True

    def wait(self) -> tuple[Tensor, ...]:
        return self.rows


class PlainCopies:
    """Keeps CPU rows back as if they were on a device: for deferred writes without a device."""

    def keeps(self, rows: Tensor) -> bool:
        return True

    def keep(self, rows: Tensor) -> Tensor:
        return rows.detach().clone()

    def start(self, kept: Sequence[Tensor]) -> Copied:
        return Copied(tuple(rows.cpu() for rows in kept))


@dataclass(frozen=True, slots=True, eq=False)
class KeptOnDevice:
    rows: Tensor
    ready: Any  # event: passed when `rows` is complete


@dataclass(frozen=True, slots=True, eq=False)
class CudaHostCopy:
    """A copy on the side stream. Holds the rows on the device until it is gone itself."""

    kept: tuple[KeptOnDevice, ...]
    host: tuple[Tensor, ...]  # pinned
    passed: Any  # event: passed when `host` is complete

    def done(self) -> bool:
        return bool(self.passed.query())

    def wait(self) -> tuple[Tensor, ...]:
        self.passed.synchronize()
        return self.host


class CudaCopies:
    """Copies from a CUDA device on a stream of its own, into pinned memory.

    The step's stream only gets a copy within the device (`keep`), so it can overwrite its buffers
    afterwards; it never waits for the side stream, and no call here but `wait` waits on the CPU
    (pinned memory that torch has not cached yet is allocated, which takes its time too).
    """

    def __init__(self, cuda: Any = torch.cuda, *, pin_memory: bool = True) -> None:
        self._cuda = cuda
        self._pin_memory = pin_memory
        self._side: dict[torch.device, Any] = {}

    def keeps(self, rows: Tensor) -> bool:
        return bool(rows.is_cuda)

    def keep(self, rows: Tensor) -> KeptOnDevice:
        kept = rows.detach().clone()
        ready = self._cuda.Event()
        ready.record(self._cuda.current_stream(rows.device))
        return KeptOnDevice(kept, ready)

    def start(self, kept: Sequence[KeptOnDevice]) -> CudaHostCopy:
        device = kept[0].rows.device
        side = self._side_of(device)
        with self._on(side):
            host = tuple(self._copy(one, side) for one in kept)
        passed = self._cuda.Event()
        passed.record(side)
        return CudaHostCopy(tuple(kept), host, passed)

    def _copy(self, kept: KeptOnDevice, side: Any) -> Tensor:
        side.wait_event(kept.ready)
        host = torch.empty(kept.rows.shape, dtype=kept.rows.dtype, pin_memory=self._pin_memory)
        host.copy_(kept.rows, non_blocking=True)
        kept.rows.record_stream(side)  # not reused before the copy, even if we are thrown away
        return host

    def _side_of(self, device: torch.device) -> Any:
        if device not in self._side:
            self._side[device] = self._cuda.Stream(device=device)
        return self._side[device]

    def _on(self, side: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cuda.stream(side)
        return context
