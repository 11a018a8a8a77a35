"""The `mla` kind: a DeepSeek-V3 of about 500 thousand parameters, with latent attention.

All its layers are dense: experts would add weight and nothing to a KV cache.
"""

from omnicache_cli.engine.tiny_models.checkpoint import checkpoint_files
from omnicache_cli.engine.tiny_models.tokenizer import (
    EOS_TOKEN,
    PAD_TOKEN,
    VOCAB_SIZE,
    special_id,
)

MAX_POSITIONS = 32_768
NUM_LAYERS = 2
LATENT_SIZE = 512
ROPE_SIZE = 64
"""vLLM's kernels know few sums of the two; 512 + 64 is DeepSeek's own."""


def mla_model_files() -> dict[str, bytes]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        first_k_dense_replace=NUM_LAYERS,
        num_mtp_layers=0,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=LATENT_SIZE,
        qk_rope_head_dim=ROPE_SIZE,
        qk_nope_head_dim=32,
        v_head_dim=32,
        topk_method="noaux_tc",
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=special_id(EOS_TOKEN),
        pad_token_id=special_id(PAD_TOKEN),
    )
    return checkpoint_files(
        config, lambda: DeepseekV3ForCausalLM(config), max_positions=MAX_POSITIONS
    )
