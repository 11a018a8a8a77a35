"""What one traced process records into: settings, the rank file, error and time counts."""

import atexit
import hashlib
import multiprocessing
import multiprocessing.util
import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from omnicache_cli import __version__
from omnicache_cli.engine.versions import is_tested
from omnicache_cli.trace.records import SCHEMA_VERSION, AnyRecord, End, Header
from omnicache_cli.trace.writer import RankFileWriter

_VERSIONED_MODULES = ("torch", "transformers", "vllm_omni", "numpy", "msgspec")


class Settings(msgspec.Struct, frozen=True):
    """The value of the environment variable."""

    folder: str
    salt_key: str  # hex; random per run, so that digests compare within a run and not beyond
    token_ids: bool = False
    check_hashes: bool = False  # recompute the hash of every block that enters the cache
    all_ranks: bool = False  # further tensor-parallel ranks write their batch in full too


class Recorder:
    """Everything this process records. One per process; a fork makes its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pid = os.getpid()
        self.monotonic_ns = time.perf_counter_ns()
        self.started_unix_ns = time.time_ns()
        self.probe_ns = 0  # time inside our own code
        self.num_dropped = 0  # before there was a file to write to
        self.errors: Counter[str] = Counter()
        self.first_error: str | None = None
        self.closed = False
        self.on_close: list[Callable[[], None]] = []  # sources that hold a record back
        self._writer: RankFileWriter | None = None
        self._num_sources = 0

    @property
    def generation(self) -> int:
        """Moves on whenever a record was lost: state must then be restated."""
        writer = self._writer
        return self.num_dropped + (writer.generation if writer else 0)

    @property
    def dropped(self) -> int:
        """Records of this process that could not be written."""
        return self.num_dropped + (self._writer.num_dropped if self._writer else 0)

    def new_source(self) -> int:
        """A number for one traced object of this process."""
        self._num_sources += 1
        return self._num_sources - 1

    def new_engine(self, source: int) -> str:
        """A name for one engine that no other process of the run gives."""
        return f"{socket.gethostname()}.{self.pid}.{source}"

    def since_start(self, instant: int) -> int:
        """An instant of `time.perf_counter_ns` on this file's clock."""
        return instant - self.monotonic_ns

    def write(self, record: AnyRecord) -> None:
        if self.closed:
            return
        if self._writer is None:
            try:
                self._writer = RankFileWriter(Path(self.settings.folder), self._header())
            except OSError as error:
                self.num_dropped += 1
                self.note_error("open", error)
                return
        self._writer.write(record)

    def hold(self, record: AnyRecord) -> None:
        """As `write`, of a record that is not whole before `settle`."""
        if self._writer is None:
            self.write(record)
        elif not self.closed:
            self._writer.hold(record)

    def settle(self, record: AnyRecord) -> None:
        """A held record is whole: it goes with the next record or `flush`."""
        if self._writer is not None:
            self._writer.settle(record)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def note_error(self, hook: str, error: BaseException) -> None:
        """Count an error of our own; its text may name types and numbers, never prompts."""
        self.errors[hook] += 1
        if self.first_error is None:
            frame = error.__traceback__
            while frame is not None and frame.tb_next is not None:
                frame = frame.tb_next
            where = (
                f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
                if frame
                else "?"
            )
            self.first_error = f"{hook}: {type(error).__name__} at {where}"

    def salt_digest(self, salt: str) -> str:
        """A keyed digest: equal salts compare equal within this run, the salt stays secret."""
        key = bytes.fromhex(self.settings.salt_key)
        return hashlib.blake2b(
            salt.encode(errors="surrogatepass"), key=key, digest_size=8
        ).hexdigest()

    def close(self) -> None:
        """Write the last record. Harmless when called again."""
        if self.closed or self.pid != os.getpid():
            return
        for write_rest in self.on_close:
            try:
                write_rest()
            except Exception as error:
                self.note_error("close", error)
        writer = self._writer
        if writer is not None:
            writer.close(
                End(
                    records=writer.num_records,
                    dropped=self.dropped,
                    probe_errors=dict(self.errors),
                    probe_ns=self.probe_ns,
                    first_error=self.first_error,
                )
            )
        self.closed = True

    def forget(self) -> None:
        """In a forked child: leave the parent's file alone."""
        if self._writer is not None:
            self._writer.forget()

    def _header(self) -> Header:
        versions = {"python": platform.python_version()}
        for name in _VERSIONED_MODULES:
            version = getattr(sys.modules.get(name), "__version__", None)
            if version is not None:
                versions[name] = str(version)
        vllm_version = getattr(sys.modules.get("vllm"), "__version__", None)
        return Header(
            schema_version=SCHEMA_VERSION,
            tool_version=__version__,
            vllm_version=None if vllm_version is None else str(vllm_version),
            host=socket.gethostname(),
            pid=self.pid,
            process=multiprocessing.current_process().name,
            started_unix_ns=self.started_unix_ns,
            monotonic_ns=self.monotonic_ns,
            versions=versions,
            vllm_tested=vllm_version is None or is_tested(str(vllm_version)),
        )


_recorder: Recorder | None = None


def begin(settings: Settings) -> Recorder:
    """Start recording in this process; an earlier recording is ended."""
    global _recorder  # noqa: PLW0603
    end()
    _recorder = Recorder(settings)
    return _recorder


def end() -> None:
    """End the recording of this process, if there is one."""
    global _recorder  # noqa: PLW0603
    if _recorder is not None:
        _recorder.close()
    _recorder = None


def current() -> Recorder | None:
    """The recording of this process; in a forked child a new one with the parent's settings."""
    global _recorder  # noqa: PLW0603
    if _recorder is not None and _recorder.pid != os.getpid():
        _recorder.forget()
        _recorder = Recorder(_recorder.settings)
        multiprocessing.util.Finalize(None, end, exitpriority=0)
    return _recorder


# A child of multiprocessing leaves without atexit, the main process without finalizers' priority.
atexit.register(end)
multiprocessing.util.Finalize(None, end, exitpriority=0)
