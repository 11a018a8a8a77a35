"""What `omnicache simulate` tries: pool sizes and settings, of a run or as typed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnicache_cli.errors import BadInputError, UsageError

if TYPE_CHECKING:
    from omnicache_cli.engine.modelfree.scheduler import PoolPlan
    from omnicache_cli.simulate.recorded import RecordedEngine
    from omnicache_cli.simulate.study import Setup, Size

OF_LINES = ("input_format", "tokenizer", "hash_tokens", "time_unit", "max_tokens")
"""Options that say nothing to a recorded run."""

OF_CLOCK = ("step_ms", "token_us", "time_unit")
"""Options that say nothing where requests do not arrive by a clock."""

STEP_MS = 20.0
TOKEN_US = 20.0

MOST_BLOCKS = 10_000_000
"""Of all pools at one size: some 2 GB of vLLM's objects."""

HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
"""vLLM's PrefixCachingHashAlgo."""

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Sizes of a run that are tried where none is named, times its own."""

KINDS = {"full_attention": "full", "mla_attention": "full", "sliding_window": "sliding"} | {
    "mamba": "mamba"
}
"""Kinds of KV cache groups that kv-size tells, and those that are simulated."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What to run."""

    setup: "Setup"
    pool: "PoolPlan"  # but for its number of blocks
    groups: tuple[str, ...]
    recorded: "RecordedEngine | None"
    current_blocks: int | None
    notes: tuple[str, ...]


def refuse_contradictions(given: dict[str, Any]) -> None:
    """UsageError: options that say nothing to each other."""
    for is_wrong, why in (*_of_the_workload(given), *_of_the_pool(given)):
        if is_wrong:
            raise UsageError(why)


