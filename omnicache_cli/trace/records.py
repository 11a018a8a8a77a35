"""The records of a trace: what one line of a rank file may be.

A run is a folder; every traced process appends JSON lines to one file of its own. The first line
is a `Header`; each traced object (a scheduler, a model runner) then declares itself once as a
*source* and signs its records with that number. Names are vLLM's words for vLLM's things.

This module owns the shape of the records. It does not know vLLM, files or how records are joined.
Units: `_ns` nanoseconds, `_tokens` tokens, times relative to `Header.monotonic_ns` of the file.
"""

from typing import Annotated, Any

import msgspec

from omnicache_cli.errors import BadTraceError

SCHEMA_VERSION = 1

Runs = list[int]
"""An integer vector as flat pairs start, length, start, length, ...: [16, 3, 40, 1, 7, -3] is
16 17 18 40 7 6 5. A negative length counts down."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""A number of tokens, blocks, records or bytes."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]
"""A number of tokens of one request or one batch, or a position in it."""

Rows = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
"""A number of batch rows, or one of them."""

BlockSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 26)]
"""Tokens in a block."""

Nanoseconds = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]

NO_REQUEST = -1
"""Request number of an event that no request caused."""

MISSING_HOOK = "missing "
"""Begins the name, among `End.probe_errors`, of a method that this vLLM does not have."""

COPIED = "copied from the device beside the step, read at the next one"
"""In `WorkerSource.read_from`: of the vectors that have no copy on the CPU. Not always read."""

MAX_VECTOR_LENGTH = 1 << 22
"""Longest vector that runs may expand to: a damaged length must not eat the reader's memory."""


class BadRunsError(BadTraceError, ValueError):
    """Runs that no vector has: the trace is damaged."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """Base of everything that is one line."""


class Header(Record, frozen=True, tag="header"):
    """First line of every file: who wrote it, with what."""

    schema_version: int
    tool_version: str
    vllm_version: str | None
    host: str
    pid: int
    process: str  # multiprocessing's process name: MainProcess, EngineCore, ...
    started_unix_ns: Nanoseconds
    monotonic_ns: Nanoseconds  # zero of every *_ns instant in this file
    versions: dict[str, str] = {}  # python, torch, vllm_omni, ... where installed
    vllm_tested: bool = True  # False: this omnicache was never tried with this vLLM


class CacheGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """One KV cache group: layers that share one block table."""

    spec: str  # class name of vLLM's KVCacheSpec
    block_size: BlockSize  # tokens in one block of the pool
    num_layers: Count
    layer_names: list[str]
    page_size_bytes: Count  # one block of one layer
    maps_slots: bool  # False: the group has no token-to-slot mapping (mamba)
    sliding_window: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    dtype: str | None = None
    prefix_cacheable: bool = True
    is_eagle_group: bool = False  # a hit drops its last matched unit: EAGLE/MTP computes it again


class EngineSource(Record, frozen=True, tag="engine"):
    """A scheduler declares itself: the engine's configuration as far as the cache depends on it."""

    source: int
    engine: str  # unique in the run: host.pid.n of the scheduler; joins workers to it
    model: str
    scheduler_class: str
    num_gpu_blocks: Count  # pool size, the null block 0 included
    block_size: BlockSize  # scheduler's block size, tokens
    hash_block_size: BlockSize  # tokens under one entry of Request.block_hashes
    enable_prefix_caching: bool
    groups: list[CacheGroup]
    kv_cache_tensors: list[dict[str, Any]]  # size in bytes, layers: as in vLLM's KVCacheConfig
    parallel: dict[str, int]  # tensor, pipeline, data, ... sizes and world_size
    options: dict[str, Any]  # max_model_len, dtype, hash algorithm, ... by vLLM's names
    randomized_request_ids: bool  # vLLM appended -xxxxxxxx to every request id
    cache_hit_alignment_tokens: BlockSize | None = None  # every hit is a multiple; None: no cache
    checks_hashes: bool = False  # WrongHash is recorded where a block's hash is not its tokens'
    stage_id: Count | None = None  # place in a pipeline of vLLM-Omni; None: it is no stage
    stage: str | None = None  # its name there: thinker, talker, code2wav, ...


