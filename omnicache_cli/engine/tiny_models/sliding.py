"""The `sliding` kind: a Gemma 3 of about 200 thousand parameters, window and full layers in turn.

vLLM makes two KV cache groups of it, one per kind of attention, over one pool of blocks.
"""

from omnicache_cli.engine.tiny_models.checkpoint import checkpoint_files
from omnicache_cli.engine.tiny_models.tokenizer import (
    EOS_TOKEN,
    PAD_TOKEN,
    VOCAB_SIZE,
    special_id,
)

MAX_POSITIONS = 32_768
SLIDING_WINDOW = 64
"""Tokens: two blocks of 32."""


def sliding_model_files() -> dict[str, bytes]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM's CPU attention takes
        query_pre_attn_scalar=32,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=special_id(EOS_TOKEN),
        pad_token_id=special_id(PAD_TOKEN),
    )
    return checkpoint_files(config, lambda: Gemma3ForCausalLM(config), max_positions=MAX_POSITIONS)