def _of_the_workload(given: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    is_run = Path(given["workload"]).is_dir()
    for name in OF_LINES:
        yield (
            is_run and given[name] is not None,
            f"{_option(name)} is about JSON lines, and {given['workload']} is a run",
        )
    yield (
        not is_run and given["engine"] is not None,
        "--engine is about a recorded run; leave it out",
    )
    yield (
        given["hash_tokens"] is not None and given["input_format"] not in (None, "hashes"),
        "--hash-tokens is about --input-format hashes; leave it out",
    )
    yield (
        given["concurrency"] is not None and given["arrivals"] not in (None, "one-by-one"),
        "--concurrency sends the next when one has ended; leave out --arrivals",
    )
    mode = "one-by-one" if given["concurrency"] is not None else given["arrivals"]
    for name in OF_CLOCK:
        yield (
            given[name] is not None and mode not in (None, "clock"),
            f"{_option(name)} is about arrivals by clock; leave it out",
        )
    yield (
        given["route"] is not None and given["replicas"] == 1,
        "--route is about several replicas; give --replicas N too",
    )


def _of_the_pool(given: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    is_run, memory, algorithm = (
        Path(given["workload"]).is_dir(),
        given["kv_memory"],
        given["hash_algo"],
    )
    yield (
        bool(given["blocks"] and memory),
        "--blocks and --kv-memory both say the size; give one of them",
    )
    yield (
        bool(given["group"]) and given["block_size"] is not None,
        "--group and --block-size cannot be combined; each --group has its block",
    )
    yield (
        given["model"] is not None and not memory,
        "--model goes with --kv-memory; leave it out",
    )
    yield (
        bool(memory) and given["model"] is None and not is_run,
        "--kv-memory needs to know the model; name it with --model",
    )
    yield (
        not (is_run or given["blocks"] or memory),
        "no pool size; give --blocks N,N,... or --kv-memory GIB,... --model MODEL",
    )
    yield (
        algorithm not in (None, *HASH_ALGORITHMS),
        f"--hash-algo {algorithm!r}: choose {', '.join(HASH_ALGORITHMS)}",
    )
    yield (
        given["timeline"] and given["replicas"] > 1,
        "--timeline is about one pool; leave out --replicas",
    )


def plan_of(given: dict[str, Any]) -> Planned:
    """UsageError and BadInputError say which option or file is wrong."""
    from omnicache_cli.engine.modelfree.prompts import parse_group
    from omnicache_cli.engine.modelfree.scheduler import PoolPlan
    from omnicache_cli.simulate.replay import Arrivals
    from omnicache_cli.simulate.study import Setup
    from omnicache_cli.simulate.timeline import MAX_BLOCKS

    recorded = recorded_engine_of(given)
    found = sizes_and_groups(given, recorded)
    refuse_what_does_not_fit(found.sizes, given["replicas"])
    plan = PoolPlan(tuple(parse_group(one) for one in found.groups), max_num_seqs=256)
    if recorded is not None:
        plan = replace(plan, **recorded.settings())
    plan = with_room_for_all(replace(plan, **_typed(given)), given)
    setup = Setup(
        found.sizes,
        Arrivals(
            concurrency=given["concurrency"] or 1,
            step_seconds=_or(given["step_ms"], STEP_MS) / 1e3,
            token_seconds=_or(given["token_us"], TOKEN_US) / 1e6,
        ),
        given["arrivals"] if given["concurrency"] is None else "one-by-one",
        given["replicas"],
        given["route"] or "round-robin",
        given["bound"],
        given["requests"],
        given["timeline"],
    )
    if setup.timeline and (len(setup.sizes) > 1 or setup.sizes[0].num_blocks > MAX_BLOCKS):
        raise UsageError(
            f"--timeline is for one pool of at most {MAX_BLOCKS} blocks; give --blocks N"
        )
    current = given["current"]
    if current is None and recorded is not None:
        current = recorded.num_blocks
    notes = () if recorded is None else recorded.notes()
    if given["bound"] and (len(plan.groups) > 1 or plan.groups[0].kind != "full"):
        notes = (*notes, "an upper bound is known for one group of full attention only")
    return Planned(setup, plan, found.groups, recorded, current, notes)


def with_room_for_all(plan: "PoolPlan", given: dict[str, Any]) -> "PoolPlan":
    """vLLM wants a token in a step's budget for each request that may run.

    UsageError: both were given and contradict.
    """
    tokens = plan.max_num_batched_tokens
    if tokens >= plan.max_num_seqs:
        return plan
    if given["max_num_seqs"] is not None:
        raise UsageError(
            f"--max-num-seqs {plan.max_num_seqs} is more than {tokens} batched tokens a step; "
            "lower it, or raise --max-num-batched-tokens"
        )
    return replace(plan, max_num_seqs=tokens)


def recorded_engine_of(given: dict[str, Any]) -> "RecordedEngine | None":
    from omnicache_cli.simulate.recorded import recorded_engine
    from omnicache_cli.trace.run import Run

    folder = Path(given["workload"])
    return recorded_engine(Run(folder), given["engine"]) if folder.is_dir() else None


@dataclass(frozen=True, slots=True)
class _Sizes:
    sizes: "tuple[Size, ...]"
    groups: tuple[str, ...]


def sizes_and_groups(given: dict[str, Any], recorded: "RecordedEngine | None") -> _Sizes:
    """Pools to try, from small to large, and the KV cache groups in them."""
    from omnicache_cli.simulate.study import Size

    groups = tuple(given["group"] or ())
    if not groups and given["block_size"] is not None:
        groups = (f"full:{given['block_size']}",)
    if given["model"] is not None:
        return _of_model(given, groups)
    if not groups:
        groups = ("full:16",) if recorded is None else tuple(recorded.group_texts())
    if given["kv_memory"]:
        sizes = [_of_memory(text, recorded) for text in _split(given["kv_memory"])]
    elif given["blocks"]:
        sizes = [Size(_blocks(text)) for text in _split(given["blocks"])]
    else:
        assert recorded is not None
        factors = (1.0,) if given["timeline"] else FACTORS
        sizes = [Size(max(1, int(recorded.num_blocks * factor))) for factor in factors]
    unique = {one.num_blocks: one for one in sizes}
    return _Sizes(tuple(unique[number] for number in sorted(unique)), groups)


def refuse_what_does_not_fit(sizes: "Sequence[Size]", replicas: int) -> None:
    """UsageError: vLLM's pool holds an object for each block, more than a machine has room for."""
    largest = max(one.num_blocks for one in sizes)
    if largest * replicas > MOST_BLOCKS:
        pools = f" in each of {replicas} replicas" if replicas > 1 else ""
        raise UsageError(
            f"{largest} blocks{pools} are more than the {MOST_BLOCKS} that are simulated; give "
            "fewer, or larger ones with --block-size"
        )


def _of_model(given: dict[str, Any], groups: tuple[str, ...]) -> _Sizes:
    """As `omnicache kv-size` counts it."""
    from omnicache_cli.kv_size.hardware import memory_bytes
    from omnicache_cli.kv_size.options import Options
    from omnicache_cli.kv_size.question import Question, answer
    from omnicache_cli.simulate.study import Size

    options = Options(
        block_size=given["block_size"],
        max_model_len=given["max_model_len"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
    )
    sizes = []
    told: tuple[str, ...] = ()
    for text in _split(given["kv_memory"]):
        memory_bytes(text, "--kv-memory")
        question = Question(given["model"], options, available_kv_memory=(text,))
        result = answer(question, _no_engine).report.result
        if not result["num_blocks"]:
            raise BadInputError(
                f"--kv-memory {text}: {result['refusal'] or 'no block fits'}; give more"
            )
        told = tuple(_group_text(one) for one in result["groups"])
        sizes.append(Size(int(result["num_blocks"]) - 1, text))
    return _Sizes(tuple(sorted(sizes, key=lambda one: one.num_blocks)), groups or told)


def _no_engine(*_: Any) -> Any:
    raise AssertionError("the fast path of kv-size asks no engine")


def _group_text(group: dict[str, Any]) -> str:
    kind = KINDS.get(group["kind"])
    if kind is None:
        raise BadInputError(
            f"a KV cache group of kind {group['kind']} is not simulated; describe the groups with "
            "--group"
        )
    window = f":{group['window']}" if kind == "sliding" else ""
    return f"{kind}:{group['block_size']}{window}"


def _of_memory(text: str, recorded: "RecordedEngine | None") -> "Size":
    from omnicache_cli.kv_size.hardware import memory_bytes
    from omnicache_cli.simulate.study import Size

    assert recorded is not None
    each = recorded.bytes_per_block
    if each is None:
        raise BadInputError("the run does not tell the bytes of a block; give --blocks, or --model")
    blocks = memory_bytes(text, "--kv-memory") // each - 1  # one is vLLM's null block
    if blocks < 1:
        raise UsageError(f"--kv-memory {text} holds no block of {each} bytes; give more")
    return Size(blocks, text)


def _blocks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--blocks {text!r}: write numbers of blocks from 1, such as 1000,2000")
    return int(text)


def _split(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of the scheduler that were given."""
    names = (
        *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "match_unit", "hash_algo"),
        "long_prefill_token_threshold",
    )
    typed = {name: given[name] for name in names if given[name] is not None}
    if given["drop_unit"]:
        typed["drops_unit"] = True
    if given["retention_interval"] is not None:
        from omnicache_cli.cli.explain import parse_interval

        typed["retention_interval"] = parse_interval(given["retention_interval"])
    return typed


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
