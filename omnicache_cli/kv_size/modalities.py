"""How many tokens an image, a video or a sound takes, by each model's processor in transformers.

Counts placeholder tokens, which are what the KV cache holds for the item; the few marker tokens
around it belong to the text. Sizes come from preprocessor_config.json where the folder has one,
else from the defaults of the processor's class, and the result says which.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnicache_cli.errors import BadInputError, UsageError

SAMPLE_RATE = 16_000
HOP = 160
"""Samples per frame of the Whisper feature extractor: 100 frames a second."""


@dataclass(frozen=True, slots=True)
class Item:
    """One image, video or sound as asked for."""

    modality: str
    text: str  # as typed
    width: int = 0
    height: int = 0
    frames: int = 0  # of a video, as sampled
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ItemTokens:
    """`tokens` is None where this model's processor is not known here; then `source` says why."""

    item: Item
    tokens: int | None
    source: str


def parse_image(text: str) -> Item:
    match = re.fullmatch(r"([0-9]+)x([0-9]+)", text)
    if match is None or "0" in match.groups():
        raise UsageError(f"--image {text!r}: write width x height in pixels, such as 512x512")
    return Item("image", text, int(match.group(1)), int(match.group(2)))


def parse_video(text: str) -> Item:
    """512x512x16 is 16 frames as the model gets them."""
    match = re.fullmatch(r"([0-9]+)x([0-9]+)x([0-9]+)", text)
    if match is None or "0" in match.groups():
        raise UsageError(f"--video {text!r}: write width x height x sampled frames: 512x512x16")
    width, height, frames = map(int, match.groups())
    return Item("video", text, width, height, frames)


def parse_audio(text: str) -> Item:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*s?", text)
    if match is None or float(match.group(1)) <= 0:
        raise UsageError(f"--audio {text!r}: write seconds, such as 30s")
    return Item("audio", text, seconds=float(match.group(1)))


def item_tokens(item: Item, config: Mapping[str, Any], folder: Path) -> ItemTokens:
    """BadInputError: the processor refuses such an item."""
    model_type = str(config.get("model_type", ""))
    counter = _COUNTERS.get((model_type, item.modality))
    if counter is None:
        return ItemTokens(
            item, None, f"unknown: no {item.modality} processor is known here for {model_type!r}"
        )
    processor, source = _processor_config(folder)
    return ItemTokens(item, counter(item, config, processor), source)


def _processor_config(folder: Path) -> tuple[Mapping[str, Any], str]:
    path = folder / "preprocessor_config.json"
    if not path.exists():
        return {}, "the processor class's defaults and config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} cannot be read as JSON: {error}; mend or remove it") from None
    return values, "preprocessor_config.json"


# -- Qwen -------------------------------------------------------------------------------------


