"""Reads what one model runner computes in each step: rows per token, layer by layer.

Wraps the runner of an engine in this process. Layer outputs are read by forward hooks, which fire
only where the model runs as Python: not inside a CUDA graph or a compiled one.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from omnicache_cli.engine.probe.live import of_group
from omnicache_cli.errors import BadInputError, EngineFailedError
from omnicache_cli.tensor_cache.layout import RequestRows, StepLayout
from omnicache_cli.trace.records import external_id
from omnicache_cli.verify.faults import PADDING_REQUEST
from omnicache_cli.verify.runs import HIDDEN_STATES, Computed, Delivered

_LAYER = re.compile(r"(.*\.layers\.(\d+))\.")


@dataclass(frozen=True, slots=True)
class Given:
    """What a cache gives back in one step: request id -> key -> rows."""

    rows: dict[str, dict[str, torch.Tensor]]
    refused: str | None = None  # it raised instead
    payload: Mapping[str, Any] = field(default_factory=dict)  # handed through, of the whole step


class AttachedCache(Protocol):
    """A tensor cache that follows the runner. It does not raise: see `Given.refused`."""

    def begin(self, scheduler_output: Any) -> None:
        """Before the runner updates its states; once per step, also without tokens."""
        ...

    def step(self, layout: StepLayout, outputs: dict[str, Any]) -> Given:
        """After the forward pass: store the rows, give back those of every request."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Recorded:
    """Steps since the last `take`."""

    computed: list[Computed]
    delivered: list[Delivered]
    num_resumed: int = 0  # requests that went on after a preemption


class Capture:
    """Follows one runner for as long as it lives."""

    def __init__(self, runner: Any, layers: Sequence[int]) -> None:
        """BadInputError: the model has no such layer."""
        self.cache: AttachedCache | None = None
        self.enabled = False  # profiling and warm-up runs are none of ours
        self.payload: Callable[[StepLayout], Mapping[str, Any]] | None = None  # to send along
        self._runner = runner
        self._step = 0
        self._scheduled: Any = None
        self.outputs: dict[str, torch.Tensor] = {}
        self._recorded = Recorded([], [])
        for index, module in _layer_modules(runner, layers).items():
            module.register_forward_hook(functools.partial(self._keep, f"layers.{index}"))
        self.keys = (HIDDEN_STATES, *(f"layers.{index}" for index in layers))
        self._wrap("execute_model", self._execute_model)
        self._wrap("_model_forward", self._model_forward)

    def take(self) -> Recorded:
        """What was recorded since the last call."""
        recorded, self._recorded = self._recorded, Recorded([], [])
        return recorded

    def _wrap(self, name: str, around: Any) -> None:
        original = getattr(self._runner, name)
        setattr(self._runner, name, functools.wraps(original)(functools.partial(around, original)))

    def _keep(self, key: str, module: Any, inputs: Any, output: Any) -> None:
        """Layers of vLLM's models give the hidden states and the residual apart."""
        if isinstance(output, tuple):
            hidden, residual = output[0], output[1] if len(output) > 1 else None
            output = hidden if residual is None else hidden + residual
        self.outputs[key] = output

    def _execute_model(self, original: Any, scheduler_output: Any, *args: Any, **kw: Any) -> Any:
        self._scheduled = scheduler_output if self.enabled else None
        if self.enabled and self.cache is not None:
            self.cache.begin(scheduler_output)
        try:
            return original(scheduler_output, *args, **kw)
        finally:
            self._scheduled = None

    def _model_forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.outputs.clear()
        output = original(*args, **kwargs)
        if self._scheduled is not None:
            self.record(self._scheduled, output)
        return output

    def record(self, scheduler_output: Any, output: Any) -> None:
        """Behind a forward pass, whose `outputs` are there."""
        hidden = output[0] if isinstance(output, tuple) else output
        outputs = {HIDDEN_STATES: hidden, **self.outputs}
        missing = [key for key in self.keys if key not in outputs]
        if missing:
            raise EngineFailedError(
                f"no output of {missing[0]} was seen: the model ran as a compiled graph; leave "
                "the layers out with --layers none"
            )
        layout = step_layout(self._runner, scheduler_output, self._step, len(hidden))
        self._step += 1
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self._recorded.num_resumed += len(resumed)
        slots = layout.slot_mapping.tolist()
        for one in layout.requests:
            part = slice(one.first_row, one.first_row + one.num_rows)
            rows = {key: own_rows(outputs[key][part]) for key in self.keys}
            name = external_id(one.request_id, randomized=True)
            piece = Computed(layout.step, name, one.num_computed_tokens, tuple(slots[part]), rows)
            self._recorded.computed.append(piece)
        if layout.num_tokens < layout.num_tokens_padded:
            padding = {key: own_rows(outputs[key][layout.num_tokens :]) for key in self.keys}
            self._recorded.computed.append(Computed(layout.step, PADDING_REQUEST, 0, (), padding))
        if self.cache is not None:
            payload = {} if self.payload is None else dict(self.payload(layout))
            given = self.cache.step(layout, {**outputs, **payload})
            became = (
                {key: _what_became(value, given, key) for key, value in payload.items()}
                if given.refused is None
                else {}
            )
            size = block_size_of(self._runner)
            self._recorded.delivered += [
                delivered_piece(layout, one, given, one.request_id in resumed, size, became)
                for one in layout.requests
            ]


