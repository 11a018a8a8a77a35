"""Each part of `omnicache kv-size` with exact values, and what it refuses."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.kv_size.draft import draft_layers
from omnicache_cli.kv_size.dtypes import kv_cache_dtype, model_dtype
from omnicache_cli.kv_size.estimate import Estimate, estimate, pipeline_bounds
from omnicache_cli.kv_size.hardware import card_named, memory_bytes
from omnicache_cli.kv_size.layers import AttentionLayer, Kind, StateRule
from omnicache_cli.kv_size.memory import activation_interval, budget, graph_interval
from omnicache_cli.kv_size.modalities import item_tokens, parse_audio, parse_image, parse_video
from omnicache_cli.kv_size.model import open_config, read_model
from omnicache_cli.kv_size.omni_cache import TensorKey, host_memory, thinker_keys
from omnicache_cli.kv_size.options import Options
from omnicache_cli.kv_size.positions import derived_max_model_len
from omnicache_cli.kv_size.startup_log import compare_log, options_of_log, read_log
from omnicache_cli.kv_size.sweep import bars, parse_sweep
from omnicache_cli.kv_size.weights import read_weights
from omnicache_cli.kv_size.whatif import parse_shares, partition
from tests.unit.kv_size_truth import (
    CONFIGS,
    GIB,
    counted,
    full,
    model_of,
    settings,
    sliding,
    states,
)


def written(folder: Path, **changes: Any) -> str:
    """Llama-3.1-8B's config.json with changes; a change to ... removes the field."""
    config = json.loads((CONFIGS / "llama-3.1-8b" / "config.json").read_text())
    config.update(changes)
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# -- reading a config -------------------------------------------------------------------------


def test_a_config_that_says_everything_needs_no_class() -> None:
    reading = read_model(open_config(str(CONFIGS / "llama-3.1-8b")))

    assert reading.defaults is None
    assert reading.model.layers[0] == AttentionLayer(0, Kind.FULL, 8, 128, 128)


def test_a_missing_field_is_asked_of_the_config_class(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(folder: str, _: str) -> dict[str, Any]:
        asked.append(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        config["num_hidden_layers"] = 5
        return {"config": config, "text": config, "version": "1.2.3"}

    reading = read_model(open_config(written(tmp_path, num_hidden_layers=...)), ask)

    assert asked == [str(tmp_path)]
    assert (reading.defaults, reading.asked_for) == ("transformers 1.2.3", "num_hidden_layers")
    assert len(reading.model.layers) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NobodysModel"]}, "field architectures has NobodysModel"),
        ({"architectures": ...}, "field architectures is None"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many', which is not a count"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, which is not a count"),
        (
            {"layer_types": ["strange_attention"] * 32},
            "layer_types has 'strange_attention', which the fast path does not understand",
        ),
        (
            {"layer_types": ["full_attention"]},
            "layer_types does not name a type for each of the 32",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_naming_the_field(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInputError, match=message):
        read_model(open_config(written(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("content", "message"),
    [("not json", "cannot be read as JSON"), ("[1]", "a JSON list, not an object")],
)
def test_a_file_that_is_no_config_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInputError, match=message):
        open_config(str(tmp_path))


def test_a_folder_that_is_not_there_is_one_line() -> None:
    with pytest.raises(BadInputError, match="does not exist; name a model's folder"):
        open_config("./nowhere")


def test_a_sliding_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 4096,
        "use_sliding_window": False,
    }
    used = {**config, "use_sliding_window": True}

    kinds = []
    for values in (config, used):
        reading = read_model(open_config(written(tmp_path, **values)))
        kinds.append({getattr(layer, "kind", None) for layer in reading.model.layers})
    assert kinds == [{Kind.FULL}, {Kind.SLIDING}]


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 8192),
        ({"rope_type": "linear", "factor": 4.0}, 32768),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 16384),
        ({"full_attention": {"rope_type": "default"}, "sliding": {"rope_type": "default"}}, 8192),
    ],
)
def test_the_derived_length_takes_the_rope_factor_that_vllm_takes(rope: Any, length: int) -> None:
    config = {"max_position_embeddings": 8192, "rope_scaling": rope, "model_type": "llama"}
    assert derived_max_model_len(config, config)[0] == length