def _smart_resize(
    height: int, width: int, factor: int, low: int, high: int, frames: int = 1, padded: int = 1
) -> tuple[int, int]:
    """smart_resize of Qwen2-VL (images, frames 1) and Qwen3-VL (videos)."""
    if max(height, width) / min(height, width) > 200:
        raise BadInputError(
            f"an item of {width}x{height} is too narrow: the processor takes ratios up to 200"
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if padded * new_height * new_width > high:
        beta = math.sqrt(frames * height * width / high)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif padded * new_height * new_width < low:
        beta = math.sqrt(low / (frames * height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def _bounds(processor: Mapping[str, Any], low: int, high: int) -> tuple[int, int]:
    """min_pixels and max_pixels, or size with edges, as Qwen2VLImageProcessor reads them."""
    size = processor.get("size")
    if isinstance(size, Mapping):
        low = size.get("shortest_edge") or size.get("min_pixels") or low
        high = size.get("longest_edge") or size.get("max_pixels") or high
    return processor.get("min_pixels") or low, processor.get("max_pixels") or high


def _patch(
    config: Mapping[str, Any], processor: Mapping[str, Any], default: int
) -> tuple[int, int, int]:
    """(patch, merge, temporal patch) of the vision tower."""
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    patch = processor.get("patch_size") or vision.get("patch_size") or default
    merge = processor.get("merge_size") or vision.get("spatial_merge_size") or 2
    return patch, merge, processor.get("temporal_patch_size") or 2


def _qwen_image(patch: int, low: int, high: int) -> "Counter":
    def count(item: Item, config: Mapping[str, Any], processor: Mapping[str, Any]) -> int:
        size, merge, _ = _patch(config, processor, patch)
        factor = size * merge
        height, width = _smart_resize(
            item.height, item.width, factor, *_bounds(processor, low, high)
        )
        return (height // factor) * (width // factor)

    return count


def _qwen2_video(item: Item, config: Mapping[str, Any], _: Mapping[str, Any]) -> int:
    """Qwen2VLVideoProcessor: each frame is resized by the bounds of one frame."""
    size, merge, temporal = _patch(config, {}, 14)
    factor = size * merge
    height, width = _smart_resize(item.height, item.width, factor, 128 * 28 * 28, 28 * 28 * 768)
    return math.ceil(item.frames / temporal) * (height // factor) * (width // factor)


def _qwen3_video(item: Item, config: Mapping[str, Any], _: Mapping[str, Any]) -> int:
    """Qwen3VLVideoProcessor: the bounds are for all frames together."""
    size, merge, temporal = _patch(config, {}, 16)
    factor = size * merge
    if item.height < factor or item.width < factor:
        raise BadInputError(f"a video of {item.text} is smaller than the processor's {factor} px")
    padded = math.ceil(item.frames / temporal) * temporal
    height, width = _smart_resize(
        item.height,
        item.width,
        factor,
        128 * 32 * 32,
        32 * 32 * 768,
        frames=item.frames,
        padded=padded,
    )
    return padded // temporal * (height // factor) * (width // factor)


# -- audio ------------------------------------------------------------------------------------


def _frames(item: Item) -> int:
    """Of the Whisper feature extractor, which does not look beyond its chunk."""
    return math.ceil(item.seconds * SAMPLE_RATE / HOP)


def _pooled_audio(longest_seconds: float) -> "Counter":
    """Qwen2-Audio and Qwen2.5-Omni: two halvings; longer sounds are cut."""

    def count(item: Item, _: Mapping[str, Any], __: Mapping[str, Any]) -> int:
        frames = min(_frames(item), round(longest_seconds * SAMPLE_RATE / HOP))
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1

    return count


def _qwen3_omni_audio(item: Item, _: Mapping[str, Any], __: Mapping[str, Any]) -> int:
    """_get_feat_extract_output_lengths: 13 tokens per 100 frames."""
    frames = _frames(item)
    left = frames % 100
    halved = (left - 1) // 2 + 1
    return ((halved - 1) // 2 + 1 - 1) // 2 + 1 + frames // 100 * 13


def _whisper_audio(item: Item, config: Mapping[str, Any], _: Mapping[str, Any]) -> int:
    """Encoder positions per chunk of 30 s, however short: they are what cross attention caches."""
    positions = config.get("max_source_positions")
    if not isinstance(positions, int):
        raise BadInputError("the config lacks max_source_positions; complete the config.json")
    return positions * math.ceil(item.seconds / 30)


# -- LLaVA, Gemma -------------------------------------------------------------------------------


def _vision(config: Mapping[str, Any], name: str) -> int:
    vision = config.get("vision_config")
    value = vision.get(name) if isinstance(vision, Mapping) else None
    if not isinstance(value, int):
        raise BadInputError(
            f"the config lacks vision_config.{name}, so an image's tokens are unknown"
        )
    return value


def _grid(config: Mapping[str, Any]) -> int:
    return _vision(config, "image_size") // _vision(config, "patch_size")


def _llava_image(item: Item, config: Mapping[str, Any], _: Mapping[str, Any]) -> int:
    """Every image becomes one square; strategy "full" keeps the class token."""
    return _grid(config) ** 2 + (config.get("vision_feature_select_strategy") == "full")


def _llava_next_image(item: Item, config: Mapping[str, Any], _: Mapping[str, Any]) -> int:
    """LlavaNextProcessor._get_number_of_features: a base image, tiles without padding, newlines."""
    height, width = _unpadded(item, config)
    return height * width + height + _llava_image(item, config, {})


def _onevision_image(item: Item, config: Mapping[str, Any], _: Mapping[str, Any]) -> int:
    """LlavaOnevisionProcessor: as LLaVA-NeXT, shrunk where the tiles are more than anyres_max_N."""
    height, width = _unpadded(item, config)
    side = _grid(config)
    most = int(str(config.get("vision_aspect_ratio", "anyres_max_9")).rpartition("_")[2])
    ratio = math.sqrt(height * width / (most * side**2))
    if ratio > 1.1:
        height, width = int(height // ratio), int(width // ratio)
    return height * width + height + side**2


def _unpadded(item: Item, config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of features of the best tiling, less its padding."""
    size, side = _vision(config, "image_size"), _grid(config)
    points = config.get("image_grid_pinpoints")
    if not isinstance(points, list):
        raise BadInputError(
            "the config lacks image_grid_pinpoints, so an image's tokens are unknown"
        )
    best_height, best_width = _best_resolution(item.height, item.width, points)
    height, width = side * (best_height // size), side * (best_width // size)
    if item.width / item.height > width / height:
        new = int(round(item.height * (width / item.width), 7))
        return height - (height - new) // 2 * 2, width
    new = int(round(item.width * (height / item.height), 7))
    return height, width - (width - new) // 2 * 2


def _best_resolution(height: int, width: int, points: Sequence[Sequence[int]]) -> Sequence[int]:
    """select_best_resolution (image_processing_utils.py)."""
    best: Sequence[int] = points[0]
    most, least = 0, math.inf
    for point in points:
        scale = min(point[1] / width, point[0] / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        wasted = point[0] * point[1] - effective
        if effective > most or (effective == most and wasted < least):
            best, most, least = point, effective, wasted
    return best


def _gemma3_image(item: Item, config: Mapping[str, Any], _: Mapping[str, Any]) -> int:
    """mm_tokens_per_image, whatever the size; pan and scan is off by default."""
    tokens = config.get("mm_tokens_per_image")
    return tokens if isinstance(tokens, int) else 256


Counter = Callable[[Item, Mapping[str, Any], Mapping[str, Any]], int]

_QWEN2 = _qwen_image(14, 56 * 56, 28 * 28 * 1280)
_QWEN3 = _qwen_image(16, 56 * 56, 28 * 28 * 1280)

_COUNTERS: dict[tuple[str, str], Counter] = {
    **{
        (name, "image"): _QWEN2
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen2_5_omni_thinker")
    },
    **{
        (name, "image"): _QWEN3
        for name in (
            *("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker"),
            *("qwen3_5", "qwen3_5_moe"),
        )
    },
    **{
        (name, "video"): _qwen2_video
        for name in (
            *("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen2_5_omni_thinker"),
            *("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        )
    },
    **{(name, "video"): _qwen3_video for name in ("qwen3_vl", "qwen3_vl_moe")},
    ("qwen2_audio", "audio"): _pooled_audio(30),
    ("qwen2_5_omni", "audio"): _pooled_audio(300),
    ("qwen2_5_omni_thinker", "audio"): _pooled_audio(300),
    ("qwen3_omni_moe", "audio"): _qwen3_omni_audio,
    ("qwen3_omni_moe_thinker", "audio"): _qwen3_omni_audio,
    ("whisper", "audio"): _whisper_audio,
    ("llava", "image"): _llava_image,
    ("llava_next", "image"): _llava_next_image,
    ("llava_onevision", "image"): _onevision_image,
    ("gemma3", "image"): _gemma3_image,
}
