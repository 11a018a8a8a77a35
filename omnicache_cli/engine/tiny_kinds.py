"""The kinds of tiny model there are; a table that costs nothing to import.

It does not know how one is built: that is `tiny_models`, which has one file per kind.
"""

TINY_MODEL_KINDS: dict[str, str] = {
    "text": "Qwen3, text only: for prefix-cache tests that need nothing but a prompt.",
    "image": "Qwen2.5-VL, text and images: for multimodal prefix hits with a real PNG.",
    "sliding": "Gemma 3, window of 64 tokens in every other layer: two KV cache groups.",
    "mla": "DeepSeek-V3, latent attention: one small vector per token instead of keys and values.",
    "hybrid": "Qwen3-Next, three state layers and one of attention: four KV cache groups.",
    "wide": "The text model, 16 times as wide: results differ by rounding with the batch shape.",
    "lora": "The text model and two adapters: DIR/adapter-a and DIR/adapter-b.",
    "omni": "Qwen3-Omni, for vLLM-Omni: thinker (text, images, sound, experts), talker, code2wav.",
}
