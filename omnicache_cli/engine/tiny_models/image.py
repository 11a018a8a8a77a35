"""The `image` kind: a Qwen2.5-VL of about 620 thousand parameters, with its processor files.

An image is one token per 28x28 pixels, 1280 at most: 336x224 is 96 tokens, 1120x672 is 960.
"""

from omnicache_cli.engine.tiny_models.checkpoint import checkpoint_files
from omnicache_cli.engine.tiny_models.tokenizer import (
    EOS_TOKEN,
    PAD_TOKEN,
    VOCAB_SIZE,
    json_bytes,
    special_id,
)

MAX_POSITIONS = 32_768
NUM_HEADS = 4
HEAD_DIM = 32  # the least that vLLM's CPU attention takes
HIDDEN_SIZE = NUM_HEADS * HEAD_DIM  # Qwen2 has no head_dim of its own
PATCH_PIXELS = 14
MERGED_PATCHES = 2  # along each side; one token for 2 x 2 patches
TOKEN_PIXELS = (PATCH_PIXELS * MERGED_PATCHES) ** 2
MAX_IMAGE_TOKENS = 1280


def image_model_files() -> dict[str, bytes]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="bfloat16",
        tie_word_embeddings=False,
        image_token_id=special_id("<|image_pad|>"),
        video_token_id=special_id("<|video_pad|>"),
        vision_start_token_id=special_id("<|vision_start|>"),
        vision_end_token_id=special_id("<|vision_end|>"),
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [4, 6, 6],  # time, height, width: half of head_dim together
            },
            "bos_token_id": None,
            "eos_token_id": special_id(EOS_TOKEN),
            "pad_token_id": special_id(PAD_TOKEN),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": HIDDEN_SIZE,
            "patch_size": PATCH_PIXELS,
            "spatial_merge_size": MERGED_PATCHES,
            "fullatt_block_indexes": [1],  # block 0 sees windows only
        },
    )
    return {
        **checkpoint_files(
            config,
            lambda: Qwen2_5_VLForConditionalGeneration(config),
            max_positions=MAX_POSITIONS,
        ),
        **_processor_files(),
    }


def _processor_files() -> dict[str, bytes]:
    """The two files that Qwen2.5-VL has on the hub."""
    patches = {
        "patch_size": PATCH_PIXELS,
        "merge_size": MERGED_PATCHES,
        "temporal_patch_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "size": {
            "shortest_edge": 4 * TOKEN_PIXELS,  # in spite of the name: pixels of the whole image
            "longest_edge": MAX_IMAGE_TOKENS * TOKEN_PIXELS,
        },
        "processor_class": "Qwen2_5_VLProcessor",
    }
    return {
        "preprocessor_config.json": json_bytes(
            {**patches, "image_processor_type": "Qwen2VLImageProcessor"}
        ),
        "video_preprocessor_config.json": json_bytes(
            {**patches, "video_processor_type": "Qwen2VLVideoProcessor"}
        ),
    }
