"""`omnicache kv-size`: the KV cache of a model as vLLM would count it, without a GPU."""

from typing import Annotated

import typer

from omnicache_cli.cli.options import Force, Output, OutputFormat, Quiet
from omnicache_cli.report.formats import format_for, render
from omnicache_cli.report.output import check_output, deliver


def kv_size(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder, its config.json, or a hub id.")
    ],
    available_kv_memory: Annotated[
        list[str] | None,
        typer.Option(metavar="GIB", help="For the pool, such as 16.87GiB; once, or per stage."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="N", help="As vLLM's.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(metavar="N", help="As vLLM's.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="As vLLM's; sliding windows reserve it.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="As vLLM's: auto, bfloat16, float16, float32.")
    ] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As vLLM's: auto, fp8, ...")] = "auto",
    kv_cache_dtype_skip_layers: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER", help="As vLLM's: layers, or sliding_window; repeat it."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(metavar="N", help="As vLLM's.")] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", metavar="N", help="As vLLM's.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "-pp", metavar="N", help="As vLLM's.")
    ] = 1,
    decode_context_parallel_size: Annotated[
        int, typer.Option("--decode-context-parallel-size", "-dcp", metavar="N", help="As vLLM's.")
    ] = 1,
    async_scheduling: Annotated[
        bool | None,
        typer.Option("--async-scheduling/--no-async-scheduling", help="Default on a GPU: on."),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="As vLLM's."),
    ] = None,
    mamba_cache_mode: Annotated[
        str | None, typer.Option(metavar="MODE", help="As vLLM's: none, align, all.")
    ] = None,
    mamba_cache_dtype: Annotated[str, typer.Option(help="As vLLM's.")] = "auto",
    mamba_ssm_cache_dtype: Annotated[str, typer.Option(help="As vLLM's.")] = "auto",
    disable_hybrid_kv_cache_manager: Annotated[
        bool | None,
        typer.Option(
            "--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager",
            help="As vLLM's.",
        ),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(metavar="N", help="As vLLM's: this many blocks, whatever fits.")
    ] = None,
    platform: Annotated[
        str, typer.Option(help="Whose defaults: cuda, or cpu (block 128, no async scheduling).")
    ] = "cuda",
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of an omni model, such as talker_config.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of the request shown. Default: max_model_len."),
    ] = None,
    output: Output = None,
    format: OutputFormat = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Size the KV cache of a model as vLLM would count it, without a GPU or weights.

    From config.json alone: bytes per token, pages and groups, blocks, tokens, concurrency, and what
    a request takes. Options have vLLM's names and its defaults.

    Example: omnicache kv-size Llama-3.1-8B --available-kv-memory 16.87GiB --max-model-len 8192
    """
    from omnicache_cli.kv_size.estimate import estimate
    from omnicache_cli.kv_size.hardware import memory_bytes
    from omnicache_cli.kv_size.model import open_config, read_model
    from omnicache_cli.kv_size.options import Options, platform_named
    from omnicache_cli.kv_size.report import estimate_report

    check_output(output, force=force)
    format_for(format, output)
    options = Options(
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_skip_layers=tuple(kv_cache_dtype_skip_layers or ()),
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        decode_context_parallel_size=decode_context_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=async_scheduling,
        enable_prefix_caching=enable_prefix_caching,
        mamba_cache_mode=mamba_cache_mode,
        mamba_cache_dtype=mamba_cache_dtype,
        mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        num_gpu_blocks_override=num_gpu_blocks_override,
        platform=platform_named(platform),
    )
    available = [memory_bytes(one, "--available-kv-memory") for one in available_kv_memory or ()]
    reading = read_model(open_config(model, stage))
    found = estimate(reading, options, available or None)
    report = estimate_report(reading, found, length or found.settings.max_model_len)
    deliver(render(report, format, output), output, quiet=quiet)
