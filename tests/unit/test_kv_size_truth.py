"""The fast path against lines that real servers printed, and against vLLM's own accounting."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from omnicache_cli.kv_size.estimate import Estimate, estimate
from omnicache_cli.kv_size.layers import StateRule
from omnicache_cli.kv_size.model import open_config, read_model
from omnicache_cli.kv_size.options import Options
from omnicache_cli.kv_size.pool import longest_context, needed_bytes
from omnicache_cli.kv_size.request_bytes import request_bytes
from omnicache_cli.kv_size.startup_log import compare_log, options_of_log, read_log
from tests.unit.kv_size_truth import (
    CONFIGS,
    DATA,
    GIB,
    counted,
    full,
    model_of,
    rows,
    sliding,
    states,
)

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "2 bytes": "bfloat16", "fp8": "bfloat16"}
ROUNDING = 0.005  # GiB: memory is printed with two decimals

ACCOUNTS = [
    (column, row)
    for column in ("async_8192", "sync_2048")
    for row in rows("accounting-32k.json")[column]
]


@pytest.mark.parametrize(
    ("column", "row"), ACCOUNTS, ids=[f"{row['model']}-{column}" for column, row in ACCOUNTS]
)
def test_the_accounting_of_vllm_is_reproduced(column: str, row: Mapping[str, Any]) -> None:
    """float32 states: the rows were counted on a CPU that forces them (tests/data/kv-size)."""
    options = Options(
        max_model_len=row["L"],
        max_num_batched_tokens=row["mnbt"],
        async_scheduling=column == "async_8192",
        mamba_ssm_cache_dtype="float32",
    )
    found = estimate(read_model(open_config(str(CONFIGS / row["model"]))), options, [40 * GIB])
    request = request_bytes(found, row["L"])

    kinds = {"full_attention": "FullAttentionSpec", "mla_attention": "MLAAttentionSpec"}
    kinds |= {"sliding_window": "SlidingWindowSpec", "mamba": "MambaSpec"}
    groups = [[kinds[group.kind], len(group.pages)] for group in found.pool.groups]
    assert sorted(groups) == sorted(row["groups"])
    assert found.sizes.attention == row["block"]
    assert found.bytes_per_token == row["bytes_per_tok_growth"]
    assert found.bytes_per_token_naive == row["bytes_per_tok_naive"]
    assert found.pool.num_blocks == row["num_blocks_40GiB"]
    assert found.tokens == row["kv_tokens_40GiB"]
    assert found.concurrency is not None
    assert round(found.concurrency, 3) == row["conc"]
    assert round(request.naive_bytes / GIB, 4) == row["naive_GiB"]
    assert round(request.ideal_bytes / GIB, 4) == row["ideal_GiB"]
    assert round(request.summed_bytes / GIB, 4) == row["vllm_sum_GiB"]
    assert round(request.reserved_bytes / GIB, 4) == row["vllm_groups_GiB"]
    assert round(request.state_bytes / 2**20, 2) == row["state_MiB"]
    assert (found.settings.mamba_cache_mode) == row["mode"]


def test_qwen3_next_on_a_gpu_has_a_block_of_544_tokens() -> None:
    """vLLM's default keeps its states in bfloat16 there; a public server printed 544."""
    found = estimate(read_model(open_config(str(CONFIGS / "qwen3-next-80b"))), Options())

    assert found.sizes.attention == 544


def row_estimate(row: Mapping[str, Any], available: int) -> Estimate:
    """The row's model with its settings, by what the row says of its layers."""
    config = row["config"]
    heads = config.get("kv_heads_total", config.get("kv_heads_per_rank", config.get("kv_heads")))
    size = 160 if row["id"] == "K47" else config["head_dim"]
    changes: dict[str, Any] = {
        "dtype": DTYPES[config["kv_dtype"]],
        "kv_cache_dtype": "fp8" if config["kv_dtype"] == "fp8" else "auto",
        "block_size": config.get("block_size", config.get("attention_block")),
        "max_model_len": row["max_model_len"] or 2048,
        "mamba_cache_mode": config.get("mamba_cache_mode", "none"),
    }
    if "kv_heads_total" in config:
        model = model_of(full(config["layers"], heads, size))
        changes["tensor_parallel_size"] = config["tp"]
    elif "window" in config:
        layers = full(config["full"], heads, size)
        layers += sliding(config["sliding"], heads, size, config["window"], first=config["full"])
        model = model_of(layers)
        # vLLM 0.11 had one batch in flight
        changes["max_num_batched_tokens"] = config["max_num_batched_tokens"]
        changes["async_scheduling"] = False
    else:
        linear = config["linear_layers"]
        count = linear if isinstance(linear, int) else int(linear.split()[0])
        rule = StateRule("short_conv", (("intermediate_size", 2), ("conv_kernel", 2)))
        layers = states(count, rule) + full(config["full_layers"], heads, size)
        model = model_of(layers, is_hybrid=True)
    return counted(model, available, **changes)


