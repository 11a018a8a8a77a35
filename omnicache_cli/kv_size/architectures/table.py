"""Which family reads which architecture, and where the text config of each lies.

`absent` names the fields whose absence from config.json means what the family's code does with
None; a field that is absent and not named there sends the reader to the config class.
"""

from collections.abc import Callable
from dataclasses import dataclass

from omnicache_cli.kv_size.architectures import decoder as d
from omnicache_cli.kv_size.architectures import hybrid as h
from omnicache_cli.kv_size.architectures import latent as m
from omnicache_cli.kv_size.architectures.encoder_decoder import whisper
from omnicache_cli.kv_size.architectures.sink import mimo_v2, step3p5
from omnicache_cli.kv_size.fields import Fields
from omnicache_cli.kv_size.layers import Model

Read = Callable[[Fields, str], Model]

HEADS = frozenset({"head_dim", "num_key_value_heads"})
NO_WINDOW = frozenset({"sliding_window", "layer_types"})
LLAMA = HEADS | NO_WINDOW
QWEN2 = HEADS | {"layer_types", "use_sliding_window", "sliding_window"}
QWEN3 = QWEN2 - {"head_dim"}
MLA = frozenset(
    {"index_topk", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset", "head_dim"}
)


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture is read."""

    read: Read
    absent: frozenset[str] = frozenset()


_PLAIN = d.decoder()
_WINDOWS = d.decoder(d.by_layer_types)
_IF_USED = d.decoder(d.window_if_used)
_MHA = d.decoder(heads=d.all_heads)
_SPLIT = d.decoder(size=d.split_head_size)
_SPLIT_MHA = d.decoder(size=d.split_head_size, heads=d.all_heads)

_FAMILIES: dict[str, tuple[Family, str]] = {
    "llama": (
        Family(_WINDOWS, LLAMA),
        "LlamaForCausalLM LLaMAForCausalLM EagleLlamaForCausalLM LlamaForCausalLMEagle3 "
        "Eagle3LlamaForCausalLM ArceeForCausalLM AriaForConditionalGeneration "
        "CwmForCausalLM InternLM3ForCausalLM IQuestCoderForCausalLM "
        "LlavaForConditionalGeneration LlavaNextForConditionalGeneration "
        "LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration "
        "Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration "
        "InternVLForConditionalGeneration AudioFlamingo3ForConditionalGeneration "
        "Qwen2AudioForConditionalGeneration HyperCLOVAXForCausalLM GlmAsrForConditionalGeneration "
        "Ministral3ForCausalLM Mistral3ForConditionalGeneration GlmForCausalLM ",
    ),
    "mistral": (Family(_WINDOWS, HEADS | {"layer_types"}), "MistralForCausalLM"),
    "plain": (
        Family(_PLAIN, HEADS | {"layer_types"}),
        "MixtralForCausalLM CohereForCausalLM NemotronForCausalLM Phi3ForCausalLM "
        "SeedOssForCausalLM OlmoeForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM "
        "GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4vForConditionalGeneration "
        "GlmOcrForConditionalGeneration GraniteMoeForCausalLM GraniteMoeSharedForCausalLM "
        "GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration "
        "HYV3ForCausalLM HrmTextForCausalLM Jais2ForCausalLM MiniMaxM2ForCausalLM "
        "PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration "
        "ApertusForCausalLM PhiMoEForCausalLM BailingMoeForCausalLM SolarForCausalLM "
        "Glm4vMoeForConditionalGeneration VoxtralForConditionalGeneration TeleChat3ForCausalLM "
        "BailingMoeV2ForCausalLM ExaoneForCausalLM TeleFLMForCausalLM",
    ),
    "granite": (Family(_WINDOWS, HEADS), "GraniteForCausalLM"),
    "qwen2": (
        Family(_IF_USED, QWEN2),
        "Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration "
        "Qwen2_5_VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration "
        "Qwen2_5OmniModel MiMoForCausalLM",
    ),
    "qwen3": (
        Family(_IF_USED, QWEN3),
        "Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3ASRForConditionalGeneration "
        "Qwen3OmniMoeForConditionalGeneration",
    ),
    "qwen3_vl": (
        Family(_IF_USED, QWEN3),
        "Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration",
    ),
    "sliding": (
        Family(_WINDOWS, frozenset({"num_key_value_heads"})),
        "AfmoeForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration "
        "Exaone4ForCausalLM Exaone4_5_ForConditionalGeneration MellumForCausalLM "
        "LagunaForCausalLM",
    ),
    "cohere2": (
        Family(d.decoder(d.one_more_than_window), frozenset({"num_key_value_heads"})),
        "Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration",
    ),
    "gpt_oss": (Family(d.decoder(d.every_other)), "GptOssForCausalLM"),
    "gemma3n": (Family(d.gemma3n), "Gemma3nForCausalLM Gemma3nForConditionalGeneration"),
    "gemma4": (
        Family(d.gemma4),
        "Gemma4ForCausalLM Gemma4ForConditionalGeneration",
    ),
    "llama4": (Family(d.llama4, HEADS), "Llama4ForCausalLM Llama4ForConditionalGeneration"),
    "mha": (
        Family(_MHA, HEADS | NO_WINDOW),
        "BloomForCausalLM GPT2LMHeadModel GPTJForCausalLM",
    ),
    "split_mha": (
        Family(_SPLIT_MHA, NO_WINDOW),
        "OPTForCausalLM GPTNeoXForCausalLM PhiForCausalLM Blip2ForConditionalGeneration",
    ),
    "split": (
        Family(_SPLIT, HEADS | NO_WINDOW),
        "StableLmForCausalLM InternLM2ForCausalLM DeepseekForCausalLM OrionForCausalLM "
        "MiniCPMForCausalLM",
    ),
    "falcon": (
        Family(
            d.decoder(heads=d.falcon_heads, size=d.split_head_size),
            NO_WINDOW | {"new_decoder_architecture", "num_kv_heads", "n_head_kv"},
        ),
        "FalconForCausalLM",
    ),
    "mimo_v2": (Family(mimo_v2), "MiMoV2FlashForCausalLM MiMoV2ForCausalLM"),
    "step3p5": (Family(step3p5), "Step3p5ForCausalLM"),
    "deepseek": (
        Family(m.latent, MLA),
        "DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM "
        "GlmMoeDsaForCausalLM Glm4MoeLiteForCausalLM AXK1ForCausalLM MistralLarge3ForCausalLM "
        "KimiVLForConditionalGeneration KimiK25ForConditionalGeneration",
    ),
    "longcat": (Family(m.longcat), "LongcatFlashForCausalLM"),
    "minicpm3": (
        Family(d.decoder(size=m.unfolded_head_size, heads=d.all_heads), NO_WINDOW),
        "MiniCPM3ForCausalLM",
    ),
    "kimi_linear": (Family(h.kimi_linear), "KimiLinearForCausalLM"),
    "olmo_hybrid": (
        Family(h.hybrid(h.gated_delta_net, h.layer_types, size=d.split_head_size)),
        "OlmoHybridForCausalLM",
    ),
    "dbrx": (Family(d.dbrx), "DbrxForCausalLM"),
    "qwen3_next": (
        Family(h.hybrid(h.gated_delta_net, h.full_every_nth), HEADS),
        "Qwen3NextForCausalLM",
    ),
    "qwen3_5": (
        Family(h.hybrid(h.qwen3_5_state, h.full_every_nth), frozenset({"mamba_ssm_dtype"})),
        "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3_5ForConditionalGeneration "
        "Qwen3_5MoeForConditionalGeneration MiniCPMV4_6ForConditionalGeneration",
    ),
    "jamba": (
        Family(h.hybrid(h.jamba_state, h.jamba_words, size=d.split_head_size)),
        "JambaForCausalLM",
    ),
    "falcon_h1": (Family(h.hybrid(h.falcon_h1_state, h.all_both)), "FalconH1ForCausalLM"),
    "granite_hybrid": (
        Family(h.hybrid(h.granite_state, h.layer_types, size=d.split_head_size)),
        "GraniteMoeHybridForCausalLM",
    ),
    "nemotron_h": (
        Family(
            h.hybrid(h.nemotron_h_state, h.nemotron_h_words),
            frozenset({"mamba_ssm_cache_dtype", "head_dim"}),
        ),
        "NemotronHForCausalLM",
    ),
    "lfm2": (
        Family(h.hybrid(h.short_conv, h.layer_types, size=d.split_head_size)),
        "Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration",
    ),
    "zamba2": (
        Family(h.hybrid(h.zamba_state, h.zamba_words, size=h.zamba_head, heads=d.all_heads)),
        "Zamba2ForCausalLM",
    ),
    "mamba": (Family(h.mamba_only(h.mamba1_state)), "MambaForCausalLM FalconMambaForCausalLM"),
    "mamba2": (Family(h.mamba2_only), "Mamba2ForCausalLM"),
    "whisper": (Family(whisper), "WhisperForConditionalGeneration"),
}

ARCHITECTURES: dict[str, Family] = {
    name: family for family, names in _FAMILIES.values() for name in names.split()
}
