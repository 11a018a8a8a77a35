"""What the engine's tensors really held, read beside the probe and by other means."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LiveStep:
    """One forward pass: request ids by row, and the attention metadata of each group."""

    request_ids: list[str]
    groups: list[dict[str, Any]]


@contextmanager
def live_steps() -> Iterator[list[LiveStep]]:
    """Copies the metadata of every forward pass while the block runs."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    seen: list[LiveStep] = []
    original = GPUModelRunner._model_forward

    def copying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.execute_model_state is None and self.input_batch.num_reqs:
            metadata = get_forward_context().attn_metadata
            seen.append(
                LiveStep(
                    list(self.input_batch.req_ids),
                    [
                        group_of(metadata[group.layer_names[-1]], self.input_batch.block_table[gid])
                        for gid, group in enumerate(self.kv_cache_config.kv_cache_groups)
                    ],
                )
            )
        return original(self, *args, **kwargs)

    GPUModelRunner._model_forward = copying
    try:
        yield seen
    finally:
        GPUModelRunner._model_forward = original


def group_of(metadata: Any, table: Any) -> dict[str, Any]:
    rows = metadata.block_table.tolist()
    return {
        "num_actual_tokens": metadata.num_actual_tokens,
        "max_query_len": metadata.max_query_len,
        "max_seq_len": metadata.max_seq_len,
        "query_start_loc": metadata.query_start_loc.tolist(),
        "seq_lens": metadata.seq_lens.tolist(),
        "slot_mapping": metadata.slot_mapping.tolist(),
        "block_table": [
            row[: int(used)] for row, used in zip(rows, table.num_blocks_per_row, strict=False)
        ],
        "table_shape": tuple(metadata.block_table.shape),
        "causal": metadata.causal,
    }
