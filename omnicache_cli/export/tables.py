"""The tables of an export: their columns, with types and units. docs/export.md lists the same.

Names are vLLM's words where there is one. A value that is not known, or did not happen, is null.
"""

from dataclasses import dataclass
from typing import Literal

Type = Literal["int64", "double", "string", "boolean"]
Cell = int | float | str | bool | None

UNIX_NS = "ns since 1970-01-01, UTC"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: Type
    unit: str | None  # None: it is a name, a number of something or a truth
    meaning: str


@dataclass(frozen=True, slots=True)
class TableForm:
    """One table. The values of its partitions are the first columns of each row."""

    name: str
    meaning: str
    partitions: tuple[Column, ...]
    columns: tuple[Column, ...]  # without the partitions

    @property
    def all_columns(self) -> tuple[Column, ...]:
        return self.partitions + self.columns


ENGINE = Column("engine", "string", None, "name of the scheduler, unique in the run: HOST.PID.N")
RANK = Column("rank", "int64", None, "rank of the worker in its engine")
STEP = Column("step", "int64", None, "number of the step in its engine, from 0")

ENGINES = TableForm(
    "engines",
    "one row per engine: what its cache depends on",
    (),
    (
        ENGINE,
        Column("stage_id", "int64", None, "place in a pipeline of vLLM-Omni; null: it is no stage"),
        Column("stage", "string", None, "its name there: thinker, talker, code2wav, ..."),
        Column("model", "string", None, "path or hub id"),
        Column("scheduler_class", "string", None, "with its module"),
        Column("num_gpu_blocks", "int64", "blocks", "size of the pool, null block 0 included"),
        Column("block_size", "int64", "tokens", "block of the scheduler"),
        Column("hash_block_size", "int64", "tokens", "under one block hash"),
        Column("num_groups", "int64", None, "KV cache groups"),
        Column("enable_prefix_caching", "boolean", None, "the scheduler uses the prefix cache"),
        Column("world_size", "int64", None, "workers of this scheduler; null: not recorded"),
        Column("host", "string", None, "machine of the scheduler"),
        Column("pid", "int64", None, "its process"),
        Column("started_unix_ns", "int64", UNIX_NS, "when the recording of its process began"),
        Column("vllm_version", "string", None, "of its process"),
        Column("tool_version", "string", None, "of the omnicache that recorded it"),
    ),
)

STEPS = TableForm(
    "steps",
    "one row per step of a scheduler",
    (ENGINE,),
    (
        STEP,
        Column("start_unix_ns", "int64", UNIX_NS, "start of schedule()"),
        Column("num_requests", "int64", None, "scheduled in the step"),
        Column("num_scheduled_tokens", "int64", "tokens", "scheduled in the step"),
        Column("num_prefill_tokens", "int64", "tokens", "of these: not sampled in the step before"),
        Column("num_running", "int64", None, "requests that run, after schedule()"),
        Column("num_waiting", "int64", None, "requests that wait, after schedule()"),
        Column("num_admitted", "int64", None, "requests that started to run"),
        Column("num_resumed", "int64", None, "requests that run again after a preemption"),
        Column("num_preempted", "int64", None, "requests that lost their blocks"),
        Column("num_finished", "int64", None, "requests that ended in or after the step"),
        Column("queried_tokens", "int64", "tokens", "looked up for admitted requests"),
        Column("hit_tokens", "int64", "tokens", "of these: found in the prefix cache"),
        Column("resumed_hit_tokens", "int64", "tokens", "found for resumed requests"),
        Column("external_tokens", "int64", "tokens", "brought by a KV connector"),
        Column("num_free_blocks", "int64", "blocks", "free after schedule(), cached ones included"),
        Column("num_used_blocks", "int64", "blocks", "the others, without the null block"),
        Column("allocated_blocks", "int64", "blocks", "taken from the free queue"),
        Column("cached_blocks", "int64", "blocks", "full blocks that entered the prefix cache"),
        Column("evicted_blocks", "int64", "blocks", "blocks that lost their hash"),
        Column("freed_blocks", "int64", "blocks", "given back to the free queue"),
        Column("schedule_ns", "int64", "ns", "schedule()"),
        Column("lookup_ns", "int64", "ns", "of schedule(): looking up prefixes"),
        Column("allocate_ns", "int64", "ns", "of schedule(): allocating blocks"),
        Column("prepare_ns", "int64", "ns", "preparing the inputs, of the slowest rank"),
        Column("forward_ns", "int64", "ns", "the model's call, of the slowest rank"),
        Column("sample_ns", "int64", "ns", "sampling, of the slowest rank"),
        Column("output_ns", "int64", "ns", "taking the output in: update_from_output"),
        Column("save_ns", "int64", "ns", "storing rows in a tensor cache, of the slowest rank"),
        Column("restore_ns", "int64", "ns", "giving rows back from it, of the slowest rank"),
        Column("copy_ns", "int64", "ns", "its copies to the host, of the slowest rank"),
        Column("after_gap", "boolean", None, "records were lost before this step"),
    ),
)

