"""The tokenizer of all tiny models: one token per UTF-8 byte, the token id is the byte.

A prompt of 200 ASCII characters is 200 tokens, which makes expected numbers easy to see, and
every string survives the round trip. The special tokens are Qwen's, with other ids.
It does not know the models.
"""

import json

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
PRINTABLE_IDS = frozenset(range(0x20, 0x7F))

PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"

# Content is a string, or a list of parts as in an OpenAI request.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def special_id(token: str) -> int:
    return NUM_BYTES + SPECIAL_TOKENS.index(token)


def tokenizer_files(max_length_tokens: int) -> dict[str, bytes]:
    """What `AutoTokenizer` and `AutoProcessor` read."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length_tokens,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "additional_special_tokens": [
            token for token in SPECIAL_TOKENS if token not in (EOS_TOKEN, PAD_TOKEN)
        ],
    }
    return {
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json_bytes(config),
    }


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def generation_config() -> bytes:
    return json_bytes(
        {"eos_token_id": special_id(EOS_TOKEN), "pad_token_id": special_id(PAD_TOKEN)}
    )


def _byte_vocabulary() -> dict[str, int]:
    """Each byte under the character by which GPT-2's byte-level scheme writes it."""
    shown_as_itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    vocabulary = {}
    num_shifted = 0
    for byte in range(NUM_BYTES):
        if byte in shown_as_itself:
            vocabulary[chr(byte)] = byte
        else:
            vocabulary[chr(NUM_BYTES + num_shifted)] = byte
            num_shifted += 1
    return vocabulary
