"""What one stage's runner computes in each step, and what its `sample_tokens` hands on.

Wraps the runner of an engine in this process, as `verify.capture` does; the cache under test is
the one that vLLM-Omni's runner itself uses.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from omnicache_cli.engine.verify.capture import (
    Capture,
    Given,
    block_size_of,
    delivered_piece,
    own_rows,
    step_layout,
)
from omnicache_cli.tensor_cache.layout import StepLayout
from omnicache_cli.tensor_cache.rule import why_not
from omnicache_cli.trace.records import external_id
from omnicache_cli.verify.faults import PADDING_REQUEST
from omnicache_cli.verify.payload import what_became
from omnicache_cli.verify.runs import Computed

HIDDEN = "hidden"
"""vLLM-Omni's name for the final hidden states in a payload."""

NOT_HANDED_ON = frozenset({"meta.req_id", "meta.sparse_audio"})
"""Keys that vLLM-Omni keeps to itself: they say which request sparse audio belongs to."""


@dataclass(slots=True)
class _Step:
    """A step between its forward pass and its `sample_tokens`."""

    layout: StepLayout
    resumed: frozenset[str]
    rows: dict[str, torch.Tensor] = field(default_factory=dict)  # key -> (tokens, width)
    uncached: dict[str, torch.Tensor] = field(default_factory=dict)  # the same, never cached
    others: dict[str, Any] = field(default_factory=dict)


class StageCapture(Capture):
    """Follows one runner of vLLM-Omni for as long as it lives. `keys` grow with what is seen."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner, ())
        self.keys: tuple[str, ...] = ()
        self._open: _Step | None = None
        self._wrap("_prefix_cache_save_step", self._save_step)
        self._wrap("sample_tokens", self._sample_tokens)

    def _model_forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if self._scheduled is not None:
            layout = step_layout(self._runner, self._scheduled, self._step, 0)
            resumed = frozenset(self._scheduled.scheduled_cached_reqs.resumed_req_ids)
            self._open = _Step(layout, resumed)
            self._step += 1
            self._recorded.num_resumed += len(resumed)
        return output

    def _save_step(
        self, original: Any, hidden_states: Any, multimodal_outputs: Any, **sizes: int
    ) -> Any:
        """vLLM-Omni calls it with what the model put out, whether there is a cache or not."""
        if self._open is not None:
            from vllm_omni.data_entry_keys import flatten_payload

            others = flatten_payload(multimodal_outputs) if multimodal_outputs else {}
            self._put_out(self._open, hidden_states, others, sizes["num_tokens_padded"])
        return original(hidden_states, multimodal_outputs, **sizes)

    def _put_out(
        self, step: _Step, hidden: torch.Tensor, others: Mapping[str, Any], num_padded: int
    ) -> None:
        step.layout = layout = dataclasses.replace(step.layout, num_tokens_padded=num_padded)
        kept = self._runner._omni_cache_policy.needs_full_hidden_states
        (step.rows if kept else step.uncached)[HIDDEN] = hidden
        for key, value in others.items():
            if why_not(key, value, layout) is None:
                step.rows[key] = value
            elif key not in NOT_HANDED_ON:
                step.others[key] = _copied(value)
        self.keys += tuple(key for key in step.rows if key not in self.keys)
        slots = layout.slot_mapping.tolist()
        for one in layout.requests:
            part = slice(one.first_row, one.first_row + one.num_rows)
            rows = {key: own_rows(value[part]) for key, value in step.rows.items()}
            self._recorded.computed.append(
                Computed(
                    layout.step,
                    external_id(one.request_id, randomized=True),
                    one.num_computed_tokens,
                    tuple(slots[part]),
                    rows,
                )
            )
        if layout.num_tokens < num_padded:
            padding = {
                key: own_rows(value[layout.num_tokens :])
                for key, value in step.rows.items()
                if len(value) > layout.num_tokens
            }
            self._recorded.computed.append(Computed(layout.step, PADDING_REQUEST, 0, (), padding))

    def _sample_tokens(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        step, self._open = self._open, None
        if step is not None:
            self._handed_on(step, output)
        return output

    def _handed_on(self, step: _Step, output: Any) -> None:
        payloads = output.inter_stage_outputs or output.multimodal_outputs or ()
        by_request = dict(zip(output.req_ids, payloads, strict=False))
        size = block_size_of(self._runner)
        for index, one in enumerate(step.layout.requests):
            payload = by_request.get(one.request_id) or {}
            rows = {key: payload[key] for key in step.rows if key in payload}
            part = slice(one.first_row, one.first_row + one.num_rows)
            given = {key: own_rows(value[part]) for key, value in step.uncached.items()}
            given |= _elements(step.others, index)
            found = {key: value for key, value in payload.items() if key not in step.rows}
            self._recorded.delivered.append(
                delivered_piece(
                    step.layout,
                    one,
                    Given({one.request_id: rows}),
                    one.request_id in step.resumed,
                    size,
                    {
                        key: what_became(given.get(key), found.get(key))
                        for key in {**given, **found}
                    },
                )
            )


def _copied(value: Any) -> Any:
    """The model may write its outputs anew in the next step."""
    if isinstance(value, torch.Tensor):
        return own_rows(value)
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


def _elements(others: Mapping[str, Any], index: int) -> dict[str, torch.Tensor]:
    """The part of request number `index` of a batch: a list of one is everybody's, a longer one has
    an entry for each; anything else belongs to all. What is no tensor is none on the wire either.
    """
    found = {}
    for key, value in others.items():
        one = value
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            if len(value) > 1 and index >= len(value):
                continue
            one = value[0] if len(value) == 1 else value[index]
        if isinstance(one, int | float):
            one = torch.tensor(one)
        if isinstance(one, torch.Tensor):
            found[key] = one
    return found
