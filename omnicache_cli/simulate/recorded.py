"""A recorded run as a workload: its requests as they arrived, and the engine that it ran on."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.prefix.prompts import Adapter, MediaItem
from omnicache_cli.simulate.request import KnownHashes, SimRequest
from omnicache_cli.trace.records import CacheGroup, EngineSource, Finished, SchedulerStep
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Request

MAX_WAITING = 100_000
"""Requests that arrived after one that has not ended yet; more are not kept."""


NEEDED = {
    *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "prefix_caching_hash_algo"),
    *("prefix_cache_retention_interval", "num_spec_tokens", "async_scheduling", "policy"),
    "kv_connector",
}
"""Options of the engine's record."""


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    """What a simulation takes over from the engine of a run."""

    source: EngineSource

    def __post_init__(self) -> None:
        """BadInputError: the run does not say what is needed."""
        missing = NEEDED - self.source.options.keys()
        if missing:
            raise BadInputError(
                f"the run does not tell {', '.join(sorted(missing))} of its engine; record it again"
            )

    @property
    def num_blocks(self) -> int:
        """Usable ones, the null block apart."""
        return self.source.num_gpu_blocks - 1

    @property
    def bytes_per_block(self) -> int | None:
        """Of the pool on one rank; None: it was recorded without tensors."""
        total = sum(int(one["size"]) for one in self.source.kv_cache_tensors)
        return total // self.source.num_gpu_blocks if total else None

    def settings(self) -> dict[str, Any]:
        """Of the scheduler, by the names of the engine room's PoolPlan."""
        options = self.source.options
        return {
            "max_model_len": options["max_model_len"],
            "max_num_batched_tokens": options["max_num_batched_tokens"],
            "max_num_seqs": options["max_num_seqs"],
            "hash_algo": options["prefix_caching_hash_algo"],
            "retention_interval": options["prefix_cache_retention_interval"],
            "match_unit": self.source.hash_block_size if len(self.source.groups) > 1 else None,
            "drops_unit": any(one.is_eagle_group for one in self.source.groups),
            "enable_prefix_caching": self.source.enable_prefix_caching,
        }

    def notes(self) -> tuple[str, ...]:
        """What of the engine is not simulated."""
        options = self.source.options
        found = []
        if options["num_spec_tokens"]:
            found.append("speculative decoding is not simulated: a step gives one token")
        if options["async_scheduling"]:
            found.append(
                "asynchronous scheduling is not simulated: requests may end a step earlier"
            )
        if options["policy"] != "fcfs":
            found.append(
                f"the policy {options['policy']} is not simulated: first come, first served"
            )
        if not self.source.enable_prefix_caching:
            found.append("prefix caching was off in the run, and is off here")
        return tuple(found)

    def group_texts(self) -> list[str]:
        """The groups as `--group` takes them. BadInputError: one has another kind of cache."""
        return [_group_text(one) for one in self.source.groups]


def recorded_engine(run: Run, wanted: str | None) -> RecordedEngine:
    """The engine named, by its id or number; else the only one.

    UsageError: there are several. BadInputError: none has this name, or what it did cannot be
    replayed without a model.
    """
    engines = _engines(run)
    names = list(engines)
    if wanted is None and len(names) > 1:
        raise UsageError(f"{run.folder} has {len(names)} engines; name one with --engine 0")
    if wanted is not None and wanted.isdecimal() and int(wanted) < len(names):
        wanted = names[int(wanted)]
    if wanted is not None and wanted not in names:
        raise BadInputError(f"{run.folder} has no engine {wanted}; choose: {', '.join(names)}")
    if not names:
        raise BadInputError(f"{run.folder} has no scheduler's records; record it again")
    engine = RecordedEngine(engines[wanted or names[0]])
    options = engine.source.options
    if options["kv_connector"]:
        raise BadInputError(f"{run.folder} ran with a KV connector, which is not simulated")
    if engine.source.parallel.get("decode_context_parallel_size", 1) > 1:
        raise BadInputError(f"{run.folder} ran with context parallelism, which is not simulated")
    return engine


