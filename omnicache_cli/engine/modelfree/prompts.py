"""Prompts of a file through vLLM's own hasher and block pool, one after another, into a run."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnicache_cli.engine.environment import Recording
from omnicache_cli.engine.modelfree.scheduler import (
    GroupPlan,
    Media,
    PoolPlan,
    PoolRequest,
    PoolScheduler,
)
from omnicache_cli.engine.modelfree.tokenizer import model_tokenizer
from omnicache_cli.engine.options import first_line, prepare_environment
from omnicache_cli.engine.tracing import tracing
from omnicache_cli.errors import BadInputError, UsageError


def parse_group(text: str) -> GroupPlan:
    """`full:16`, `sliding:16:64`, `mamba:528`. UsageError: none of these."""
    kind, *numbers = text.split(":")
    sizes = [int(one) for one in numbers if one.isdecimal() and int(one) > 0]
    wanted = {"full": 1, "sliding": 2, "mamba": 1}.get(kind)
    if wanted is None or len(sizes) != len(numbers) or len(sizes) != wanted:
        raise UsageError(
            f"--group {text!r} is no KV cache group; write full:BLOCK, sliding:BLOCK:WINDOW or "
            "mamba:BLOCK, in tokens"
        )
    if kind == "sliding":
        return GroupPlan("sliding", sizes[0], sizes[1])
    return GroupPlan("full" if kind == "full" else "mamba", sizes[0])


def record_prompts(
    asked: Sequence[Any], plan: PoolPlan, folder: Path, *, tokenizer: str | None
) -> None:
    """`asked`: AskedPrompts. `folder`: an empty folder, the run.

    UsageError: text without a tokenizer. BadInputError: a prompt that vLLM refuses.
    """
    prepare_environment(engine_process=False)
    if tokenizer is None and any(one.token_ids is None for one in asked):
        raise UsageError(
            "the prompts are text; name a model folder with --tokenizer, or give prompt_token_ids"
        )
    ids: dict[tuple[str, str], int] = {}
    requests = []
    for one, tokens in zip(asked, _tokens(asked, tokenizer), strict=True):
        adapter = one.adapter
        number = 1
        if adapter is not None:
            number = ids.setdefault((adapter.name, adapter.path), len(ids) + 1)
        requests.append(
            PoolRequest(
                one.name,
                tokens,
                max_tokens=one.max_tokens,
                lora_name=None if adapter is None else adapter.name,
                lora_id=number,
                cache_salt=one.cache_salt,
                media=tuple(
                    Media(item.modality, item.hash, item.offset, item.length) for item in one.media
                ),
                skip_reading_prefix_cache=one.skip_reading_prefix_cache,
            )
        )
    with tracing(folder, Recording(token_ids=True)):
        _drive(PoolScheduler(plan), asked, requests)


def _drive(scheduler: PoolScheduler, asked: Sequence[Any], requests: Sequence[PoolRequest]) -> None:
    """In the order of the file: at their arrival step, or when all before them have ended."""
    waiting = deque(zip(asked, requests, strict=True))
    aborts = {one.name: one.abort_step for one in asked if one.abort_step is not None}
    step = 0
    while waiting or scheduler.is_busy:
        while waiting:
            one, request = waiting[0]
            arrives = one.arrival_step is not None and one.arrival_step <= step
            if scheduler.is_busy and not arrives:
                break
            waiting.popleft()
            try:
                scheduler.add(request)
            except ValueError as error:
                raise BadInputError(f"vLLM refuses {one.name}: {first_line(error)}") from error
        scheduler.step()
        for name in [name for name, last in aborts.items() if last <= step]:
            scheduler.abort(name)
            del aborts[name]
        step += 1


def _tokens(asked: Sequence[Any], name: str | None) -> list[list[int]]:
    if name is None:
        return [one.token_ids for one in asked]
    tokenizer = model_tokenizer(name)
    return [tokenizer.text(one.text) if one.token_ids is None else one.token_ids for one in asked]