class WorkerSource(Record, frozen=True, tag="worker"):
    """A model runner declares itself, at its first step."""

    source: int
    engine: str | None  # EngineSource.engine; None when the step carried no mark
    runner_class: str
    rank: int
    tp_rank: int
    pp_rank: int
    device: str
    metadata_classes: list[str]  # per group; "" where the group has no metadata object
    kernel_block_sizes: list[BlockSize]  # per group, tokens of a block of the kernel
    kv_cache_shapes: dict[str, list[int]]  # layer -> shape of its KV cache tensor on this rank
    kv_cache_dtype: str
    read_from: dict[str, str] = {}  # field -> where it was read, if not the metadata object


class MultiModalSpan(msgspec.Struct, frozen=True, array_like=True):
    """One multimodal item of a prompt: its placeholder tokens and its hash."""

    modality: str
    offset: Tokens  # first placeholder token
    length: Tokens  # placeholder tokens
    hash: str  # what vLLM puts into the block hash


class RequestRecord(Record, frozen=True, tag="request"):
    """A request reached the scheduler. No prompt text; token ids only when asked for."""

    source: int
    request: int  # arrival number in this source
    request_id: str  # vLLM's internal id
    arrival_ns: Nanoseconds
    arrival_step: Count  # the step that could be the first to schedule it
    num_prompt_tokens: Tokens
    max_tokens: Tokens
    block_hashes: list[str]  # last 8 bytes of each Request.block_hashes entry, in hex
    extra_keys: list[tuple[int, list[str]]] = []  # (hash block index, keys), where there are any
    multimodal: list[MultiModalSpan] = []
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None  # keyed digest, comparable within one run only
    skip_reading_prefix_cache: bool = False
    priority: int = 0
    token_ids: list[int] | None = None
    hash_ns: Nanoseconds | None = None  # hashing its prompt, before it reached the scheduler


class Event(msgspec.Struct, frozen=True, array_like=True, tag_field="event"):
    """Something that happened to the pool or to a request, in order, inside or after a step."""


class Allocated(Event, frozen=True, tag="alloc"):
    """Blocks left the free queue for `request`."""

    request: int
    block_ids: Runs


class Hashed(Event, frozen=True, tag="hash"):
    """`Request.block_hashes` grew: entries from index `first` on."""

    request: int
    first: int
    hashes: list[str]


class Cached(Event, frozen=True, tag="cache"):
    """Full blocks of `request` entered the prefix cache. Hash: the request's, by block index."""

    request: int
    group: int
    block_indices: Runs  # index in the request's table of this group
    block_ids: Runs


class CachedPartial(Event, frozen=True, tag="cache_partial"):
    """A block entered the cache under the hash of a prefix that ends inside it."""

    request: int
    group: int
    block_id: int
    num_tokens: Tokens


class WrongHash(Event, frozen=True, tag="wrong_hash"):
    """A block entered the cache under a hash that is not that of the tokens in it."""

    request: int
    group: int
    block_id: int
    hash_index: Tokens  # entry of Request.block_hashes
    expected: str  # hash of the tokens, upon the entry before
    found: str


class Evicted(Event, frozen=True, tag="evict"):
    """A block lost its hash: `owner` cached it, `request` took the block (or nobody)."""

    block_id: int
    group: int
    hash: str
    owner: int
    request: int


class HashesMoved(Event, frozen=True, tag="move"):
    """The prefix cache now keeps the content under another block (copy on write)."""

    source_block_id: int
    target_block_id: int


class Freed(Event, frozen=True, tag="free"):
    """`request` gave blocks back, in this order: those that nobody uses any more (reference count
    0), and those that other requests still hold."""

    request: int
    block_ids: Runs
    still_held: Runs = []


class Preempted(Event, frozen=True, tag="preempt"):
    request: int


class Finished(Event, frozen=True, tag="finish"):
    request: int
    status: str  # vLLM's RequestStatus name
    num_output_tokens: Tokens


class CacheReset(Event, frozen=True, tag="reset"):
    """`reset_prefix_cache` was called on the pool."""

    successful: bool


AnyEvent = (
    Allocated
    | Hashed
    | Cached
    | CachedPartial
    | WrongHash
    | Evicted
    | HashesMoved
    | Freed
    | Preempted
    | Finished
    | CacheReset
)


