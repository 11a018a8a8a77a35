"""Random weights for a tiny model: a tensor's values depend on its name and shape alone.

Every value comes from SHAKE-256, so the bytes are the same in every process, on every machine
and with every torch, and no global random state is read or moved. It does not know which kinds
of model there are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from omnicache_cli.engine.tiny_models.tokenizer import PRINTABLE_IDS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Queries are scaled up, so that attention picks out a few positions instead of averaging all:
# a wrong KV block then changes the output instead of drowning in a mean over the prompt.
QUERY_GAIN = 3.0
LOGIT_GAIN = 3.0
# exp(-exp(this) * softplus(1)) is what a recurrent state keeps of itself from token to token,
# here 0.98: it remembers a block, as a state should that stands for a whole prefix.
STATE_DECAY_LOG = -4.0


def random_weights(build: Callable[[], PreTrainedModel]) -> bytes:
    """A safetensors file, in bf16, with every parameter that the model has."""
    import torch
    from safetensors.torch import save

    with torch.device("meta"):  # names and shapes only: no memory, no random numbers
        model = build()
    shapes = {
        one: shape
        for name, empty in model.state_dict().items()
        for one, shape in _in_checkpoint(name, tuple(empty.shape))
    }
    tensors = {name: _filled(name, shape) for name, shape in shapes.items()}
    return save(tensors, metadata={"format": "pt"})


def _in_checkpoint(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as they stand in a checkpoint: transformers keeps all experts of a layer
    in one parameter, a checkpoint has them one by one."""
    prefix, experts, part = name.partition(".mlp.experts.")
    if not experts:
        yield name, shape
        return
    num_experts, rows, columns = shape
    for expert in range(num_experts):
        if part == "gate_up_proj":
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (rows // 2, columns)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (rows // 2, columns)
        else:
            yield f"{prefix}.mlp.experts.{expert}.{part}.weight", (rows, columns)


def random_tensors(shapes: Mapping[str, Sequence[int]], *, series: str) -> bytes:
    """A safetensors file, in bf16, of matrices; another `series` gives other values throughout."""
    import torch
    from safetensors.torch import save

    tensors = {
        name: (_unit_noise(f"{series} {name}", shape) / math.sqrt(shape[-1])).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    return save(tensors, metadata={"format": "pt"})


def _filled(name: str, shape: Sequence[int]) -> torch.Tensor:
    import torch

    noise = _unit_noise(name, shape)
    if name in ("lm_head.weight", "thinker.lm_head.weight"):
        values = noise * (LOGIT_GAIN / math.sqrt(shape[-1]))
        # Only printable characters get a logit other than 0, so greedy output is readable, as
        # long as max_tokens says, and free of image placeholders.
        values[[row for row in range(shape[0]) if row not in PRINTABLE_IDS]] = 0
    elif "embed_tokens" in name:
        values = noise
    elif name.endswith(".bias"):
        values = noise * 0.1
    elif name.endswith(".A_log"):
        values = noise + STATE_DECAY_LOG
    elif len(shape) == 1:  # the weight of a norm
        values = (1 + noise * 0.1) * (QUERY_GAIN if "q_norm" in name else 1)
    else:
        fan_in = math.prod(shape[1:])
        values = noise / math.sqrt(fan_in)
    return values.to(torch.bfloat16)


def _unit_noise(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Uniform, mean 0, standard deviation 1. The division and the product are exact or rounded
    the same everywhere; a normal distribution would need a library's logarithm."""
    import torch

    num_values = math.prod(shape)
    digest = hashlib.shake_256(f"omnicache tiny model {name}".encode()).digest(2 * num_values)
    integers = torch.frombuffer(bytearray(digest), dtype=torch.int16).reshape(shape)
    return integers.to(torch.float32) / 32_768 * math.sqrt(3)
