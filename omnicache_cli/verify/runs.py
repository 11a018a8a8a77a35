"""What a run of prompts leaves behind: tensor rows by token position, tokens, log probabilities.

A *key* names one tensor that has a row per token: the final hidden states, the output of a layer.
Rows stay in the dtype the engine gave them, in memory of their own on the CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN_STATES = "hidden_states"
"""Key of the final hidden states; a layer's output is `layers.N`."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model computed for one request in one step."""

    step: int
    request: str
    first_position: int  # of its tokens
    slots: tuple[int, ...]  # of the KV cache, one per row
    rows: Mapping[str, "Tensor"]  # key -> (num_rows, width)


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a cache gave back for one request in one step."""

    step: int
    request: str
    hit_tokens: int  # rows that were restored; 0: none of this piece
    first_position: int
    hit_slots: tuple[int, ...]  # where the restored rows come from, by block table
    rows: Mapping[str, "Tensor"]  # key -> restored rows, then those of this step
    refused: str | None = None  # the cache raised: its message
    payload: Mapping[str, str | None] = field(default_factory=dict)
    """What is not per token and must be handed through: by key what became of it, None: nothing."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One output token. Log probabilities are natural logarithms."""

    token_id: int
    logprob: float
    margin: float | None  # to the runner-up; None: not known


@dataclass(frozen=True, slots=True)
class RequestRun:
    """One finished request."""

    request: str
    num_prompt_tokens: int
    hit_tokens: int  # what vLLM reports to its client as cached
    tokens: tuple[SampledToken, ...]

    @property
    def num_rows(self) -> int:
        """Positions that went through the model: the last token that was sampled did not."""
        return self.num_prompt_tokens + len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class How:
    """How the requests of one run are sent."""

    together: bool = False  # all at once; else one after the other
    pieces: int | None = None  # prompt tokens of a request in one step at most; None: no limit


ONE_BY_ONE = How()


@dataclass(slots=True)
class RunRows:
    """One run of several prompts, steps in order."""

    requests: dict[str, RequestRun] = field(default_factory=dict)
    computed: list[Computed] = field(default_factory=list)
    delivered: list[Delivered] = field(default_factory=list)  # empty without a cache
    num_resumed: int = 0  # requests that went on after a preemption
