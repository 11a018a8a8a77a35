"""The same prompt four times, with a reset of the prefix cache after the second.

Usage: omnicache trace -o run-reset -- python examples/reset_cache.py MODEL
"""

import sys

from vllm import LLM, SamplingParams

PROMPT = "The cache forgets all of this at once, and has to see it again to know it. " * 2


def ask(model: str) -> None:
    llm = LLM(
        model=model,
        block_size=32,
        max_model_len=1024,
        num_gpu_blocks_override=64,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for number in range(4):
        if number == 2:
            llm.reset_prefix_cache()
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens hit")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    ask(sys.argv[1])