class Admission(msgspec.Struct, frozen=True, omit_defaults=True):
    """A waiting request starts to run: first time, again after a preemption, or, of a
    streaming-input session, with the next part of its prompt; then the cache is not asked.

    Of a first admission, hit_tokens and queried_tokens are what vLLM adds to its counters
    prefix_cache_hits and prefix_cache_queries; it does not count resumed ones there.
    """

    request: int
    num_computed_tokens: Tokens  # hit_tokens + external tokens
    hit_tokens: Tokens  # local prefix-cache hit
    queried_tokens: Tokens  # 0: the cache was not asked (off, or the request skips it)
    block_ids: list[Runs]  # whole table, per group
    resumed: bool = False
    group_hit_tokens: list[Tokens] = []  # of several groups: each one's own longest hit
    session_prompt_tokens: Tokens | None = None  # of a session's next part: its prompt by now


class SchedulerStep(Record, frozen=True, tag="schedule"):
    """One `Scheduler.schedule()` that scheduled tokens, and the events inside it."""

    source: int
    step: int
    start_ns: Nanoseconds
    schedule_ns: Nanoseconds
    num_running: Count
    num_waiting: Count
    num_free_blocks: Count
    scheduled: list[int] | None = None  # requests; None: those of the previous step, in order
    num_scheduled_tokens: list[Tokens] | None = None  # aligned with scheduled; None: all 1
    num_computed_tokens: list[Tokens] | None = None  # None: previous computed + previous scheduled
    admitted: list[Admission] = []
    new_block_ids: list[tuple[int, list[Runs]]] = []  # running requests: additions, per group
    events: list[AnyEvent] = []
    num_common_prefix_blocks: list[int] = []  # per group; empty: all 0
    scheduled_encoder_inputs: list[tuple[int, list[int]]] = []  # request, indices of its items
    spec_tokens: list[tuple[int, int]] = []  # request, draft tokens among the scheduled
    lookup_ns: Nanoseconds | None = None  # of schedule_ns: get_computed_blocks; 0: not called
    allocate_ns: Nanoseconds | None = None  # of schedule_ns: allocate_slots; 0: not called
    output_start_ns: Nanoseconds | None = None  # instant; of update_from_output for this step
    output_ns: Nanoseconds | None = None  # update_from_output; None: it did not come, or unknown


class AfterStep(Record, frozen=True, tag="after"):
    """Events outside `schedule()`: finished and aborted requests, freed blocks, resets."""

    source: int
    step: int  # the latest scheduled step; -1 before the first
    at_ns: Nanoseconds
    events: list[AnyEvent]


class GroupForward(msgspec.Struct, frozen=True, omit_defaults=True):
    """Attention metadata of one KV cache group in one forward pass.

    Vectors that equal group 0's are None in later groups. `slot_mapping` and
    `block_table` are read from the live tensors, not derived.
    """

    num_actual_tokens: Tokens | None
    max_query_len: Tokens | None
    max_seq_len: Tokens | None
    query_start_loc: Runs | None = None  # (num_reqs + 1,)
    seq_lens: list[Tokens] | None = None  # (num_reqs,)
    slot_mapping: Runs | None = None  # (num_tokens,) without the trailing -1; or `slots`, or unread
    slots: list[int] | None = None  # the same, one by one: in decode steps runs would be longer
    num_slot_padding: Tokens = 0  # trailing -1 entries of slot_mapping
    table_shape: tuple[int, int] | None = None  # shape of the live block_table tensor
    block_table: list[tuple[Rows, Tokens, Runs]] | None = []
    # rows that changed: (row, first column, ids to its end); None: the table was not read
    causal: bool | None = None
    use_cascade: bool | None = None
    common_prefix_len: Tokens | None = None


class BatchDescriptor(msgspec.Struct, frozen=True, omit_defaults=True):
    """vLLM's BatchDescriptor: the padded batch a CUDA graph is chosen by."""

    num_tokens: Tokens
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


