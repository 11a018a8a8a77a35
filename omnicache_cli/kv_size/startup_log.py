"""Reads what a real vLLM server printed when it started, and sets an estimate beside it.

Knows the two-line form (size, then concurrency), the one-line form of vLLM 0.20.2 and later, GPU
and CPU wording, and several workers.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from pathlib import Path
from typing import Any

from omnicache_cli.errors import BadInputError
from omnicache_cli.kv_size.estimate import Estimate
from omnicache_cli.kv_size.hardware import GIB
from omnicache_cli.kv_size.options import Options

ROUNDING_GIB = 0.005
"""vLLM prints GiB with two decimals."""

MAX_BLOCKS = 200_000
"""Pool sizes inside the rounding interval that are tried one by one."""

_AVAILABLE = re.compile(r"Available KV cache memory:\s*([0-9.]+)\s*GiB")
_RESERVED = re.compile(r"reserved ([0-9.]+)\s*GiB memory for KV Cache")
_SET = re.compile(r"(?:Explicitly|Auto) set \(([0-9.]+)/[0-9.]+\) GiB for KV cache")
_SIZE = re.compile(r"(GPU|CPU|XPU|[A-Z]+) KV cache size:\s*([0-9,]+)\s*tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for\s*([0-9,]+)\s*tokens per request:\s*([0-9.]+)x")
_ONE_LINE = re.compile(r"KV cache size:.*tokens,\s*Maximum concurrency")
_BLOCKS = re.compile(
    r"(?:# GPU blocks:|num_gpu_blocks is:|num_gpu_blocks=|# cuda blocks:)\s*([0-9]+)"
)
_BATCHED = re.compile(r"max_num_batched_tokens[=:]\s*([0-9]+)")
_VERSION = re.compile(r"(?:version |LLM engine \(v)([0-9]+\.[0-9]+\.[0-9]+[^\s,)]*)")
_SETTINGS = {
    "tensor_parallel_size": re.compile(r"tensor_parallel_size=([0-9]+)"),
    "pipeline_parallel_size": re.compile(r"pipeline_parallel_size=([0-9]+)"),
    "decode_context_parallel_size": re.compile(r"decode_context_parallel_size=([0-9]+)"),
}
_KV_DTYPE = re.compile(r"kv_cache_dtype=([a-z0-9_]+)")
_DTYPE = re.compile(r"[ ,]dtype=torch\.([a-z0-9]+)")
_PREFIX = re.compile(r"enable_prefix_caching=(True|False)")


@dataclass(frozen=True, slots=True)
class StartupLog:
    """What the log says; None is what it does not say."""

    device: str | None
    available_gib: tuple[float, ...]  # one per worker that printed it
    tokens: int | None
    max_model_len: int | None
    concurrency: float | None
    num_blocks: int | None
    is_one_line: bool
    version: str | None
    max_num_batched_tokens: int | None
    settings: dict[str, int]
    kv_cache_dtype: str | None
    dtype: str | None
    prefix_caching: bool | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One quantity: printed, estimated (an interval over the rounding), and the verdict."""

    name: str
    printed: str
    estimated: str
    verdict: str  # agrees, explained: ..., unexplained


