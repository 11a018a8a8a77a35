"""What an omni stage hands on beside the rows per token: lists, and tensors of a whole request.

A tensor prefix cache must pass it on as the model put it out: on a hit as on a miss, never cut
into rows.
"""

from torch import Tensor

from omnicache_cli.verify.compare import Difference, compare_rows


def what_became(given: Tensor | None, found: Tensor | None) -> str | None:
    """Of one key of one step: what the model put out against what was handed on, bit for bit.

    None: it came through as it was.
    """
    if given is None:
        if found is None:
            return None
        return f"{_shape(found)} was handed on, and the model did not put it out"
    if found is None:
        return "the model put it out, and it was not handed on"
    if given.shape != found.shape or given.dtype != found.dtype:
        return f"{_shape(found)} was handed on, the model put out {_shape(given)}"
    if not given.numel():
        return None
    gap = _difference(given, found)
    if gap.first_position is None:
        return None
    return f"what was handed on is off by up to {gap.max_abs_error:.2g} from what the model put out"


def _difference(one: Tensor, other: Tensor) -> Difference:
    return compare_rows(one.reshape(1, -1), other.reshape(1, -1), (0,))


def _shape(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
