"""`omnicache kv-size`: the KV cache of a model as vLLM would count it, without a GPU."""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnicache_cli.cli.options import (
    EnforceEager,
    EngineFraction,
    EngineInteger,
    EngineText,
    Force,
    Output,
    OutputFormat,
    Quiet,
)
from omnicache_cli.errors import EXIT_DONE
from omnicache_cli.report.formats import format_for, render
from omnicache_cli.report.output import check_output, deliver

if TYPE_CHECKING:
    from omnicache_cli.engine.kv_size.apart import VllmApart
    from omnicache_cli.kv_size.check import ExactAnswer
    from omnicache_cli.kv_size.options import Settings
    from omnicache_cli.kv_size.question import Drafter

AUTO = "auto"
"""vLLM's default of every dtype."""


def kv_size(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder, its config.json, or a hub id.")
    ],
    available_kv_memory: Annotated[
        list[str] | None,
        typer.Option(metavar="GIB", help="For the pool, such as 16.87GiB; once, or per stage."),
    ] = None,
    max_model_len: EngineInteger = None,
    max_num_seqs: EngineInteger = None,
    max_num_batched_tokens: EngineInteger = None,
    dtype: EngineText = None,
    kv_cache_dtype: EngineText = None,
    kv_cache_dtype_skip_layers: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER", help="As vLLM's: layers, or sliding_window; repeat it."),
    ] = None,
    block_size: EngineInteger = None,
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
    mamba_cache_mode: EngineText = None,
    mamba_cache_dtype: EngineText = None,
    mamba_ssm_cache_dtype: EngineText = None,
    disable_hybrid_kv_cache_manager: Annotated[
        bool | None,
        typer.Option(
            "--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager",
            help="As vLLM's.",
        ),
    ] = None,
    num_gpu_blocks_override: EngineInteger = None,
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
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="A card by name, such as h100 or rtx4090.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="GIB", help="A card by its memory, such as 24GiB.")
    ] = None,
    gpu_memory_utilization: EngineFraction = None,
    weights: Annotated[
        str | None, typer.Option(metavar="GIB", help="Per GPU. Default: safetensors headers.")
    ] = None,
    activation_memory: Annotated[
        str | None, typer.Option(metavar="GIB", help="Per GPU, where it is known. Default: bounds.")
    ] = None,
    enforce_eager: EnforceEager = None,
    speculative_method: Annotated[
        str | None, typer.Option(metavar="NAME", help="mtp, eagle, eagle3, draft_model or ngram.")
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(metavar="N", help="As vLLM's, with --speculative-method.")
    ] = 0,
    speculative_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The drafter's folder or config.json.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Ask vLLM's own code: the model on the meta device.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run both paths; exit 1 where they differ.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="The arithmetic line by line, with every source.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUES", help="max_model_len=4k..128k, or a list; repeat it."),
    ] = None,
    startup_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A vLLM start-up log to set the estimate against."),
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(metavar="WxH", help="Tokens of an image, such as 512x512.")
    ] = None,
    video: Annotated[
        list[str] | None,
        typer.Option(metavar="WxHxN", help="Tokens of a video of N sampled frames."),
    ] = None,
    audio: Annotated[
        list[str] | None, typer.Option(metavar="SECONDS", help="Tokens of a sound, such as 30s.")
    ] = None,
    tensor_cache: Annotated[
        bool,
        typer.Option("--tensor-cache", help="Host memory of vLLM-Omni's tensor prefix cache."),
    ] = False,
    modal_budget: Annotated[
        str | None,
        typer.Option(metavar="SHARES", help="What-if: text=0.5,image=0.3,audio=0.2."),
    ] = None,
    compression: Annotated[
        str | None, typer.Option(metavar="KEPT", help="What-if: image=0.4,audio=0.3.")
    ] = None,
    need_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Exit 1 where the cache holds fewer tokens."),
    ] = None,
    need_concurrency: Annotated[
        float | None, typer.Option(metavar="X", help="Exit 1 where the concurrency is lower.")
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
    from omnicache_cli.engine.kv_size.apart import VllmApart
    from omnicache_cli.kv_size.hardware import cpu_flags
    from omnicache_cli.kv_size.options import Options, platform_named
    from omnicache_cli.kv_size.question import Question, answer

    check_output(output, force=force)
    format_for(format, output)
    options = Options(
        dtype=AUTO if dtype is None else dtype,
        kv_cache_dtype=AUTO if kv_cache_dtype is None else kv_cache_dtype,
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
        mamba_cache_dtype=AUTO if mamba_cache_dtype is None else mamba_cache_dtype,
        mamba_ssm_cache_dtype=AUTO if mamba_ssm_cache_dtype is None else mamba_ssm_cache_dtype,
        num_speculative_tokens=num_speculative_tokens,
        speculative_method=speculative_method,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        num_gpu_blocks_override=num_gpu_blocks_override,
        platform=platform_named(platform),
        cpu_flags=cpu_flags(),
    )
    question = Question(
        model,
        options,
        stage=stage,
        available_kv_memory=tuple(available_kv_memory or ()),
        gpu=gpu,
        gpu_memory=gpu_memory,
        gpu_memory_utilization=gpu_memory_utilization,
        weights=weights,
        activation_memory=activation_memory,
        enforce_eager=bool(enforce_eager),
        length=length,
        speculative_model=speculative_model,
        exact=exact,
        check=check,
        explain=explain,
        sweeps=tuple(sweep or ()),
        startup_log=startup_log,
        images=tuple(image or ()),
        videos=tuple(video or ()),
        audios=tuple(audio or ()),
        tensor_cache=tensor_cache,
        modal_budget=modal_budget,
        compression=compression,
        need_tokens=need_tokens,
        need_concurrency=need_concurrency,
    )
    with VllmApart() as vllm:
        answered = answer(question, partial(_ask_vllm, vllm))
    deliver(render(answered.report, format, output), output, quiet=quiet)
    if answered.exit_code != EXIT_DONE:
        raise typer.Exit(answered.exit_code)


def _ask_vllm(
    vllm: "VllmApart",
    folder: str,
    settings: "Settings",
    available: Sequence[int] | None,
    drafter: "Drafter | None",
) -> "ExactAnswer":
    """The engine room's answer for settings that the fast path has resolved."""
    from omnicache_cli.engine.kv_size.accounting import ExactOptions

    own = {"available_bytes", "speculative_method", "speculative_model"}
    names = {field.name for field in fields(ExactOptions)} - own
    values = {name: getattr(settings, name) for name in names}
    options = ExactOptions(
        **values,
        available_bytes=available,
        speculative_method=drafter.method if drafter else None,
        speculative_model=drafter.folder if drafter else None,
    )
    return vllm.ask(folder, options)