# -- dtypes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, "auto"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, "auto"),
        (
            {
                "quant_method": "modelopt",
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            },
            "fp8_e4m3",
        ),
    ],
)
def test_auto_comes_from_the_kv_scheme_not_from_the_weights(
    quantization: Any, expected: str
) -> None:
    assert kv_cache_dtype("auto", quantization)[0] == expected


def test_a_float32_checkpoint_is_cached_in_bfloat16() -> None:
    assert model_dtype("auto", {"torch_dtype": "float32"}, {}) == "bfloat16"
    assert model_dtype("float16", {"dtype": "float32"}, {}) == "float16"
    with pytest.raises(BadInputError, match="names no dtype"):
        model_dtype("auto", {}, {})


@pytest.mark.parametrize(
    ("dtype", "page"),
    [
        ("auto", 16 * 8 * 256 * 2),
        ("fp8", 16 * 8 * 256),
        ("int8_per_token_head", 16 * 8 * (256 + 8)),
        ("fp8_per_token_head", 16 * 8 * (256 + 8)),
        ("int4_per_token_head", 16 * 8 * (128 + 8)),
        ("nvfp4", 16 * 2 * 8 * (64 + 8)),
    ],
)
def test_a_page_by_the_cache_dtype(dtype: str, page: int) -> None:
    found = counted(model_of(full(2, 8, 128)), kv_cache_dtype=dtype)
    assert found.pool.groups[0].first.page_bytes == page


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "nvfp4", "turboquant_4bit_nc"])
def test_mla_refuses_a_cache_that_vllm_has_no_backend_for(dtype: str) -> None:
    model = model_of([AttentionLayer(0, Kind.MLA, 1, 576, 0)], uses_mla=True)
    with pytest.raises(UsageError, match="no MLA backend of vLLM takes it"):
        counted(model, kv_cache_dtype=dtype)


# -- parallelism ------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_kv_heads_per_rank_are_at_least_one(ranks: int, heads: int) -> None:
    found = counted(model_of(full(2, 8, 128)), tensor_parallel_size=ranks)
    page = found.pool.groups[0].first
    assert getattr(page, "num_kv_heads", None) == heads


@pytest.mark.parametrize(
    ("layers", "stages", "bounds"),
    [
        (32, 2, [(0, 16), (16, 32)]),
        (32, 3, [(0, 11), (11, 22), (22, 32)]),
        (61, 4, [(0, 15), (15, 30), (30, 46), (46, 61)]),
        (10, 4, [(0, 2), (2, 5), (5, 8), (8, 10)]),
    ],
)
def test_stages_get_layers_as_in_vllm(
    layers: int, stages: int, bounds: list[tuple[int, int]]
) -> None:
    assert pipeline_bounds(layers, stages) == bounds