REQUESTS = TableForm(
    "requests",
    "one row per request",
    (ENGINE,),
    (
        Column("request", "int64", None, "arrival number in its engine, from 0"),
        Column("external_id", "string", None, "the id that the client gave"),
        Column("request_id", "string", None, "vLLM's own id"),
        Column("arrival_unix_ns", "int64", UNIX_NS, "when it reached the scheduler"),
        Column("first_scheduled_unix_ns", "int64", UNIX_NS, "start of its first step"),
        Column("finished_unix_ns", "int64", UNIX_NS, "when its end was recorded"),
        Column("arrival_step", "int64", None, "the step that could be the first to schedule it"),
        Column("first_step", "int64", None, "its first scheduled step"),
        Column("last_step", "int64", None, "its last scheduled step"),
        Column("num_steps", "int64", None, "steps that scheduled it"),
        Column("num_prompt_tokens", "int64", "tokens", "of its prompt, placeholders included"),
        Column("queried_tokens", "int64", "tokens", "looked up at its first admission"),
        Column("hit_tokens", "int64", "tokens", "of these: found in the prefix cache"),
        Column("resumed_hit_tokens", "int64", "tokens", "found after preemptions"),
        Column("scheduled_tokens", "int64", "tokens", "computed in all its steps"),
        Column("num_output_tokens", "int64", "tokens", "when it ended"),
        Column("num_preemptions", "int64", None, "how often it lost its blocks"),
        Column("status", "string", None, "vLLM's RequestStatus; null: not ended in this trace"),
        Column("lora_name", "string", None, "its LoRA adapter"),
        Column("has_cache_salt", "boolean", None, "it came with a cache salt"),
        Column("skips_cache", "boolean", None, "it must not read the prefix cache"),
        Column("num_multimodal_items", "int64", None, "images and other items of its prompt"),
        Column("hash_ns", "int64", "ns", "hashing the blocks of its prompt, before it arrived"),
    ),
)

REQUEST_STEPS = TableForm(
    "request_steps",
    "one row per request and step that scheduled it",
    (ENGINE,),
    (
        STEP,
        Column("request", "int64", None, "arrival number in its engine"),
        Column(
            "num_computed_tokens", "int64", "tokens", "computed when the step began, hit included"
        ),
        Column("num_scheduled_tokens", "int64", "tokens", "computed in the step"),
        Column("hit_tokens", "int64", "tokens", "prefix hit; null: it is not admitted here"),
        Column("resumed", "boolean", None, "it is admitted again after a preemption"),
    ),
)

RANK_STEPS = TableForm(
    "rank_steps",
    "one row per forward pass of a rank",
    (ENGINE, RANK),
    (
        STEP,
        Column("tp_rank", "int64", None, "place in the tensor-parallel group"),
        Column("pp_rank", "int64", None, "stage of the pipeline parallelism"),
        Column("host", "string", None, "machine"),
        Column("pid", "int64", None, "process"),
        Column("start_unix_ns", "int64", UNIX_NS, "start of execute_model"),
        Column("prepare_ns", "int64", "ns", "until the model is called"),
        Column("forward_ns", "int64", "ns", "the model's call; on a GPU the launch"),
        Column("sample_ns", "int64", "ns", "sample_tokens; null: this rank does not sample"),
        Column("save_ns", "int64", "ns", "storing rows in a tensor cache"),
        Column("restore_ns", "int64", "ns", "giving rows back from it"),
        Column("copy_ns", "int64", "ns", "its copies to the host"),
        Column("num_reqs", "int64", None, "rows of the batch; null: the rank wrote a digest"),
        Column("num_actual_tokens", "int64", "tokens", "of the batch, group 0"),
        Column("max_query_len", "int64", "tokens", "of the batch, group 0"),
        Column("max_seq_len", "int64", "tokens", "of the batch, group 0"),
        Column("num_padded_tokens", "int64", "tokens", "of the batch descriptor"),
        Column("cudagraph_mode", "string", None, "name of vLLM's CUDAGraphMode"),
    ),
)

EVICTIONS = TableForm(
    "evictions",
    "one row per hash that left the prefix cache because its block was taken",
    (ENGINE,),
    (
        STEP,
        Column("block_id", "int64", None, "the block"),
        Column("group", "int64", None, "KV cache group"),
        Column("hash", "string", None, "the last 8 bytes of the block's hash, in hex"),
        Column("owner", "int64", None, "request that cached it; null: not known"),
        Column("request", "int64", None, "request that took the block; null: nobody"),
    ),
)

TABLES = (ENGINES, STEPS, REQUESTS, REQUEST_STEPS, RANK_STEPS, EVICTIONS)
