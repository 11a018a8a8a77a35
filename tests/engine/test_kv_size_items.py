"""Tokens of images, videos and sounds against the real processors of transformers."""

from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.kv_size.modalities import item_tokens, parse_audio, parse_image, parse_video

NOWHERE = Path("/nonexistent")
SIZES = [(512, 512), (640, 480), (1920, 1080), (100, 40), (4000, 3000), (28, 28), (333, 777)]
CLIPS = [(512, 512, 16), (640, 480, 7), (1280, 720, 4), (64, 64, 8)]
SECONDS = [0.33, 1.0, 2.5, 7.77, 10.0, 30.0]

QWEN2 = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
QWEN3 = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
LLAVA = {
    "model_type": "llava",
    "vision_config": {"image_size": 336, "patch_size": 14},
    "vision_feature_select_strategy": "default",
    "image_grid_pinpoints": PINPOINTS,
}
ONEVISION_POINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]


def image_tokens(config: dict[str, Any], width: int, height: int) -> int | None:
    return item_tokens(parse_image(f"{width}x{height}"), config, NOWHERE).tokens


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_images_of_qwen(width: int, height: int) -> None:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    picture = Image.new("RGB", (width, height))
    for config, patch in ((QWEN2, 14), (QWEN3, 16)):
        processor = Qwen2VLImageProcessor(patch_size=patch)
        grid = processor(images=[picture], return_tensors="pt")["image_grid_thw"][0]
        assert image_tokens(config, width, height) == int(grid.prod()) // 4


@pytest.mark.parametrize(("width", "height", "frames"), CLIPS)
def test_videos_of_qwen(width: int, height: int, frames: int) -> None:
    import torch
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    clip = torch.zeros(frames, 3, height, width, dtype=torch.uint8)
    for config, kind in ((QWEN2, Qwen2VLVideoProcessor), (QWEN3, Qwen3VLVideoProcessor)):
        found = kind()(videos=[clip], do_sample_frames=False, return_tensors="pt")
        item = parse_video(f"{width}x{height}x{frames}")
        tokens = item_tokens(item, config, NOWHERE).tokens
        assert tokens == int(found["video_grid_thw"][0].prod()) // 4


@pytest.mark.parametrize("seconds", SECONDS)
def test_sounds_of_qwen_and_whisper(seconds: float) -> None:
    import numpy as np
    import torch
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
        _get_feat_extract_output_lengths,
    )

    sound = np.zeros(int(seconds * 16000), dtype=np.float32)
    item = parse_audio(f"{seconds}s")
    for model_type, chunk in (("qwen2_audio", 30), ("qwen2_5_omni", 300)):
        extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=chunk)
        mask = extractor(
            sound,
            sampling_rate=16000,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="np",
        )["attention_mask"]
        frames = int(mask.sum())
        # Qwen2AudioProcessor and Qwen2_5OmniProcessor, __call__
        expected = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        assert item_tokens(item, {"model_type": model_type}, NOWHERE).tokens == expected
    qwen3 = item_tokens(item, {"model_type": "qwen3_omni_moe"}, NOWHERE).tokens
    assert qwen3 == int(_get_feat_extract_output_lengths(torch.tensor(frames)))
    whisper = {"model_type": "whisper", "max_source_positions": 1500}
    assert item_tokens(item, whisper, NOWHERE).tokens == 1500


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_images_of_the_llava_family(width: int, height: int) -> None:
    from transformers import CLIPImageProcessor
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.llava_next.image_processing_llava_next import (
        LlavaNextImageProcessor,
    )
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.llava_onevision.image_processing_llava_onevision import (
        LlavaOnevisionImageProcessor,
    )
    from transformers.models.llava_onevision.processing_llava_onevision import (
        LlavaOnevisionProcessor,
    )

    plain = LlavaProcessor.__new__(LlavaProcessor)
    plain.image_processor = CLIPImageProcessor(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    )
    plain.patch_size, plain.num_additional_image_tokens = 14, 1
    plain.vision_feature_select_strategy = "default"
    found = plain._get_num_multimodal_tokens(image_sizes=[(height, width)])
    assert image_tokens(LLAVA, width, height) == found["num_image_tokens"][0]

    following = LlavaNextProcessor.__new__(LlavaNextProcessor)
    following.image_processor = LlavaNextImageProcessor(
        size={"shortest_edge": 336},
        crop_size={"height": 336, "width": 336},
        image_grid_pinpoints=PINPOINTS,
    )
    following.patch_size, following.num_additional_image_tokens = 14, 1
    following.vision_feature_select_strategy = "default"
    found = following._get_num_multimodal_tokens(image_sizes=[(height, width)])
    config = {**LLAVA, "model_type": "llava_next"}
    assert image_tokens(config, width, height) == found["num_image_tokens"][0]

    one = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    one.image_processor = LlavaOnevisionImageProcessor(image_grid_pinpoints=ONEVISION_POINTS)
    one.num_image_tokens, one.vision_feature_select_strategy = 729, "full"
    one.vision_aspect_ratio = "anyres_max_9"
    found = one._get_num_multimodal_tokens(image_sizes=[(height, width)])
    config = {
        "model_type": "llava_onevision",
        "vision_config": {"image_size": 384, "patch_size": 14},
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": ONEVISION_POINTS,
    }
    assert image_tokens(config, width, height) == found["num_image_tokens"][0]


def test_images_of_gemma_3_have_one_size() -> None:
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    processor = Gemma3Processor.__new__(Gemma3Processor)
    processor.image_seq_length = 256
    found = processor._get_num_multimodal_tokens(image_sizes=[(800, 600)])

    config = {"model_type": "gemma3", "mm_tokens_per_image": 256}
    assert image_tokens(config, 600, 800) == 256
    assert found["num_image_tokens"] == [256]
