"""What one thing of the environment is worth."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "limits", "broken", "missing", "unknown"]


@dataclass(frozen=True, slots=True)
class Check:
    """`name` is what commands refer to; `mend` is the line to type, where something is to do."""

    name: str
    state: State
    found: str
    mend: str = ""
