"""What `omnicache verify` costs beside the same runs without capture, cache and comparison.

A Llama of 70 million parameters with random weights (as Pythia-70M: width 512, 6 layers,
50,304 tokens) runs a few scenarios on the CPU, in one process and on one pair of engines.
The conditions take turns, so that a noisy machine disturbs both alike:

    plain   every run of every scenario, with and without a prefix cache, and nothing else
    again   the same, to measure the noise (A/A)
    verify  the same runs with rows captured, stored, restored and judged

Starting the engines counts for neither. Prints one JSON object; `ratio` is verify over plain, the
median of the turns, `aa_ratio` again over plain.

Run: python benchmarks/verify.py [--turns N] [--cache builtin|vllm-omni]
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BAR = 1.2
SCENARIOS = ("repeat", "batch", "chunked")
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1280,
    "tie_word_embeddings": False,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 50_304,
    "layer_types": ["full_attention"] * 6,
}
ARGS: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 130,
    "enforce_eager": True,
    "load_format": "dummy",
}


def num_parameters() -> int:
    """By the config: on a CPU, vLLM packs the weights of a layer away."""
    width, layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
    of_a_layer = 4 * width**2 + 3 * width * SHAPE["intermediate_size"] + 2 * width
    return 2 * SHAPE["vocab_size"] * width + layers * of_a_layer + width


def write_model(folder: Path) -> None:
    """A config and a tokenizer: vLLM fills in the weights."""
    from omnicache_cli.engine.tiny_models import build_tiny_model

    build_tiny_model("text", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | SHAPE), encoding="utf-8")
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()


def measured(turns: int, cache: Any) -> dict[str, Any]:
    from omnicache_cli.engine.options import EngineOptions
    from omnicache_cli.engine.verify.session import EngineSession, SessionOptions
    from omnicache_cli.verify.results import Verdict
    from omnicache_cli.verify.run import run_scenario, verify
    from omnicache_cli.verify.scenarios import Scenario, choose

    seconds: dict[str, list[float]] = {"plain": [], "again": [], "verify": []}
    with tempfile.TemporaryDirectory(prefix="omnicache-") as scratch:
        write_model(Path(scratch) / "model")
        options = EngineOptions(str(Path(scratch) / "model"), ARGS)
        with EngineSession(options, SessionOptions(cache=cache)) as session:
            scenarios = [
                one
                for one in choose(session.facts(), SCENARIOS, (), max_tokens=4)
                if isinstance(one, Scenario)
            ]
            for turn in range(turns + 1):
                for name in random.sample(list(seconds), len(seconds)):
                    session.capturing = name == "verify"
                    started = time.perf_counter()
                    if name == "verify":
                        result = verify(session, scenarios)
                        assert result.verdict in (Verdict.EQUAL, Verdict.ROUNDING), result.verdict
                        num_pairs = len(result.pairs)
                    else:
                        for scenario in scenarios:
                            run_scenario(session, scenario)
                    if turn:  # the first one warms everything up
                        seconds[name].append(time.perf_counter() - started)

    def over_plain(name: str) -> list[float]:
        return [one / plain for one, plain in zip(seconds[name], seconds["plain"], strict=True)]

    return {
        "num_parameters": num_parameters(),
        "scenarios": SCENARIOS,
        "num_pairs": num_pairs,
        "plain_s": round(statistics.median(seconds["plain"]), 2),
        "verify_s": round(statistics.median(seconds["verify"]), 2),
        "ratio": round(statistics.median(over_plain("verify")), 3),
        "ratios": [round(one, 3) for one in over_plain("verify")],
        "aa_ratio": round(statistics.median(over_plain("again")), 3),
        "aa_ratios": [round(one, 3) for one in over_plain("again")],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cache", choices=("builtin", "vllm-omni"), default="builtin")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    from omnicache_cli.engine.options import prepare_environment, vllm_version

    prepare_environment(engine_process=False)
    found = measured(options.turns, options.cache)
    import torch

    print(
        json.dumps(
            {
                "benchmark": "verify",
                "python": platform.python_version(),
                "torch": torch.__version__,
                "vllm": vllm_version(),
                "cpus": os.cpu_count(),
                "cache": options.cache,
                "turns": options.turns,
                "bar": BAR,
                **found,
            }
        )
    )
    return 0 if found["ratio"] <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
