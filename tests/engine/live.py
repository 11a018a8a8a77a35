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
                        READERS[type(metadata[group.layer_names[-1]]).__name__](
                            metadata[group.layer_names[-1]], self, self.input_batch.block_table[gid]
                        )
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


def attention(metadata: Any, runner: Any, table: Any) -> dict[str, Any]:
    """Everything stands in the metadata."""
    del runner
    return {
        "num_actual_tokens": metadata.num_actual_tokens,
        "max_query_len": metadata.max_query_len,
        "max_seq_len": metadata.max_seq_len,
        "query_start_loc": metadata.query_start_loc.tolist(),
        "seq_lens": metadata.seq_lens.tolist(),
        "slot_mapping": metadata.slot_mapping.tolist(),
        "block_table": used_columns(metadata.block_table, table),
        "table_shape": tuple(metadata.block_table.shape),
        "causal": metadata.causal,
    }


def latent(metadata: Any, runner: Any, table: Any) -> dict[str, Any]:
    """MLA: the requests that decode stand before the others, each kind with its own tensors."""
    import torch

    tables, lens = [], []
    if metadata.decode is not None:
        tables.append(metadata.decode.block_table)
        lens += metadata.decode.seq_lens.tolist()
    if metadata.prefill is not None:
        tables.append(metadata.prefill.block_table)
        lens += runner.seq_lens[metadata.num_decodes : metadata.num_reqs].tolist()
    return {
        "num_actual_tokens": metadata.num_actual_tokens,
        "max_query_len": metadata.max_query_len,
        "max_seq_len": metadata.max_seq_len,
        "query_start_loc": metadata.query_start_loc.tolist(),
        "seq_lens": lens,
        "slot_mapping": metadata.slot_mapping.tolist(),
        "block_table": used_columns(torch.cat(tables), table),
        "table_shape": None,
        "causal": metadata.causal,
    }


def states(metadata: Any, runner: Any, table: Any) -> dict[str, Any]:
    """Mamba and its like: one state per request, in the block that its last token falls into."""
    num_reqs = len(metadata.non_spec_query_start_loc) - 1
    lens = runner.seq_lens[:num_reqs].tolist()
    rows = used_columns(table.get_device_tensor(num_reqs), table)
    assert metadata.non_spec_state_indices_tensor.tolist() == [
        row[(length - 1) // table.block_size] for row, length in zip(rows, lens, strict=True)
    ]
    return {
        "num_actual_tokens": metadata.num_actual_tokens,
        "max_query_len": None,
        "max_seq_len": None,
        "query_start_loc": metadata.non_spec_query_start_loc.tolist(),
        "seq_lens": lens,
        "slot_mapping": None,
        "block_table": rows,
        "table_shape": None,
        "causal": None,
    }


READERS = {
    "CPUAttentionMetadata": attention,
    "MLACommonMetadata": latent,
    "GDNAttentionMetadata": states,
}
"""By the class of the metadata."""


def used_columns(block_table: Any, table: Any) -> list[list[int]]:
    return [
        row[: int(used)]
        for row, used in zip(block_table.tolist(), table.num_blocks_per_row, strict=False)
    ]
