"""The `text` kind: a Qwen3 of about 130 thousand parameters; and the `wide` kind, of 19 million."""

from omnicache_cli.engine.tiny_models.checkpoint import checkpoint_files
from omnicache_cli.engine.tiny_models.tokenizer import (
    EOS_TOKEN,
    PAD_TOKEN,
    VOCAB_SIZE,
    special_id,
)

MAX_POSITIONS = 40_960
HIDDEN_SIZE = 64
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 32  # the least that vLLM's CPU attention takes


def text_model_files() -> dict[str, bytes]:
    return _qwen3_files(hidden_size=HIDDEN_SIZE, intermediate_size=128, head_dim=HEAD_DIM)


def wide_model_files() -> dict[str, bytes]:
    """Wide enough that a matrix product of another shape is summed in another order."""
    return _qwen3_files(hidden_size=1024, intermediate_size=2048, head_dim=128)


def _qwen3_files(*, hidden_size: int, intermediate_size: int, head_dim: int) -> dict[str, bytes]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=special_id(EOS_TOKEN),
        pad_token_id=special_id(PAD_TOKEN),
    )
    return checkpoint_files(config, lambda: Qwen3ForCausalLM(config), max_positions=MAX_POSITIONS)
