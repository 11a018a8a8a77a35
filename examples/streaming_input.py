"""A streaming-input session: a prompt that arrives in three parts, each answered at once.

Usage: omnicache trace -o run-streaming -- python examples/streaming_input.py MODEL

vLLM keeps the blocks of a session between its parts, so a later part computes its own tokens only.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

PARTS = ("You answer questions about a cache, part by part.", " What is a block?", " Who frees it?")
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


async def answer(model: str) -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            block_size=32,
            max_model_len=1024,
            num_gpu_blocks_override=64,
            enforce_eager=True,
        )
    )
    answered = asyncio.Event()

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        for part in PARTS:
            yield StreamingInput(TokensPrompt(prompt_token_ids=list(part.encode())))
            await answered.wait()
            answered.clear()

    try:
        num_tokens = 0
        async for output in engine.generate(parts(), PARAMS, "session"):
            num_tokens += len(output.outputs[0].token_ids)
            if output.outputs[0].finish_reason is not None:
                print(f"{num_tokens} tokens")
                answered.set()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    asyncio.run(answer(sys.argv[1]))
