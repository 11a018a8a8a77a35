"""Tiny models on a real vLLM engine, and the same bytes every time."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.engine.tiny_images import write_test_image
from omnicache_cli.engine.tiny_kinds import TINY_MODEL_KINDS
from omnicache_cli.engine.tiny_models import build_tiny_model
from omnicache_cli.engine.tiny_models.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE

FOX_200_TOKENS = ("The quick brown fox jumps over the lazy dog. " * 5)[:200]
IMAGE_PROMPT = "<|vision_start|><|image_pad|><|vision_end|>Describe."
NUM_VISION_START_END_TOKENS = 2


def start_engine(model: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        enforce_eager=True,
        block_size=32,
        max_num_seqs=4,
        num_gpu_blocks_override=300,
        **options,
    )


@pytest.fixture(scope="module")
def text_engine(tiny_text_model: Path) -> Any:
    return start_engine(tiny_text_model, max_model_len=1024)


@pytest.fixture(scope="module")
def image_engine(tiny_image_model: Path) -> Any:
    return start_engine(
        tiny_image_model, max_model_len=4096, limit_mm_per_prompt={"image": 1, "video": 0}
    )


def open_image(path: Path, **options: int) -> Any:
    from PIL import Image

    write_test_image(path, **options)
    with Image.open(path) as image:
        image.load()
        return image


def greedy(engine: Any, prompt: Any, max_tokens: int = 8) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return engine.generate([prompt], params, use_tqdm=False)[0]


def chat(engine: Any, content: Any) -> Any:
    from vllm import SamplingParams

    messages = [{"role": "user", "content": content}]
    return engine.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_the_same_prompt_again_hits_all_full_blocks_and_gives_the_same_tokens(
    text_engine: Any,
) -> None:
    cold = greedy(text_engine, FOX_200_TOKENS)
    warm = greedy(text_engine, FOX_200_TOKENS)

    assert len(cold.prompt_token_ids) == 200
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 192)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_greedy_text_depends_on_the_prompt_is_readable_and_never_ends_early(
    text_engine: Any,
) -> None:
    prompts = ["a", "Hello", "hello there", "1234567", "lorem ipsum " * 20]

    outputs = [greedy(text_engine, prompt, max_tokens=40).outputs[0] for prompt in prompts]

    assert len({output.text for output in outputs}) == len(prompts)
    assert all(len(set(output.text)) > 3 for output in outputs)
    assert all(output.text.isascii() and output.text.isprintable() for output in outputs)
    assert [len(output.token_ids) for output in outputs] == [40] * len(prompts)


def test_a_change_early_in_a_long_prompt_changes_the_output(text_engine: Any) -> None:
    one = greedy(text_engine, "A" * 32 + FOX_200_TOKENS, max_tokens=40)
    other = greedy(text_engine, "z" * 32 + FOX_200_TOKENS, max_tokens=40)

    assert one.outputs[0].text != other.outputs[0].text


def test_text_chat_uses_the_template(text_engine: Any) -> None:
    answer = chat(text_engine, "Hi")

    tokenizer = text_engine.get_tokenizer()
    assert tokenizer.decode(answer.prompt_token_ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text",
    ["", " leading and trailing  ", "é e\u0301 漢字 🙂\r\n\t\0", "".join(map(chr, range(0x250)))],
    ids=["empty", "spaces", "unicode", "first code points"],
)
def test_every_string_survives_the_tokenizer_as_its_utf8_bytes(
    tiny_text_model: Path, text: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_text_model)

    ids = tokenizer.encode(text)

    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_one_token_each(tiny_image_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_image_model)

    assert tokenizer.encode("".join(SPECIAL_TOKENS)) == list(range(256, VOCAB_SIZE))
    assert len(tokenizer) == VOCAB_SIZE


def test_an_image_prompt_again_hits_the_image_and_another_image_does_not(
    image_engine: Any, tmp_path: Path
) -> None:
    first, second = (
        open_image(tmp_path / f"{seed}.png", width=336, height=224, seed=seed) for seed in (1, 2)
    )

    cold, warm, other = (
        greedy(image_engine, {"prompt": IMAGE_PROMPT, "multi_modal_data": {"image": image}})
        for image in (first, first, second)
    )

    num_tokens = 96 + NUM_VISION_START_END_TOKENS + len("Describe.")
    assert len(cold.prompt_token_ids) == num_tokens
    assert [out.num_cached_tokens for out in (cold, warm, other)] == [0, 96, 0]
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert other.outputs[0].token_ids != cold.outputs[0].token_ids


def test_a_large_image_is_about_a_thousand_tokens(image_engine: Any, tmp_path: Path) -> None:
    image = open_image(tmp_path / "large.png", width=1120, height=672, seed=3)
    prompt = {"prompt": IMAGE_PROMPT, "multi_modal_data": {"image": image}}

    cold, warm = greedy(image_engine, prompt), greedy(image_engine, prompt)

    assert len(cold.prompt_token_ids) == 960 + NUM_VISION_START_END_TOKENS + len("Describe.")
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 960)


def test_an_image_and_text_fill_4096_positions(image_engine: Any, tmp_path: Path) -> None:
    image = open_image(tmp_path / "large.png", width=1120, height=672, seed=4)
    prompt = {
        "prompt": IMAGE_PROMPT + "x" * (4096 - 971 - 8),
        "multi_modal_data": {"image": image},
    }

    output = greedy(image_engine, prompt, max_tokens=8)

    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 4096


def test_image_chat_puts_the_vision_tokens_in(image_engine: Any, tmp_path: Path) -> None:
    image = open_image(tmp_path / "image.png", width=56, height=56, seed=5)

    answer = chat(
        image_engine,
        [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "What?"}],
    )

    tokenizer = image_engine.get_tokenizer()
    assert tokenizer.decode(answer.prompt_token_ids) == (
        "<|im_start|>user\n<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>What?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_transformers_reads_the_processor_and_its_chat_template(tiny_image_model: Path) -> None:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_image_model)

    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert processor.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == (
        "<|im_start|>user\nHi<|im_end|>\n"
    )


def test_a_build_gives_the_same_bytes_in_every_process_and_says_nothing(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from omnicache_cli.engine.tiny_models import build_tiny_model\n"
        "for kind in sys.argv[2:]: build_tiny_model(kind, Path(sys.argv[1]) / kind)\n"
    )

    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *TINY_MODEL_KINDS],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )

    for kind in TINY_MODEL_KINDS:
        assert digests(tmp_path / kind) == digests(tiny_models[kind])
    assert (ran.stdout, ran.stderr) == ("", "")


@pytest.mark.parametrize("kind", TINY_MODEL_KINDS)
def test_a_build_leaves_the_callers_torch_state_alone(kind: str, tmp_path: Path) -> None:
    import torch

    before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_default_device()
    build_tiny_model(kind, tmp_path / kind)
    after = torch.get_rng_state(), torch.get_default_dtype(), torch.get_default_device()

    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("kind", TINY_MODEL_KINDS)
def test_a_tiny_model_is_small(kind: str, tmp_path: Path) -> None:
    build_tiny_model(kind, tmp_path / kind)

    limit = {"wide": 35_000_000, "omni": 60_000_000}.get(kind, 2_000_000)
    assert sum(path.stat().st_size for path in (tmp_path / kind).rglob("*")) < limit