def read_log(path: Path) -> StartupLog:
    """BadInputError: the file is not readable, or holds no line about a KV cache."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInputError(
            f"cannot read {path}: {error.strerror}; name a vLLM start-up log"
        ) from None
    size, concurrency = _SIZE.search(text), _CONCURRENCY.search(text)
    amounts = _AVAILABLE.findall(text) or _RESERVED.findall(text) or _SET.findall(text)
    available = [_number(one, path) for one in amounts]
    if size is None and not available:
        raise BadInputError(
            f"{path} has no line on the KV cache (such as 'GPU KV cache size: 157,952 tokens'); "
            "name the log of a server that started"
        )
    blocks, batched, version = _BLOCKS.search(text), _BATCHED.search(text), _VERSION.search(text)
    kv_dtype, dtype, prefix = _KV_DTYPE.search(text), _DTYPE.search(text), _PREFIX.search(text)
    return StartupLog(
        device=size.group(1) if size else None,
        available_gib=tuple(available),
        tokens=_integer(size.group(2)) if size else None,
        max_model_len=_integer(concurrency.group(1)) if concurrency else None,
        concurrency=_number(concurrency.group(2), path) if concurrency else None,
        num_blocks=int(blocks.group(1)) if blocks else None,
        is_one_line=_ONE_LINE.search(text) is not None,
        version=version.group(1) if version else None,
        max_num_batched_tokens=int(batched.group(1)) if batched else None,
        settings={
            name: int(match.group(1))
            for name, pattern in _SETTINGS.items()
            if (match := pattern.search(text)) is not None
        },
        kv_cache_dtype=kv_dtype.group(1) if kv_dtype else None,
        dtype=dtype.group(1) if dtype else None,
        prefix_caching=prefix.group(1) == "True" if prefix else None,
    )


def options_of_log(log: StartupLog, options: Options) -> tuple[Options, list[str]]:
    """Options that the log states and the user has not given, and their names."""
    taken: list[str] = []
    plain = Options()
    values: dict[str, object] = dict(log.settings)
    values |= {
        "max_model_len": log.max_model_len,
        "max_num_batched_tokens": log.max_num_batched_tokens,
        "kv_cache_dtype": log.kv_cache_dtype,
        "enable_prefix_caching": log.prefix_caching,
        "platform": "cpu" if log.device == "CPU" else None,
    }
    if log.dtype in ("bfloat16", "float16", "float32"):
        values["dtype"] = log.dtype
    for name, value in values.items():
        if value is not None and getattr(options, name) == getattr(plain, name):
            changes: dict[str, Any] = {name: value}
            options = replace(options, **changes)
            taken.append(name)
    return options, taken


Count = Callable[[Sequence[int] | None], Estimate]
"""The estimate for bytes of KV cache memory."""


def compare_log(
    log: StartupLog, count: Count, older: Count, given: Sequence[int] | None = None
) -> list[Finding]:
    """`older` counts one batch in flight; `given` is bytes where the log prints no memory."""
    findings = _compared(log, count, given)
    if any(one.verdict == "unexplained" for one in findings):
        before = _compared(log, older, given)
        findings = [
            replace(was, verdict="explained: older vLLM counts one batch in flight")
            if now.verdict == "unexplained" and was.verdict == "agrees"
            else now
            for now, was in zip(findings, before, strict=True)
        ]
    return findings


def _compared(log: StartupLog, count: Count, given: Sequence[int] | None) -> list[Finding]:
    low_bytes = [ceil((amount - ROUNDING_GIB) * GIB) for amount in log.available_gib]
    high_bytes = [floor((amount + ROUNDING_GIB) * GIB) for amount in log.available_gib]
    if not low_bytes and given:
        low_bytes = high_bytes = list(given)
    if not low_bytes and log.num_blocks is None:
        missing = "unexplained: the log prints no memory; give --available-kv-memory"
        return [Finding("KV cache memory", "not printed", "unknown", missing)]
    low, high = count(_least(low_bytes)), count(_least(high_bytes))
    if not low_bytes and log.num_blocks is not None:
        low = high = count([log.num_blocks * low.pool.bytes_per_block])
    pools = _pools(low, high, count)
    findings = []
    if log.num_blocks is not None:
        findings.append(
            _within("number of blocks", log.num_blocks, low.pool.num_blocks, high.pool.num_blocks)
        )
    if log.tokens is not None:
        findings.append(_tokens(log, low, high, pools))
    if log.concurrency is not None:
        findings.append(_concurrency(log, low, high, pools))
    return findings


def _least(amounts: list[int]) -> list[int] | None:
    """Workers share block ids: the pool is the least of them."""
    return [min(amounts)] if amounts else None


def _pools(low: Estimate, high: Estimate, count: Count) -> list[Estimate]:
    """An estimate for every number of blocks inside the rounding."""
    first, last = low.pool.num_blocks, high.pool.num_blocks
    if first is None or last is None or last - first > MAX_BLOCKS:
        return []
    block = low.pool.bytes_per_block
    return [count([number * block]) for number in range(first, last + 1)]


def _tokens(log: StartupLog, low: Estimate, high: Estimate, pools: list[Estimate]) -> Finding:
    printed = log.tokens or 0
    is_new = _is_new_definition(log)
    reached_new = any(pool.tokens == printed for pool in pools)
    reached_old = any(pool.tokens_old == printed for pool in pools)
    bounds = (low.tokens, high.tokens) if is_new else (low.tokens_old, high.tokens_old)
    estimated = f"{bounds[0]:,} to {bounds[1]:,}"
    if reached_new if is_new else reached_old:
        verdict = "agrees"
    elif reached_new or reached_old:
        other = "concurrency x max_model_len" if reached_new else "blocks // groups x block size"
        verdict = f"explained: printed by the other definition, {other}"
    elif (
        low.tokens is not None and high.tokens is not None and low.tokens <= printed <= high.tokens
    ):
        verdict = "agrees"
    else:
        verdict = "unexplained"
    return Finding("KV cache size, tokens", f"{printed:,}", estimated, verdict)


def _is_new_definition(log: StartupLog) -> bool:
    """One line says so; else the version, from 0.20.2 on."""
    if log.is_one_line:
        return True
    if log.version is None:
        return False
    numbers = tuple(int(part) for part in re.findall(r"[0-9]+", log.version)[:3])
    return numbers >= (0, 20, 2)


def _concurrency(log: StartupLog, low: Estimate, high: Estimate, pools: list[Estimate]) -> Finding:
    printed = log.concurrency or 0.0
    first, last = low.concurrency or 0.0, high.concurrency or 0.0
    if any(
        pool.concurrency is not None and round(pool.concurrency, 2) == printed for pool in pools
    ):
        verdict = "agrees"
    else:
        verdict = "agrees" if round(first, 2) <= printed <= round(last, 2) else "unexplained"
    return Finding(
        "maximum concurrency", f"{printed:.2f}x", f"{first:.2f}x to {last:.2f}x", verdict
    )


def _within(name: str, printed: int, low: int | None, high: int | None) -> Finding:
    agrees = low is not None and high is not None and low <= printed <= high
    estimated = "unknown" if low is None or high is None else f"{low:,} to {high:,}"
    return Finding(name, f"{printed:,}", estimated, "agrees" if agrees else "unexplained")


def _number(text: str, path: Path) -> float:
    """BadInputError: dots and digits that are none, as in 1.2.3."""
    try:
        return float(text)
    except ValueError:
        raise BadInputError(
            f"{path} says {text!r} where vLLM prints a number; name an undamaged log"
        ) from None


def _integer(text: str) -> int:
    return int(text.replace(",", ""))
