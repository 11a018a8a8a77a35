"""The `omni` kind: a Qwen3-Omni-MoE of 27 million parameters: thinker, talker and code2wav.

Nearly all of them are two tables of 152,064 rows: the stages find each other's tokens by their
real ids. An image is one token per 32x32 pixels, a second of sound 13 tokens.
"""

from omnicache_cli.engine.tiny_models.checkpoint import unheard
from omnicache_cli.engine.tiny_models.omni_tokenizer import (
    SPECIAL_IDS,
    VOCAB_SIZE,
    omni_tokenizer_files,
)
from omnicache_cli.engine.tiny_models.tokenizer import EOS_TOKEN, PAD_TOKEN, json_bytes
from omnicache_cli.engine.tiny_models.weights import random_weights

MAX_POSITIONS = 32_768
HIDDEN_SIZE = 64
HEAD_DIM = 32  # the least that vLLM's CPU attention takes
THINKER_LAYERS = 4
LAYER_FOR_TALKER = 2
"""The talker gets this layer's outputs and those of layer 0."""

PATCH_PIXELS = 16
MERGED_PATCHES = 2  # along each side; one token for 2 x 2 patches
PATCHES_PER_SIDE = 14
TOKEN_PIXELS = (PATCH_PIXELS * MERGED_PATCHES) ** 2
CODE_GROUPS = 16

_ATTENTION = {
    "hidden_size": HIDDEN_SIZE,
    "head_dim": HEAD_DIM,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
_EXPERTS = {
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "mrope_section": [6, 5, 5],  # time, height, width: half of head_dim together
        "mrope_interleaved": True,
        "interleaved": True,
    },
}


def omni_model_files() -> dict[str, bytes]:
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    # It would say that the talker's mrope_section is unknown; the real model has it there too.
    with unheard("transformers.modeling_rope_utils"):
        config = Qwen3OmniMoeConfig(
            architectures=["Qwen3OmniMoeForConditionalGeneration"],
            dtype="bfloat16",
            thinker_config=_thinker(),
            talker_config=_talker(),
            code2wav_config=_code2wav(),
            enable_audio_output=True,
        )
    ends = {"eos_token_id": SPECIAL_IDS[EOS_TOKEN], "pad_token_id": SPECIAL_IDS[PAD_TOKEN]}
    return {
        "config.json": config.to_json_string().encode(),
        "generation_config.json": json_bytes(ends),
        "model.safetensors": random_weights(lambda: Qwen3OmniMoeForConditionalGeneration(config)),
        **omni_tokenizer_files(MAX_POSITIONS),
        **_processor_files(),
    }


def _thinker() -> dict[str, object]:
    return {
        "dtype": "bfloat16",
        "text_config": {
            **_ATTENTION,
            **_EXPERTS,
            "vocab_size": VOCAB_SIZE,
            "num_hidden_layers": THINKER_LAYERS,
            "eos_token_id": SPECIAL_IDS[EOS_TOKEN],
            "pad_token_id": SPECIAL_IDS[PAD_TOKEN],
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": HIDDEN_SIZE,
            "patch_size": PATCH_PIXELS,
            "spatial_merge_size": MERGED_PATCHES,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [0, 1],
            "image_size": PATCHES_PER_SIDE * PATCH_PIXELS,
            "num_position_embeddings": PATCHES_PER_SIDE**2,
            "apply_vit_abs_pos_embed": True,
        },
        "audio_config": {
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "downsample_hidden_size": 32,
            "output_dim": HIDDEN_SIZE,
        },
    }


def _talker() -> dict[str, object]:
    return {
        "dtype": "bfloat16",
        "thinker_hidden_size": HIDDEN_SIZE,
        "spatial_merge_size": MERGED_PATCHES,
        "accept_hidden_layer": LAYER_FOR_TALKER,
        "num_code_groups": CODE_GROUPS,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"ethan": 2302},
        "text_config": {
            **_ATTENTION,
            **_EXPERTS,
            "vocab_size": 3072,
            "num_hidden_layers": 2,
            "shared_expert_intermediate_size": 32,
        },
        "code_predictor_config": {
            **_ATTENTION,
            "vocab_size": 2048,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_code_groups": CODE_GROUPS,
        },
    }


def _code2wav() -> dict[str, object]:
    return {
        "dtype": "bfloat16",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "num_quantizers": CODE_GROUPS,
        "decoder_dim": 64,
    }


def _processor_files() -> dict[str, bytes]:
    """Pictures and sound, as the model's own files on the hub have them."""
    patches = {
        "patch_size": PATCH_PIXELS,
        "merge_size": MERGED_PATCHES,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {
            "shortest_edge": 4 * TOKEN_PIXELS,  # in spite of the name: pixels of the whole image
            "longest_edge": 1280 * TOKEN_PIXELS,
        },
        "processor_class": "Qwen3OmniMoeProcessor",
    }
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "n_samples": 4_800_000,
        "nb_max_frames": 30_000,
        "padding_side": "right",
        "padding_value": 0.0,
        "dither": 0.0,
        "return_attention_mask": True,
    }
    return {
        "preprocessor_config.json": json_bytes(
            {**patches, **sound, "image_processor_type": "Qwen2VLImageProcessor"}
        ),
        "video_preprocessor_config.json": json_bytes(
            {**patches, "video_processor_type": "Qwen2VLVideoProcessor"}
        ),
    }
