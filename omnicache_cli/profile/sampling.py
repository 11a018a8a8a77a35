"""How to sample: what py-spy is told, and what is made of what it records."""

from dataclasses import dataclass, replace
from typing import Literal

from omnicache_cli.errors import UsageError

MAX_RATE_HZ = 1000
DEFAULT_RATE_HZ = 100


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of one profile. py-spy writes one format a process, and a second py-spy would fight
    the first for the process: so a recording is of samples, or it is a timeline."""

    rate_hz: int = DEFAULT_RATE_HZ
    native: bool = False
    idle: bool = False
    gil: bool = False
    timeline: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.rate_hz <= MAX_RATE_HZ:
            raise UsageError(
                f"--rate {self.rate_hz} is not from 1 to {MAX_RATE_HZ} samples a second; py-spy "
                "pauses the process for each one; 100 is usual"
            )
        if self.timeline and self.gil:
            raise UsageError(
                "--timeline cannot be combined with --gil: py-spy's Chrome trace then shows a "
                "function as running until its thread takes the GIL again; leave one out"
            )

    @property
    def recorded_as(self) -> Literal["speedscope", "chrometrace"]:
        """The format of py-spy that the recording has."""
        return "chrometrace" if self.timeline else "speedscope"

    @property
    def has_waiting_threads(self) -> bool:
        """Threads that wait are among the samples, and more of them than of the others."""
        return self.idle or self.timeline

    def without_native(self) -> "Sampling":
        return replace(self, native=False)

    def arguments(self) -> list[str]:
        """Options of `py-spy record`, without process and output."""
        found = ["--format", self.recorded_as, "--rate", str(self.rate_hz)]
        found += ["--native"] if self.native else []
        found += ["--gil"] if self.gil else []
        found += ["--idle"] if self.has_waiting_threads else []
        # The first frame of a stack then names the thread, by which it can be followed.
        found += ["--threads"] if self.timeline else []
        return found
