"""The `hybrid` kind: a Qwen3-Next of about 600 thousand parameters, three state layers and one of
attention.

The state layers keep one state per sequence instead of keys and values per token; vLLM makes one
KV cache group of each, and sizes all blocks so that a state fits into one.
"""

from omnicache_cli.engine.tiny_models.checkpoint import checkpoint_files, unheard
from omnicache_cli.engine.tiny_models.tokenizer import (
    EOS_TOKEN,
    PAD_TOKEN,
    VOCAB_SIZE,
    special_id,
)

MAX_POSITIONS = 32_768
STATE_HEAD_SIZE = 128
"""What vLLM's kernel for the state on a CPU takes."""


def hybrid_model_files() -> dict[str, bytes]:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM's CPU attention takes
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=STATE_HEAD_SIZE,
        linear_value_head_dim=STATE_HEAD_SIZE,
        mlp_only_layers=[1, 2, 3],  # vLLM wants experts somewhere; a cache does not see them
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=special_id(EOS_TOKEN),
        pad_token_id=special_id(PAD_TOKEN),
    )
    # It would say that kernels are missing which a model without values does not need.
    with unheard(Qwen3NextForCausalLM.__module__):
        return checkpoint_files(
            config, lambda: Qwen3NextForCausalLM(config), max_positions=MAX_POSITIONS
        )