def _engines(run: Run) -> dict[str, EngineSource]:
    """By name. Each declares itself before its first step; the files are read side by side."""
    found: dict[str, EngineSource] = {}
    for _, record in Run(run.folder).records():
        if isinstance(record, EngineSource):
            found.setdefault(record.engine, record)
        elif isinstance(record, SchedulerStep) and record.step > 0:
            break
    return found


def _group_text(group: CacheGroup) -> str:
    if group.spec in {"FullAttentionSpec", "MLAAttentionSpec"} and group.sliding_window is None:
        return f"full:{group.block_size}"
    if group.spec == "SlidingWindowSpec":
        return f"sliding:{group.block_size}:{group.sliding_window}"
    if group.spec == "MambaSpec":
        return f"mamba:{group.block_size}"
    raise BadInputError(
        f"a KV cache group of {group.spec} is not simulated; describe the groups with --group"
    )


class RecordedRequests:
    """Requests in the order of their arrival, each once it has ended and its length is known."""

    def __init__(self, run: Run, engine: RecordedEngine) -> None:
        self.num_aborted = 0  # their client went away; they end where they ended
        self.num_unfinished = 0  # they had not ended when the run did: left out
        self.num_sessions = 0  # streaming input, whose later parts come without a lookup
        self._run = run
        self._engine = engine.source

    def __iter__(self) -> Iterator[SimRequest]:
        waiting: deque[Request] = deque()
        ended: dict[int, tuple[str, int]] = {}
        for step in self._run.steps():
            if step.engine.engine != self._engine.engine:
                continue
            waiting += step.arrived
            for event in step.before + step.record.events + step.after:
                if isinstance(event, Finished):
                    ended[event.request] = (event.status, event.num_output_tokens)
            self.num_sessions += sum(
                one.session_prompt_tokens is not None for one in step.record.admitted
            )
            while waiting and waiting[0].number in ended:
                one = waiting.popleft()
                yield self._request(one, *ended.pop(one.number))
            if len(waiting) > MAX_WAITING:
                raise BadInputError(
                    f"{self._run.folder}: request #{waiting[0].number} does not end while "
                    f"{MAX_WAITING:,} others arrive; record a shorter run"
                )
        for one in waiting:
            if one.number in ended:
                yield self._request(one, *ended.pop(one.number))
            else:
                self.num_unfinished += 1

    def notes(self) -> list[str]:
        """What is to be said once all is read."""
        found = []
        if self.num_aborted:
            found.append(
                f"{self.num_aborted:,} requests were aborted: they end at their last token"
            )
        if self.num_unfinished:
            found.append(f"{self.num_unfinished:,} requests had not ended with the run: left out")
        if self.num_sessions:
            found.append(
                f"{self.num_sessions:,} parts of streaming-input sessions are not simulated"
            )
        return found

    def _request(self, one: Request, status: str, num_output_tokens: int) -> SimRequest:
        record = one.record
        self.num_aborted += status == "FINISHED_ABORTED"
        adapter = None if record.lora_name is None else Adapter(record.lora_name)
        size = self._engine.hash_block_size
        return SimRequest(
            one.external_id,
            record.num_prompt_tokens,
            max(1, num_output_tokens),
            record.token_ids,
            KnownHashes(size, [bytes.fromhex(text) for text in one.block_hashes]),
            media=tuple(
                MediaItem(item.hash, item.offset, item.length, item.modality)
                for item in record.multimodal
            ),
            cache_salt=record.cache_salt,
            adapter=adapter,
            skip_reading_prefix_cache=record.skip_reading_prefix_cache,
            arrival_step=record.arrival_step,
            arrival_seconds=record.arrival_ns / 1e9,
        )
