"""From a card's memory to the KV cache's: what vLLM subtracts, as intervals with their sources.

vLLM measures activations and CUDA graphs on the GPU (Worker.determine_available_memory); without
one they are bounds, and the report prints which. Nothing is added that is not listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.kv_size.dtypes import bytes_of
from omnicache_cli.kv_size.hardware import GIB, Card
from omnicache_cli.kv_size.layers import Model
from omnicache_cli.kv_size.options import Settings
from omnicache_cli.kv_size.weights import Weights

DEFAULT_UTILIZATION = 0.92
"""CacheConfig.gpu_memory_utilization of vLLM 0.30."""

MAX_GRAPH_BYTES = 3 * GIB
LARGE_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes, from `low` to `high`, and where the bounds come from."""

    low: int
    high: int
    source: str


@dataclass(frozen=True, slots=True)
class Budget:
    """What is subtracted from the requested share of a card; `parts` by name."""

    card: Card
    utilization: float
    parts: Mapping[str, Interval]

    @property
    def requested_bytes(self) -> int:
        """request_memory (v1/worker/utils.py)."""
        return ceil(self.card.bytes * self.utilization)

    @property
    def available(self) -> Interval:
        low = self.requested_bytes - sum(part.high for part in self.parts.values())
        high = self.requested_bytes - sum(part.low for part in self.parts.values())
        return Interval(low, high, "requested memory less the parts above")

    @property
    def share(self) -> float:
        """The KV cache's share of the card, at most."""
        return self.available.high / self.card.bytes


def budget(
    card: Card,
    utilization: float,
    weights: Interval,
    activations: Interval,
    graphs: Interval,
) -> Budget:
    if not 0 < utilization <= 1:
        raise UsageError(
            f"--gpu-memory-utilization {utilization} is no share; give a number above 0 and up to 1"
        )
    parts = {"weights": weights, "activations": activations, "CUDA graphs": graphs}
    return Budget(card, utilization, parts)


def share_warning(available: int, card: Card) -> str | None:
    share = available / card.bytes
    if share <= LARGE_SHARE:
        return None
    return (
        f"the KV cache takes {share:.0%} of {card.name}: above {LARGE_SHARE:.0%} little is left "
        "for activations and other processes; check the weights, or lower --gpu-memory-utilization"
    )


def weights_interval(
    found: Weights | None, given: int | None, exact: int | None, settings: Settings, model: Model
) -> Interval:
    """Of the heaviest rank. BadInputError: nothing says how many bytes the weights take."""
    if given is not None:
        return Interval(given, given, "--weights, per GPU")
    if exact is not None:
        return Interval(exact, exact, "vLLM's own model on the meta device, first stage")
    if found is None:
        raise BadInputError(
            "no safetensors beside config.json, so the weights' bytes are unknown; "
            "give them with --weights, per GPU, or ask --exact"
        )
    tensor, stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    source = f"safetensors headers of {found.num_files} files"
    if tensor == stages == 1:
        return Interval(found.total_bytes, found.total_bytes, source)
    low = found.total_bytes // (tensor * stages)
    largest = -(-model.num_hidden_layers // stages) / model.num_hidden_layers
    high = ceil(found.matrix_bytes / tensor * largest) + found.vector_bytes
    high = max(high, low)
    return Interval(low, high, f"{source}, split evenly (low) or with vectors repeated (high)")


def activation_interval(settings: Settings, text: Mapping[str, Any], given: int | None) -> Interval:
    """The profile run's peak: what must live at once, and what all buffers of a layer would take.

    One MLP and the logits of max_num_seqs requests do not coincide (low); none of a layer's buffers
    is reused, and logits exist twice more in float32 (high).
    """
    if given is not None:
        return Interval(given, given, "--activation-memory")
    hidden, vocabulary = _size(text, "hidden_size", "n_embd", "d_model"), _size(text, "vocab_size")
    inner = _inner_size(text, hidden)
    size, ranks = bytes_of(settings.dtype), settings.tensor_parallel_size
    tokens = settings.max_num_batched_tokens
    residual = tokens * hidden * size
    mlp = tokens * 3 * inner * size // ranks
    logits = min(settings.max_num_seqs, tokens) * vocabulary
    low = residual + max(mlp, logits * size)
    high = 4 * residual + tokens * 3 * hidden * size + mlp + logits * (size + 8)
    return Interval(
        low,
        high,
        f"bounds from max_num_batched_tokens {tokens:,}, hidden {hidden:,}, inner {inner:,}, "
        f"vocabulary {vocabulary:,}; an encoder's own activations are not in them",
    )


def graph_interval(enforce_eager: bool) -> Interval:
    if enforce_eager:
        return Interval(0, 0, "--enforce-eager")
    return Interval(
        0, MAX_GRAPH_BYTES, "vLLM's own notice that CUDA graphs take up to 3 GiB per GPU"
    )


def _size(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int):
            return value
    raise BadInputError(
        f"the config lacks {' or '.join(names)}, so activations are unknown; give "
        "--activation-memory 1GiB"
    )


def _inner_size(text: Mapping[str, Any], hidden: int) -> int:
    """The MLP's width; for experts the widths of those that a token takes."""
    width = text.get("moe_intermediate_size")
    taken = text.get("num_experts_per_tok")
    dense = text.get("intermediate_size")
    if isinstance(dense, list):
        dense = max(dense)
    if isinstance(width, int) and isinstance(taken, int):
        return max(width * taken, dense if isinstance(dense, int) else 0)
    return dense if isinstance(dense, int) else 4 * hidden
