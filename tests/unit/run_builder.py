"""Run folders made by hand: records that agree with each other, written as the probe writes them.

A test says what the scheduler did; `Recording` derives the forward pass that goes with it. To
damage a run, change one of its records afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from omnicache_cli.trace.files import SUFFIX
from omnicache_cli.trace.manifest import MANIFEST_NAME, Manifest
from omnicache_cli.trace.records import (
    SCHEMA_VERSION,
    Admission,
    AfterStep,
    Allocated,
    AnyEvent,
    AnyRecord,
    BatchDescriptor,
    CacheGroup,
    End,
    EngineSource,
    Finished,
    ForwardStep,
    Freed,
    GroupForward,
    Header,
    Preempted,
    RequestRecord,
    SchedulerStep,
    WorkerSource,
    to_runs,
)

ENGINE = "host.1.0"


def cache_group(**changes: Any) -> CacheGroup:
    group = CacheGroup("FullAttentionSpec", 16, 2, ["layer.0", "layer.1"], 4096, maps_slots=True)
    return replace(group, **changes)


@dataclass(frozen=True)
class Admit:
    """A request starts to run with these blocks, the first ones found in the cache."""

    tables: Sequence[Sequence[int]]  # per group
    hit: int = 0
    external: int = 0
    resumed: bool = False
    session_prompt_tokens: int | None = None  # a session that goes on from where it stands


class Recording:
    """The records of one engine process, in order."""

    def __init__(
        self,
        groups: Sequence[CacheGroup] = (cache_group(),),
        *,
        kernel_block_sizes: Sequence[int] | None = None,
        ranks: int = 1,
        engine: str = ENGINE,
        num_blocks: int = 64,
        **engine_changes: Any,
    ) -> None:
        self.groups = list(groups)
        self.kernel = list(kernel_block_sizes or [group.block_size for group in groups])
        self.ranks = ranks
        self.num_blocks = num_blocks
        source = EngineSource(
            source=0,
            engine=engine,
            model="tiny",
            scheduler_class="Scheduler",
            num_gpu_blocks=num_blocks,
            block_size=self.groups[0].block_size,
            hash_block_size=self.groups[0].block_size,
            enable_prefix_caching=True,
            groups=self.groups,
            kv_cache_tensors=[],
            parallel={"world_size": ranks},
            options={},
            randomized_request_ids=True,
        )
        self.records: list[AnyRecord] = [replace(source, **engine_changes)]
        for rank in range(ranks):
            self.records.append(
                WorkerSource(
                    source=1 + rank,
                    engine=engine,
                    runner_class="GPUModelRunner",
                    rank=rank,
                    tp_rank=rank,
                    pp_rank=0,
                    device="cpu",
                    metadata_classes=["CPUAttentionMetadata"] * len(self.groups),
                    kernel_block_sizes=self.kernel,
                    kv_cache_shapes={},
                    kv_cache_dtype="bfloat16",
                )
            )
        self._ids: list[str] = []
        self._computed: dict[int, int] = {}
        self._tables: dict[int, list[list[int]]] = {}
        self._prompts: list[int] = []
        self.next_step = 0

    def arrive(self, external_id: str, num_prompt_tokens: int, **changes: Any) -> int:
        number = len(self._ids)
        self._ids.append(f"{external_id}-{number:08x}")
        self._prompts.append(num_prompt_tokens)
        record = RequestRecord(
            source=0,
            request=number,
            request_id=self._ids[number],
            arrival_ns=0,
            arrival_step=self.next_step,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=16,
            block_hashes=[],
        )
        self.records.append(replace(record, **changes))
        return number

    def step(
        self,
        tokens: dict[int, int],
        *,
        admit: dict[int, Admit] | None = None,
        grow: dict[int, Sequence[Sequence[int]]] | None = None,
        events: Sequence[AnyEvent] = (),
        rows: Sequence[int] | None = None,
        padding: int = 0,
        descriptor: BatchDescriptor | None = None,
        cudagraph_mode: str = "NONE",
    ) -> None:
        """Schedule `tokens`, in this order; `rows` is the worker's order of them."""
        happened = list(events)
        admissions = []
        for number, one in (admit or {}).items():
            session = one.session_prompt_tokens is not None
            held = self._tables[number] if session else [[] for _ in one.tables]
            self._tables[number] = [list(table) for table in one.tables]
            if not session:
                self._computed[number] = one.hit + one.external
            fresh = [
                block
                for group, table, old in zip(self.groups, one.tables, held, strict=True)
                for block in table[max(len(old), -(-one.hit // group.block_size)) :]
                if block
            ]
            if fresh:
                happened.append(Allocated(number, to_runs(fresh)))
            admissions.append(
                Admission(
                    number,
                    self._computed[number],
                    one.hit,
                    0 if session else self._prompts[number],
                    [to_runs(list(table)) for table in one.tables],
                    one.resumed,
                    session_prompt_tokens=one.session_prompt_tokens,
                )
            )
        for number, additions in (grow or {}).items():
            for table, more in zip(self._tables[number], additions, strict=True):
                table.extend(more)
                happened.append(Allocated(number, to_runs(list(more))))
        computed = [self._computed[number] for number in tokens]
        self.records.append(
            SchedulerStep(
                source=0,
                step=self.next_step,
                start_ns=self.next_step * 10_000_000,
                schedule_ns=100_000,
                num_running=len(tokens),
                num_waiting=0,
                num_free_blocks=min(max(0, 40 - self.next_step), self.num_blocks - 1),
                scheduled=list(tokens),
                num_scheduled_tokens=list(tokens.values()),
                num_computed_tokens=computed,
                admitted=admissions,
                new_block_ids=[
                    (number, [to_runs(list(more)) for more in additions])
                    for number, additions in (grow or {}).items()
                ],
                events=happened,
            )
        )
        order = list(rows if rows is not None else tokens)
        for rank in range(self.ranks):
            self.records.append(
                self._forward(1 + rank, order, tokens, padding, descriptor, cudagraph_mode)
            )
        for number, count in tokens.items():
            self._computed[number] += count
        self.next_step += 1

    def after(self, *events: AnyEvent) -> None:
        self.records.append(AfterStep(0, self.next_step - 1, 0, list(events)))

    def finish(self, number: int, num_output_tokens: int = 1) -> None:
        """The request ends; all of its blocks that no test shares go back to the pool."""
        blocks = [block for table in self._tables[number] for block in reversed(table) if block]
        self.after(
            Finished(number, "FINISHED_STOPPED", num_output_tokens), Freed(number, to_runs(blocks))
        )

    def preempt(self, number: int) -> tuple[AnyEvent, ...]:
        """The events of a preemption, for `step(events=...)`."""
        blocks = [block for table in self._tables[number] for block in reversed(table) if block]
        return Preempted(number), Freed(number, to_runs(blocks))

    def _forward(
        self,
        source: int,
        order: list[int],
        tokens: dict[int, int],
        padding: int,
        descriptor: BatchDescriptor | None,
        cudagraph_mode: str,
    ) -> ForwardStep:
        starts = [0]
        for number in order:
            starts.append(starts[-1] + tokens[number])
        lens = [self._computed[number] + tokens[number] for number in order]
        groups = []
        for index, (group, kernel) in enumerate(zip(self.groups, self.kernel, strict=True)):
            ratio = group.block_size // kernel
            tables = [
                [
                    block * ratio + part
                    for block in self._tables[number][index]
                    for part in range(ratio)
                ]
                for number in order
            ]
            slots = [
                table[position // kernel] * kernel + position % kernel
                for table, number in zip(tables, order, strict=True)
                for position in range(
                    self._computed[number], self._computed[number] + tokens[number]
                )
            ]
            groups.append(
                GroupForward(
                    num_actual_tokens=starts[-1],
                    max_query_len=max(tokens.values()),
                    max_seq_len=max(lens),
                    query_start_loc=to_runs(starts) if index == 0 else None,
                    seq_lens=lens if index == 0 else None,
                    slot_mapping=to_runs(slots) if group.maps_slots else None,
                    num_slot_padding=padding,
                    table_shape=(len(order), 64),
                    block_table=[(row, 0, to_runs(table)) for row, table in enumerate(tables)],
                    causal=True,
                )
            )
        return ForwardStep(
            source=source,
            step=self.next_step,
            start_ns=self.next_step * 10_000_000 + 200_000,
            prepare_ns=500_000,
            forward_ns=2_000_000,
            sample_ns=300_000,
            num_reqs=len(order),
            groups=groups,
            new_requests=[(number, self._ids[number]) for number in order],
            rows=order,
            batch_descriptor=descriptor,
            cudagraph_mode=cudagraph_mode,
        )

    # -- damage -------------------------------------------------------------------------------

    def change(self, kind: type[Any], step: int, **changes: Any) -> None:
        """Replace fields of the records of this kind and step."""
        for index, record in enumerate(self.records):
            if isinstance(record, kind) and record.step == step:
                self.records[index] = replace(record, **changes)

    def change_group(self, step: int, group: int = 0, *, rank: int = 0, **changes: Any) -> None:
        """Replace fields of one group's metadata in one forward pass."""
        for index, record in enumerate(self.records):
            if (
                isinstance(record, ForwardStep)
                and record.step == step
                and record.source == 1 + rank
            ):
                groups = list(record.groups)
                groups[group] = replace(groups[group], **changes)
                self.records[index] = replace(record, groups=groups)

    def drop(self, kind: type[Any], step: int) -> None:
        self.records = [
            one for one in self.records if not (isinstance(one, kind) and one.step == step)
        ]

    # -- writing ------------------------------------------------------------------------------

    def write(self, folder: Path, *, name: str = "host.1", is_finished: bool = True) -> Path:
        """Write the rank file, and return the folder."""
        folder.mkdir(exist_ok=True)
        end = [End(len(self.records), 0, {}, 0)] if is_finished else []
        lines = [msgspec.json.encode(one) + b"\n" for one in [header(), *self.records, *end]]
        (folder / f"{name}{SUFFIX}").write_bytes(b"".join(lines))
        return folder


def header(**changes: Any) -> Header:
    one = Header(SCHEMA_VERSION, "0.1.0", "0.30.0", "host", 1, "MainProcess", 0, 0)
    return replace(one, **changes)


def write_manifest(folder: Path, **changes: Any) -> None:
    manifest = Manifest(
        SCHEMA_VERSION, "0.1.0", "0.30.0", 0, "in-process", "tiny", 1, 2, 1, 4, finished=True
    )
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.encode(replace(manifest, **changes)))


def two_rounds() -> Recording:
    """A 40-token prompt in blocks of 16, twice; the second round hits 32 tokens."""
    recording = Recording()
    first = recording.arrive("p0-r1", 40)
    recording.step({first: 40}, admit={first: Admit([[1, 2, 3]])})
    recording.step({first: 1})
    recording.step({first: 1})
    recording.finish(first, 3)
    second = recording.arrive("p0-r2", 40)
    recording.step({second: 8}, admit={second: Admit([[1, 2, 4]], hit=32)})
    recording.step({second: 1})
    recording.finish(second, 2)
    return recording