def test_the_pool_is_the_least_of_the_stages() -> None:
    model = model_of(full(3, 8, 128))
    found = counted(model, 10 * GIB, pipeline_parallel_size=2)

    counts = [worker.num_blocks for worker in found.pool.workers]
    page = 16 * 8 * 256 * 2
    assert counts == [10 * GIB // (2 * page), 10 * GIB // page]
    assert found.pool.num_blocks == 10 * GIB // (2 * page)


# -- requests ---------------------------------------------------------------------------------


def test_a_window_reserves_what_is_in_flight_and_holds_less() -> None:
    found = counted(model_of(sliding(4, 8, 128, 1024)), max_model_len=32768)

    assert found.reserved_blocks(32768) == -(-(1023 + 2 * 2048) // 16) + 1
    assert found.held_blocks(32768) == -(-(1023 + 2) // 16) + 1
    assert found.reserved_blocks(100) == -(-100 // 16) + 1


@pytest.mark.parametrize(("mode", "blocks"), [("none", 1), ("align", 2), ("all", -(-4096 // 1072))])
def test_mamba_blocks_by_cache_mode(mode: str, blocks: int) -> None:
    rule = StateRule("short_conv", (("intermediate_size", 512), ("conv_kernel", 4)))
    model = model_of(states(2, rule))
    found = counted(model, mamba_cache_mode=mode, block_size=1072)

    assert found.reserved_blocks(4096) == blocks


def test_a_bad_fit_is_told_in_vllms_own_sentence() -> None:
    found = counted(model_of(full(36, 8, 128)), round(2.4 * GIB), max_model_len=40960)

    assert found.refusal() == (
        "To serve at least one request with the model's max seq len (40960), (5.62 GiB KV cache "
        "is needed, which is larger than the available KV cache memory (2.4 GiB). Based on the "
        "available memory, the estimated maximum model length is 17456."
    )


# -- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 << 30), ("16.87 GiB", 18114024571), ("80GB", 80 * 10**9)]
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert memory_bytes(text, "--x") == size


@pytest.mark.parametrize("text", ["", "GiB", "1.2.3GiB", "-1GiB", "5 bananas"])
def test_an_amount_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no amount of memory"):
        memory_bytes(text, "--x")


def test_a_card_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="no card is called 'voodoo2'"):
        card_named("voodoo2")


def test_weights_are_summed_from_safetensors_headers(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
            "b": {"dtype": "BF16", "shape": [8], "data_offsets": [64, 80]},
        }
    ).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(80))

    weights = read_weights(tmp_path)

    assert weights is not None
    assert (weights.matrix_bytes, weights.vector_bytes, weights.num_files) == (64, 16, 1)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"nope"])
def test_a_damaged_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(BadInputError, match="no readable safetensors file"):
        read_weights(tmp_path)


def test_the_kv_cache_is_what_is_left_of_the_requested_memory() -> None:
    text = {"hidden_size": 2048, "vocab_size": 1000, "intermediate_size": 6144}
    activations = activation_interval(settings(), text, None)
    weights = graph_interval(True)
    found = budget(card_named("l4"), 0.9, weights, activations, graph_interval(False))

    low = 2048 * 2048 * 2 + 2048 * 3 * 6144 * 2
    assert activations.low == low
    assert found.available.high == found.requested_bytes - low
    assert found.available.low == found.requested_bytes - activations.high - 3 * GIB


# -- drafters ---------------------------------------------------------------------------------


def test_mtp_layers_come_after_the_models_and_on_the_last_stage() -> None:
    reading = read_model(open_config(str(CONFIGS / "deepseek-v3")))
    draft = draft_layers(reading, "mtp", 1, None)
    options = Options(num_speculative_tokens=1, speculative_method="mtp", pipeline_parallel_size=2)
    found = estimate(reading, options, [40 * GIB], draft=draft)

    assert [layer.index for layer in draft] == [61]
    assert [len(worker.groups[0].pages) for worker in found.pool.workers] == [31, 31]


def test_a_drafter_without_its_options_is_refused() -> None:
    reading = read_model(open_config(str(CONFIGS / "llama-3.1-8b")))
    for method, tokens, message in (
        (None, 2, "needs --speculative-method"),
        ("mtp", 0, "needs --num-speculative-tokens"),
        ("eagle3", 2, "needs --speculative-model"),
        ("magic", 2, "choose mtp"),
    ):
        with pytest.raises(UsageError, match=message):
            draft_layers(reading, method, tokens, None)
    with pytest.raises(BadInputError, match="num_nextn_predict_layers"):
        draft_layers(reading, "mtp", 1, None)


# -- sweep, what-if ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("max_model_len=4k..16k", (4096, 8192, 16384)),
        ("max-model-len=4k..12k", (4096, 8192, 12288)),
        ("max_num_batched_tokens=2048,4096", (2048, 4096)),
        ("block_size=16", (16,)),
    ],
)
def test_a_sweep_is_read(text: str, values: tuple[int, ...]) -> None:
    assert parse_sweep(text).values == values


@pytest.mark.parametrize("text", ["", "dtype=1,2", "max_model_len=8k..4k", "max_model_len=x"])
def test_a_sweep_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--sweep"):
        parse_sweep(text)


def test_bars_are_as_long_as_their_share() -> None:
    assert bars(["1", "10", "3"], [10, 40, None]) == [
        " 1 |########## 10",
        f"10 |{'#' * 40} 40",
        " 3 | unknown",
    ]


def test_a_partition_and_a_compression_hold_what_they_say() -> None:
    shares = partition(
        1000,
        parse_shares("text=0.5,image=0.3,audio=0.2", "--modal-budget"),
        parse_shares("image=0.4", "--compression"),
        {"image": 256},
    )
    assert [(one.modality, one.tokens, one.items) for one in shares] == [
        ("text", 500, None),
        ("image", 750, 2),
        ("audio", 200, None),
    ]


@pytest.mark.parametrize("text", ["image", "image=2", "smell=0.1", "image=0.1,image=0.2", "text=0"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--modal-budget"):
        parse_shares(text, "--modal-budget")
    with pytest.raises(UsageError, match="at most 1"):
        partition(10, {"text": 0.7, "image": 0.6}, {}, {})


# -- omni -------------------------------------------------------------------------------------


def test_host_memory_is_slots_times_width_times_bytes() -> None:
    found = counted(model_of(full(2, 8, 128)), num_gpu_blocks_override=130, block_size=32)
    config = {"talker_config": {"accept_hidden_layer": 24}}
    keys = thinker_keys(config, {"hidden_size": 64}, "bfloat16")
    memory = host_memory(found, keys)

    assert keys[1:] == (
        TensorKey("hidden_states.layer_0", 64, "bfloat16"),
        TensorKey("hidden_states.layer_24", 64, "bfloat16"),
    )
    assert memory is not None
    assert [one.pool_bytes for one in memory] == [130 * 32 * 64 * 2] * 3
    assert memory[0].staging_bytes == 4 * 2048 * 64 * 2


# -- items ------------------------------------------------------------------------------------


def test_an_item_of_an_unknown_processor_is_unknown(tmp_path: Path) -> None:
    found = item_tokens(parse_image("512x512"), {"model_type": "llama"}, tmp_path)
    assert found.tokens is None
    assert "no image processor is known here for 'llama'" in found.source


def test_sizes_of_the_models_own_processor_are_taken(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16})
    )
    found = item_tokens(parse_image("1920x1080"), config, tmp_path)

    assert found.tokens == (1088 // 32) * (1920 // 32)
    assert found.source == "preprocessor_config.json"


@pytest.mark.parametrize("text", ["512", "0x5", "axb", "5x"])
def test_an_item_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--image"):
        parse_image(text)
    with pytest.raises(UsageError, match="--video"):
        parse_video(text)
    with pytest.raises(UsageError, match="--audio"):
        parse_audio("0s" if text == "512" else text)


# -- start-up logs ----------------------------------------------------------------------------

TWO_LINES = """\
INFO 10-03 10:00:00 [core.py:65] Initializing a V1 LLM engine (v0.11.0) with config: model='m', \
dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1, kv_cache_dtype=auto, \
enable_prefix_caching=True
INFO 10-03 10:00:09 [gpu_worker.py:298] Available KV cache memory: 6.51 GiB
INFO 10-03 10:00:09 [kv_cache_utils.py:1087] GPU KV cache size: 42,656 tokens
INFO 10-03 10:00:09 [core.py:1] Maximum concurrency for 32,768 tokens per request: 1.30x
"""

ONE_LINE = """\
(Worker_TP0 pid=7) INFO [gpu_worker.py:1] Available KV cache memory: 41.43 GiB
(Worker_TP1 pid=8) INFO [gpu_worker.py:1] Available KV cache memory: 41.50 GiB
(EngineCore pid=6) INFO [kv_cache_utils.py:2] GPU KV cache size: 226,240 tokens, Maximum \
concurrency for 4,096 tokens per request: 55.23x
"""


def findings_of(text: str, layers: int, folder: Path) -> list[tuple[str, str]]:
    path = folder / "startup.log"
    path.write_text(text)
    log = read_log(path)
    options, _ = options_of_log(log, Options())

    def count(memory: Any) -> Estimate:
        changes = {"max_model_len": options.max_model_len}
        return counted(model_of(full(layers, 8, 128)), memory and memory[0], **changes)

    return [(one.name, one.verdict) for one in compare_log(log, count, count)]


def test_a_two_line_log_agrees(tmp_path: Path) -> None:
    assert findings_of(TWO_LINES, 40, tmp_path) == [
        ("KV cache size, tokens", "agrees"),
        ("maximum concurrency", "agrees"),
    ]


def test_a_one_line_log_of_several_workers_agrees(tmp_path: Path) -> None:
    assert findings_of(ONE_LINE, 48, tmp_path) == [
        ("KV cache size, tokens", "agrees"),
        ("maximum concurrency", "agrees"),
    ]


def test_a_log_of_another_model_is_unexplained(tmp_path: Path) -> None:
    assert findings_of(TWO_LINES, 41, tmp_path) == [
        ("KV cache size, tokens", "unexplained"),
        ("maximum concurrency", "unexplained"),
    ]


def test_a_log_without_a_cache_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.log"
    path.write_text("nothing to see\n")
    with pytest.raises(BadInputError, match="no line on the KV cache"):
        read_log(path)


def test_an_older_log_of_a_windowed_model_is_explained(tmp_path: Path) -> None:
    """At 32,768 tokens the windows reserve less with one batch in flight than with two."""
    layers = full(10, 16, 128) + sliding(52, 16, 128, 1024, first=10)

    def count(is_async: bool) -> Any:
        return lambda memory: counted(
            model_of(layers),
            memory and memory[0],
            async_scheduling=is_async,
            max_model_len=32768,
        )

    before = count(False)([40 * GIB])
    path = tmp_path / "startup.log"
    path.write_text(
        f"Available KV cache memory: 40.00 GiB\nGPU KV cache size: {before.tokens_old:,} tokens\n"
        f"Maximum concurrency for 32,768 tokens per request: {before.concurrency:.2f}x\n"
    )

    findings = compare_log(read_log(path), count(True), count(False))
    assert [(one.name, one.verdict) for one in findings] == [
        ("KV cache size, tokens", "agrees"),
        ("maximum concurrency", "explained: older vLLM counts one batch in flight"),
    ]


def test_a_cpu_log_without_memory_takes_what_is_given(tmp_path: Path) -> None:
    path = tmp_path / "startup.log"
    path.write_text(
        "CPU KV cache size: 232,960 tokens\n"
        "Maximum concurrency for 2,048 tokens per request: 113.75x\n"
    )
    log = read_log(path)
    options, taken = options_of_log(log, Options())

    def count(memory: Any) -> Estimate:
        model = model_of(full(12, 12, 64))
        return counted(model, memory and memory[0], block_size=128, max_model_len=2048)

    assert options.platform == "cpu"
    assert taken == ["max_model_len", "platform"]
    assert [one.verdict for one in compare_log(log, count, count, [8 * GIB])] == ["agrees"] * 2
    assert compare_log(log, count, count)[0].verdict.startswith("unexplained: the log prints no")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0, "head_dim": ...}, "divides by is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is more than 10,000"),
        ({"num_key_value_heads": 10**30}, "num_key_value_heads is more than"),
        ({"num_key_value_heads": 0}, "0 KV heads of 128 elements"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings is inf"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope factor nan"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"thinker_config": 3}, "thinker_config is 3"),
    ],
)
def test_a_field_that_no_model_has_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInputError, match=message):
        estimate(read_model(open_config(written(tmp_path, **changes))), Options())


def test_a_config_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 50_000)
    with pytest.raises(BadInputError, match="cannot be read as JSON"):
        open_config(str(tmp_path))


def test_an_endless_amount_of_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="is no amount of memory"):
        memory_bytes("9" * 400, "--available-kv-memory")