LINES = rows("startup-lines.json")


@pytest.mark.parametrize("row", LINES, ids=[row["id"] for row in LINES])
def test_a_printed_line_is_reached_within_its_rounding(row: Mapping[str, Any]) -> None:
    """Some number of blocks in the interval gives tokens, concurrency and blocks as printed."""
    low = row_estimate(row, math.ceil((row["available_gib"] - ROUNDING) * GIB))
    high = row_estimate(row, math.floor((row["available_gib"] + ROUNDING) * GIB))
    assert low.pool.num_blocks is not None
    assert high.pool.num_blocks is not None

    reached = []
    for blocks in range(low.pool.num_blocks, high.pool.num_blocks + 1):
        found = row_estimate(row, blocks * low.pool.bytes_per_block)
        tokens = found.tokens_old if row["token_definition"] == "old" else found.tokens
        assert found.concurrency is not None
        if (
            tokens == row["printed_tokens"]
            and row["printed_concurrency"] in (None, round(found.concurrency, 2))
            and row["printed_num_blocks"] in (None, blocks)
        ):
            reached.append(blocks)
    assert reached


REFUSALS = rows("refusals.json")


@pytest.mark.parametrize("row", REFUSALS, ids=[row["id"] for row in REFUSALS])
def test_a_refusal_is_reproduced_within_its_rounding(row: Mapping[str, Any]) -> None:
    """GiB needed as printed, and the estimate of the longest context inside the interval."""
    layers, heads, size = (
        int(part.strip("Lkvbf ")) for part in row["cfg"].removeprefix("text: ").split(",")[:3]
    )
    changes = {
        "max_model_len": row["max_model_len"],
        "kv_cache_dtype": "fp8" if row["cfg"].endswith("fp8") else "auto",
    }
    model = model_of(full(layers, heads, size))
    low, high = (
        counted(model, round((row["available_gib"] + change) * GIB), **changes)
        for change in (-ROUNDING, ROUNDING)
    )
    (worker,) = low.pool.workers

    assert low.bytes_per_token == row["bytes_per_token"]
    needed = needed_bytes(worker, low.settings, row["max_model_len"])
    assert abs(needed / GIB - row["needed_gib"]) <= ROUNDING
    assert "is needed, which is larger than the available KV cache" in (low.refusal() or "")
    if row["estimated_max_len"] is not None:
        shortest = longest_context(low.pool.workers[0], low.settings, row["max_model_len"])
        longest = longest_context(high.pool.workers[0], high.settings, row["max_model_len"])
        assert shortest <= row["estimated_max_len"] <= longest


TABLE = [
    (4096, 5, 2048, 16.87, 157_952),
    (8192, 5, 2048, 16.87, 157_952),
    (4096, 10, 2048, 16.87, 157_952),
    (4096, 5, 4096, 16.59, 155_296),
]


@pytest.mark.parametrize(("length", "seqs", "batched", "available", "printed"), TABLE)
def test_the_table_of_qwen3_vl_2b_is_reproduced(
    length: int, seqs: int, batched: int, available: float, printed: int
) -> None:
    """Users' measurements; which tokens a pool holds does not hang on length, seqs or batch."""
    options = Options(max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=batched)
    reading = read_model(open_config(str(CONFIGS / "qwen3-vl-2b")))
    low, high = (
        estimate(reading, options, [round((available + change) * GIB)]).tokens
        for change in (-ROUNDING, ROUNDING)
    )
    assert low is not None
    assert high is not None
    assert low <= printed <= high
    assert printed % 16 == 0


@pytest.mark.parametrize(
    ("name", "workers", "tensor", "tokens"),
    [("cpu-1-worker", 1, 1, "2,048,000"), ("cpu-2-workers", 2, 2, "4,096,000")],
)
def test_the_log_of_a_real_engine_agrees(name: str, workers: int, tensor: int, tokens: str) -> None:
    """Written by vLLM 0.30.0 on a CPU for `omnicache tiny-model text`."""
    log = read_log(DATA / "logs" / f"{name}.log")
    options, taken = options_of_log(log, Options())
    reading = read_model(open_config(str(DATA / "logs")))

    def count(memory: Any) -> Estimate:
        return estimate(reading, options, memory)

    assert log.available_gib == (1.0,) * workers
    assert (log.version, options.platform, options.tensor_parallel_size) == (
        "0.30.0",
        "cpu",
        tensor,
    )
    assert "max_num_batched_tokens" in taken
    assert [(one.name, one.printed, one.verdict) for one in compare_log(log, count, count)] == [
        ("KV cache size, tokens", tokens, "agrees"),
        ("maximum concurrency", tokens.replace(",000", ".00x").replace(",", ""), "agrees"),
    ]