def _what_became(value: Any, given: Given, key: str) -> str | None:
    """Of a payload that was sent; None: it came back as it was."""
    if key in given.payload:
        return None if given.payload[key] is value else f"{key} came back as another object"
    cut = any(key in rows for rows in given.rows.values())
    return f"{key} is not per token and was cut into rows" if cut else f"{key} did not come back"


def delivered_piece(
    layout: StepLayout,
    one: RequestRows,
    given: Given,
    resumed: bool,
    block_size: int,
    payload: Mapping[str, str | None],
) -> Delivered:
    """What came back for one request, put where it belongs.

    A request that resumes after a preemption was given the rows of its prefix when it ran before;
    a cache may give only what is new.
    """
    rows = {key: own_rows(value) for key, value in given.rows.get(one.request_id, {}).items()}
    hit = one.hit_tokens or 0
    if resumed and all(len(value) <= one.num_rows for value in rows.values()):
        hit = 0
    slots = [
        one.block_ids[position // block_size] * block_size + position % block_size
        for position in range(hit)
    ]
    name = external_id(one.request_id, randomized=True)
    first = one.num_computed_tokens - hit
    return Delivered(layout.step, name, hit, first, tuple(slots), rows, given.refused, payload)


def step_layout(runner: Any, scheduler_output: Any, step: int, num_padded: int) -> StepLayout:
    """The batch that the runner is computing, for group 0. Reads the live slot mapping."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    group = runner.kv_cache_config.kv_cache_groups[0]
    slots = of_group(context.attn_metadata, group).slot_mapping
    batch = runner.input_batch
    starts = runner.query_start_loc.np
    hits = _hits(scheduler_output)
    requests = tuple(
        RequestRows(
            request_id=request_id,
            first_row=int(starts[row]),
            num_rows=int(starts[row + 1] - starts[row]),
            num_computed_tokens=int(batch.num_computed_tokens_cpu[row]),
            hit_tokens=hits.get(request_id),
            block_ids=tuple(runner.requests[request_id].block_ids[0]),
        )
        for row, request_id in enumerate(batch.req_ids[: batch.num_reqs])
    )
    return StepLayout(
        step=step,
        slot_mapping=slots.detach().to("cpu", torch.int64, copy=True),
        num_tokens=int(scheduler_output.total_num_scheduled_tokens),
        num_tokens_padded=num_padded,
        requests=requests,
        new_block_ids=_new_blocks(scheduler_output, hits, block_size_of(runner)),
    )


def _hits(scheduler_output: Any) -> dict[str, int]:
    """Prefix hit of every request that is admitted in this step."""
    cached = scheduler_output.scheduled_cached_reqs
    hits = {one.req_id: int(one.num_computed_tokens) for one in scheduler_output.scheduled_new_reqs}
    for index, request_id in enumerate(cached.req_ids):
        if request_id in cached.resumed_req_ids:
            hits[request_id] = int(cached.num_computed_tokens[index])
    return hits


def _new_blocks(scheduler_output: Any, hits: dict[str, int], block_size: int) -> tuple[int, ...]:
    """Blocks that were given to a request in this step, without those it shares by a hit."""
    blocks: list[int] = []
    for one in scheduler_output.scheduled_new_reqs:
        blocks += one.block_ids[0][hits[one.req_id] // block_size :]
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if ids is not None:
            first = hits[request_id] // block_size if request_id in hits else 0
            blocks += ids[0][first:]
    return tuple(blocks)


def block_size_of(runner: Any) -> int:
    return int(runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def own_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().to("cpu", copy=True)


def _layer_modules(runner: Any, layers: Sequence[int]) -> dict[int, Any]:
    paths = layer_paths(runner)
    for index in layers:
        if index not in paths:
            known = f"0 to {max(paths)}" if paths else "none"
            raise BadInputError(f"the model has no layer {index}; there are {known}")
    model = runner.get_model()
    return {index: model.get_submodule(paths[index]) for index in layers}


def layer_paths(runner: Any) -> dict[int, str]:
    """Decoder layers, by the names of the attention layers in them: index -> module path."""
    names = runner.kv_cache_config.kv_cache_groups[0].layer_names
    found = (_LAYER.match(name) for name in names)
    return {int(match[2]): match[1] for match in found if match is not None}
