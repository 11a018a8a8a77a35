"""The tokenizer of the `omni` kind: one token per byte, Qwen's special tokens by their real ids.

The talker of Qwen3-Omni looks for the ids of a chat's marks in the thinker's tokens, roles
included: a role's name that stands alone is one token, everything else is bytes.
"""

import json
from typing import Any

from omnicache_cli.engine.tiny_models.tokenizer import NUM_BYTES, json_bytes, tokenizer_files

VOCAB_SIZE = 152_064
SPECIAL_IDS = {
    "<|endoftext|>": 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    "<|audio_pad|>": 151_646,
    "<|audio_start|>": 151_647,
    "<|audio_end|>": 151_648,
    "<|vision_start|>": 151_652,
    "<|vision_end|>": 151_653,
    "<|vision_pad|>": 151_654,
    "<|image_pad|>": 151_655,
    "<|video_pad|>": 151_656,
    "<tts_pad>": 151_671,
    "<tts_text_bos>": 151_672,
    "<tts_text_eod>": 151_673,
}
ROLE_IDS = {"system": 8_948, "user": 872, "assistant": 77_091}

_NAMED = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""What the processor asks a tokenizer for, by its names."""

_AUDIO_PART = """\
{%- elif part.type in ('audio', 'input_audio', 'audio_url') or 'audio' in part -%}
{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
"""


def omni_tokenizer_files(max_length_tokens: int) -> dict[str, bytes]:
    """Those of the other kinds, with other ids and audio in the chat template."""
    files = tokenizer_files(max_length_tokens)
    tokenizer: dict[str, Any] = json.loads(files["tokenizer.json"])
    tokenizer["added_tokens"] = [
        _added(token, number, special=special)
        for ids, special in ((ROLE_IDS, False), (SPECIAL_IDS, True))
        for token, number in ids.items()
    ]
    tokenizer["model"]["vocab"] = _without_gaps(
        {name: number for name, number in tokenizer["model"]["vocab"].items() if number < NUM_BYTES}
        | ROLE_IDS
        | SPECIAL_IDS
    )
    config: dict[str, Any] = json.loads(files["tokenizer_config.json"])
    config["additional_special_tokens"] = [
        token for token in SPECIAL_IDS if token not in (config["eos_token"], config["pad_token"])
    ]
    config |= _NAMED
    config["extra_special_tokens"] = _NAMED
    template = files["chat_template.jinja"].decode()
    video = "{%- elif part.type == 'video'"
    return {
        "chat_template.jinja": template.replace(video, _AUDIO_PART + video).encode(),
        "tokenizer.json": json_bytes(tokenizer),
        "tokenizer_config.json": json_bytes(config),
    }


def _without_gaps(vocabulary: dict[str, int]) -> dict[str, int]:
    """The same and a name for every id below the last: vLLM complains of each that has none."""
    names = {number: name for name, number in vocabulary.items()}
    return {names.get(n, f"<unused_{n}>"): n for n in range(max(names) + 1)}


def _added(token: str, number: int, *, special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": token,
        "single_word": not special,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
