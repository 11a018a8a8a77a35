"""What passed between the stages of a pipeline, with the cache and without: read and compared.

Payloads are matched by stage, direction and order: requests are sent one at a time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnicache_cli.errors import EngineFailedError
from omnicache_cli.verify.compare import compare_rows

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".payload.safetensors"
ERROR_SUFFIX = ".payload-error.txt"
META = "omnicache"
"""Key of the file's meta data: a JSON object."""


class Direction(StrEnum):
    SENT = "sent"
    RECEIVED = "received"
    OUTPUT = "output"  # given to the pipeline's user


@dataclass(frozen=True, slots=True)
class Crossing:
    """One payload of one request."""

    stage_id: int  # of the stage that sent or received it
    stage: str
    direction: Direction
    number: int  # by order, of this stage and direction
    request: str
    tensors: Mapping[str, "Tensor"]


class Crossed(StrEnum):
    """What became of one key of one payload; in the order of severity."""

    EQUAL = "equal"
    UNSTABLE = "not comparable"  # runs without a cache differ among themselves
    CORRUPTION = "corruption"


@dataclass(frozen=True, slots=True)
class KeyResult:
    """One key of one payload, with the cache against without."""

    stage: str
    stage_id: int
    direction: Direction
    number: int  # of the request
    key: str
    verdict: Crossed
    shape: tuple[int, ...] | None  # with the cache; None: it was not there
    diagnosis: str = ""
    max_abs_error: float | None = None  # against the run without a cache
    run_to_run: float | None = None  # the same of two runs without a cache; None: other shapes


def read_crossings(folder: Path) -> list[Crossing]:
    """EngineFailedError: a process could not keep a payload."""
    from safetensors import safe_open

    for path in sorted(folder.glob(f"*{ERROR_SUFFIX}")):
        raise EngineFailedError(f"a payload was not kept: {path.read_text(encoding='utf-8')}")
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with safe_open(path, framework="pt") as stored:
            meta = json.loads(stored.metadata()[META])
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
        direction = Direction(meta.pop("direction"))
        found.append(Crossing(**meta, direction=direction, tensors=tensors))
    return found


Place = tuple[int, Direction, int]


def compare_crossings(
    cold: Sequence[Crossing], again: Sequence[Crossing], warm: Sequence[Crossing]
) -> list[KeyResult]:
    """`cold` and `again`: the same requests without a cache, twice; `warm`: with it."""
    of_cold, of_again, of_warm = (_by_place(one) for one in (cold, again, warm))
    results = []
    for place in sorted({*of_cold, *of_warm}):
        known = of_cold.get(place) or of_warm[place]
        sides = [_tensors(one.get(place)) for one in (of_cold, of_again, of_warm)]
        for key in dict.fromkeys(key for side in sides for key in side):
            results.append(_key(known, key, [side.get(key) for side in sides]))
    return [*results, *_on_the_way(warm)]


def _on_the_way(crossings: Sequence[Crossing]) -> Iterator[KeyResult]:
    """What a stage received must be what the stage before sent."""
    sent = {one.request: one for one in crossings if one.direction is Direction.SENT}
    received = [one for one in crossings if one.direction is Direction.RECEIVED]
    for one in received:
        by_stage = [
            other
            for other in crossings
            if other.direction is Direction.SENT
            and other.number == one.number
            and other.stage_id == one.stage_id - 1
        ]
        source = by_stage[0] if by_stage else sent.get(one.request)
        if source is None:
            continue
        for key, value in one.tensors.items():
            other = source.tensors.get(key)
            if other is not None and _gap(other, value) != 0:
                text = f"it is not what stage {source.stage} sent"
                yield _result(one, key, Crossed.CORRUPTION, value, text)


def _by_place(crossings: Sequence[Crossing]) -> dict[Place, Crossing]:
    return {(one.stage_id, one.direction, one.number): one for one in crossings}


def _tensors(one: Crossing | None) -> Mapping[str, "Tensor"]:
    return {} if one is None else one.tensors


def _key(known: Crossing, key: str, sides: Sequence["Tensor | None"]) -> KeyResult:
    cold, again, warm = sides
    error, noise = _gap(cold, warm), _gap(cold, again)
    if noise != 0:
        how = "two runs without a cache differ"
        how += " in shape" if noise is None else f" by up to {noise:.2g}"
        return _result(known, key, Crossed.UNSTABLE, warm, how, error, noise)
    if error == 0:
        return _result(known, key, Crossed.EQUAL, warm, "", error, noise)
    if warm is None:
        how = "it did not pass with the cache on"
    elif cold is None:
        how = "it passed with the cache on only"
    elif error is None:
        how = f"{_shape(warm)}, without a cache {_shape(cold)}"
    else:
        how = f"off by up to {error:.2g}, and two runs without a cache are equal"
    return _result(known, key, Crossed.CORRUPTION, warm, how, error, noise)


def _result(
    known: Crossing,
    key: str,
    verdict: Crossed,
    value: "Tensor | None",
    diagnosis: str,
    error: float | None = None,
    noise: float | None = None,
) -> KeyResult:
    shape = None if value is None else tuple(value.shape)
    return KeyResult(
        known.stage,
        known.stage_id,
        known.direction,
        known.number,
        key,
        verdict,
        shape,
        diagnosis,
        error,
        noise,
    )


def _gap(one: "Tensor | None", other: "Tensor | None") -> float | None:
    """Largest difference, 0 only if all bits agree; None: they cannot be compared."""
    if one is None and other is None:
        return 0.0
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return None
    if not one.numel():
        return 0.0
    flat = [_as_numbers(value).reshape(1, -1) for value in (one, other)]
    gap = compare_rows(flat[0], flat[1], (0,))
    if gap.first_position is None:
        return 0.0
    return gap.max_abs_error or float("inf")


def _as_numbers(value: "Tensor") -> Any:
    import torch

    return value.to(torch.uint8) if value.dtype is torch.bool else value


def _shape(value: "Tensor") -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