class ForwardStep(Record, frozen=True, tag="forward"):
    """One forward pass of one model runner."""

    source: int
    step: int  # SchedulerStep.step; -1 when the step carried no mark
    start_ns: Nanoseconds  # of execute_model
    prepare_ns: Nanoseconds  # execute_model until the model is called
    forward_ns: Nanoseconds  # the model call; on a GPU the launch, not the kernels
    sample_ns: Nanoseconds | None  # sample_tokens; None where this rank does not sample
    num_reqs: Rows
    groups: list[GroupForward]
    new_requests: list[tuple[int, str]] = []  # row name -> internal id; names are used again
    rows: list[int] | None = None  # row name per batch row; None: as in the previous step
    batch_descriptor: BatchDescriptor | None = None
    cudagraph_mode: str = "NONE"
    num_ubatches: int = 0  # DBO microbatches; the groups are then not recorded
    shared_buffers: list[tuple[str, Rows, Rows]] = []  # what two groups share, and which
    restated: bool = False  # whole, and of this step alone: what a further rank saw differs
    sample_start_ns: Nanoseconds | None = None  # instant; of sample_tokens
    save_ns: Nanoseconds | None = None  # tensor cache: storing rows; None: it stored none
    restore_ns: Nanoseconds | None = None  # tensor cache: giving rows back; None: it gave none
    copy_ns: Nanoseconds | None = None  # tensor cache: copies to the host, in no other phase of it
    prepare_tensor_ns: Nanoseconds | None = None  # of prepare_ns: in the tensor cache
    sample_tensor_ns: Nanoseconds | None = None  # of sample_ns: in the tensor cache


class RankStep(Record, frozen=True, tag="rank"):
    """One forward pass of a further tensor-parallel rank: a digest instead of a second copy.

    Where the rank knows that its batch differs from the first rank's, a restated ForwardStep
    stands in its place.
    """

    source: int
    step: int
    start_ns: Nanoseconds
    prepare_ns: Nanoseconds
    forward_ns: Nanoseconds
    sample_ns: Nanoseconds | None
    digest: str  # see trace/digest.py; equals that of the first rank's ForwardStep
    sample_start_ns: Nanoseconds | None = None  # this and what follows as in ForwardStep
    save_ns: Nanoseconds | None = None
    restore_ns: Nanoseconds | None = None
    copy_ns: Nanoseconds | None = None
    prepare_tensor_ns: Nanoseconds | None = None
    sample_tensor_ns: Nanoseconds | None = None


class Gap(Record, frozen=True, tag="gap"):
    """Records were lost here (a write failed); what follows restates its state in full."""

    dropped: Count


class End(Record, frozen=True, tag="end"):
    """Last line of a process that ended in order. A file without it was cut short."""

    records: Count
    dropped: Count
    probe_errors: dict[str, int]  # hook -> errors counted inside our own code
    probe_ns: Nanoseconds  # total time inside our wrappers
    first_error: str | None = None  # of our own: hook, class of the error and place


AnyRecord = (
    Header
    | EngineSource
    | WorkerSource
    | RequestRecord
    | SchedulerStep
    | AfterStep
    | ForwardStep
    | RankStep
    | Gap
    | End
)


def to_runs(values: list[int]) -> Runs:
    """Encode integers as runs."""
    runs: Runs = []
    start = length = step = 0
    for value in values:
        if length == 1 and value in (start + 1, start - 1):
            step = value - start
            length = 2
        elif length > 1 and value == start + step * length:
            length += 1
        else:
            if length:
                runs += (start, length * step)
            start, length, step = value, 1, 1
    if length:
        runs += (start, length * step)
    return runs


def from_runs(runs: Runs) -> list[int]:
    """Decode runs. BadRunsError: an odd number of integers or an impossible length."""
    if len(runs) % 2:
        raise BadRunsError(f"runs need pairs of start and length, got {len(runs)} integers")
    values: list[int] = []
    for start, length in zip(runs[::2], runs[1::2], strict=True):
        step = 1 if length > 0 else -1
        if not 1 <= length * step <= MAX_VECTOR_LENGTH - len(values):
            raise BadRunsError(f"a run has length {length}, outside 1..{MAX_VECTOR_LENGTH}")
        values.extend(range(start, start + length, step))
    return values


def num_values(runs: Runs) -> int:
    """How many integers runs stand for."""
    return sum(abs(length) for length in runs[1::2])


def external_id(request_id: str, *, randomized: bool) -> str:
    """The id the client gave, without the -xxxxxxxx that vLLM 0.30 appends to every request."""
    head, dash, tail = request_id.rpartition("-")
    return head if randomized and dash and len(tail) == 8 else request_id
