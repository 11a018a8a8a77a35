"""Totals of a run, in one pass with bounded memory.

Phase times go into a log-bucketed histogram of 32 buckets per power of two: percentiles are right
within 1.6 %, totals are exact. Of several ranks a phase takes as long as the slowest of them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from omnicache_cli.trace.invariants import InvariantChecker, Violation
from omnicache_cli.trace.phases import PHASES, step_times
from omnicache_cli.trace.records import (
    MISSING_HOOK,
    Admission,
    AnyEvent,
    CacheReset,
    Evicted,
    Finished,
    MultiModalSpan,
    Preempted,
    RequestRecord,
)
from omnicache_cli.trace.run import Run, without_scheduler
from omnicache_cli.trace.steps import Request, Step

TEXT = "text"
"""Modality of tokens outside every multimodal span."""

_SUB_BUCKETS = 32


class Histogram:
    """Durations in buckets that grow with the duration: at most 2,048 integers."""

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self._shortest = self._longest = 0
        self._buckets: Counter[int] = Counter()

    def add(self, duration_ns: int) -> None:
        value = max(0, duration_ns)
        self._shortest = min(value, self._shortest) if self.count else value
        self._longest = max(value, self._longest)
        self.count += 1
        self.total_ns += value
        self._buckets[_bucket_of(value)] += 1

    @property
    def longest_ns(self) -> int | None:
        """Exact; None without a duration."""
        return self._longest if self.count else None

    def percentile(self, percent: float) -> int | None:
        """The middle of the bucket that holds it, within what was seen; None without a duration."""
        if not self.count:
            return None
        wanted = max(1, -(-self.count * percent // 100))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return max(self._shortest, min(self._longest, _middle_of(bucket)))
        return None


def _bucket_of(value: int) -> int:
    shift = max(0, value.bit_length() - _SUB_BUCKETS.bit_length())
    return shift * _SUB_BUCKETS + (value >> shift)


def _middle_of(bucket: int) -> int:
    if bucket < 2 * _SUB_BUCKETS:
        return bucket
    shift = bucket // _SUB_BUCKETS - 1
    first = (bucket - shift * _SUB_BUCKETS) << shift
    return first + (1 << shift) // 2


@dataclass(slots=True)
class PoolUsage:
    """Share of one engine's blocks that are not free, as it counted them after each schedule().

    The null block is no part of it, and free blocks that are cached are free: as vLLM's
    kv_cache_usage_perc. Every step counts once, however long it took.
    """

    num_blocks: int  # that can be handed out
    num_steps: int = 0
    peak_step: int | None = None
    _total: int = 0  # blocks in use, summed over the steps
    _peak: int = 0
    _last: int = 0

    def add(self, step: int, num_free_blocks: int) -> None:
        in_use = self.num_blocks - num_free_blocks
        self.num_steps += 1
        self._total += in_use
        self._last = in_use
        if self.peak_step is None or in_use > self._peak:
            self._peak, self.peak_step = in_use, step

    @property
    def peak(self) -> float | None:
        return self._share(self._peak)

    @property
    def mean(self) -> float | None:
        return self._share(self._total / self.num_steps) if self.num_steps else None

    @property
    def final(self) -> float | None:
        """After the last schedule(), before what finished in that step gave its blocks back."""
        return self._share(self._last)

    def _share(self, blocks: float) -> float | None:
        return blocks / self.num_blocks if self.num_blocks > 0 and self.num_steps else None


@dataclass(slots=True)
class StageTotals:
    """One engine that is a stage of vLLM-Omni. Hits are counted as of the whole run."""

    stage_id: int | None
    stage: str
    num_steps: int = 0
    num_arrived: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    enable_prefix_caching: bool = False


@dataclass(slots=True)
class Summary:
    """What a run, or one engine of it, did in all."""

    num_steps: int = 0
    num_forwards: int = 0
    num_arrived: int = 0
    num_finished: Counter[str] = field(default_factory=Counter)  # by RequestStatus name
    scheduled_tokens: int = 0
    prompt_tokens: int = 0
    longest_prompt_tokens: int = 0
    smallest_hash_block: int | None = None  # tokens, of the engines that ran; None: no step
    queried_tokens: int = 0
    hit_tokens: int = 0
    resumed_hit_tokens: int = 0  # of requests that came back after a preemption; not in hit_tokens
    external_tokens: int = 0  # computed elsewhere: loaded by a KV connector
    queried_tokens_by_modality: Counter[str] = field(default_factory=Counter)
    hit_tokens_by_modality: Counter[str] = field(default_factory=Counter)
    pools: dict[str, PoolUsage] = field(default_factory=dict)  # by engine
    stages: dict[str, StageTotals] = field(default_factory=dict)  # by engine; stages only
    evicted_blocks: int = 0
    preemptions: int = 0
    resets: int = 0
    dropped_records: int = 0
    unfinished_files: list[str] = field(default_factory=list)
    unjoined_forwards: int = 0
    probe_errors: Counter[str] = field(default_factory=Counter)
    untested_vllm: str | None = None  # version that the recording omnicache was never tried with
    phases: dict[str, Histogram] = field(
        default_factory=lambda: {phase: Histogram() for phase in PHASES}
    )
    broken_invariants: int | None = None  # None: not checked
    first_violation: Violation | None = None

    @property
    def kv_cache_hit_rate(self) -> float | None:
        """Hit tokens per queried token; None: the cache was never asked."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else None

    @property
    def eviction_frequency(self) -> float | None:
        """Evicted blocks per step; None without a step."""
        return self.evicted_blocks / self.num_steps if self.num_steps else None

    @property
    def modal_cache_ratio(self) -> dict[str, float] | None:
        """Share of the hit tokens per modality, text included; None without a hit."""
        if not self.hit_tokens:
            return None
        return {
            modality: tokens / self.hit_tokens
            for modality, tokens in sorted(self.hit_tokens_by_modality.items())
        }

    @property
    def hit_rate_by_modality(self) -> dict[str, float]:
        """Hit tokens per queried token of each modality that was asked for."""
        return {
            modality: self.hit_tokens_by_modality[modality] / tokens
            for modality, tokens in sorted(self.queried_tokens_by_modality.items())
            if tokens
        }

    @property
    def too_short_for(self) -> int | None:
        """Tokens of the block that no prompt exceeds, where that explains why nothing hit.

        The last token of a prompt is always computed: one that just fills a block cannot hit.
        """
        block = self.smallest_hash_block
        hits = self.hit_tokens + self.resumed_hit_tokens
        if not self.queried_tokens or hits or block is None or self.dropped_records:
            return None
        return block if self.longest_prompt_tokens <= block else None

    @property
    def missing_hooks(self) -> list[str]:
        """Methods of vLLM that the probe looked for in vain."""
        return sorted(
            name.removeprefix(MISSING_HOOK)
            for name in self.probe_errors
            if name.startswith(MISSING_HOOK)
        )

    @property
    def num_unfinished(self) -> int:
        return self.num_arrived - self.num_finished.total()


def summarize(
    run: Run, steps: Iterable[Step] | None = None, checker: InvariantChecker | None = None
) -> Summary:
    """Read the run to its end. `steps`: those of `run` that count, all by default.

    With a checker, broken invariants are counted too.
    """
    summary = Summary()
    for step in run.steps() if steps is None else steps:
        _add_step(summary, step)
        if checker is not None:
            found = checker.check(step)
            if found and summary.first_violation is None:
                summary.first_violation = found[0]
    if checker is not None:
        summary.broken_invariants = checker.num_broken
    if not run.engines:
        raise without_scheduler(run)
    if steps is None:
        _add_arrivals(summary, run.never_scheduled)
        _add_events(summary, run.after_last)
    summary.unjoined_forwards = run.unjoined_forwards
    summary.dropped_records = run.dropped
    for file in run.files:
        if not file.header.vllm_tested:
            summary.untested_vllm = file.header.vllm_version
        if file.end is None:
            summary.unfinished_files.append(file.path.name)
        else:
            summary.probe_errors.update(file.end.probe_errors)
    return summary


def _add_step(summary: Summary, step: Step) -> None:
    summary.num_steps += 1
    block = step.engine.hash_block_size
    summary.smallest_hash_block = min(block, summary.smallest_hash_block or block)
    summary.num_forwards += len(step.forwards) + len(step.ranks)
    summary.scheduled_tokens += step.num_scheduled_tokens
    pool = summary.pools.get(step.engine.engine)
    if pool is None:
        pool = summary.pools[step.engine.engine] = PoolUsage(step.engine.num_gpu_blocks - 1)
    pool.add(step.number, step.record.num_free_blocks)
    _add_stage(summary, step)
    _add_arrivals(summary, step.arrived)
    requests = (
        {request.number: request.record for request in step.requests}
        if step.record.admitted
        else {}
    )
    for admission in step.record.admitted:
        _add_admission(summary, admission, requests.get(admission.request))
    _add_events(summary, step.before + step.record.events + step.after)
    for phase, duration in step_times(step).items():
        if duration is not None:
            summary.phases[phase].add(duration)


def _add_stage(summary: Summary, step: Step) -> None:
    engine = step.engine
    if engine.stage is None:
        return
    totals = summary.stages.setdefault(
        engine.engine,
        StageTotals(
            engine.stage_id, engine.stage, enable_prefix_caching=engine.enable_prefix_caching
        ),
    )
    totals.num_steps += 1
    totals.num_arrived += len(step.arrived)
    for one in step.record.admitted:
        if not one.resumed and one.session_prompt_tokens is None:
            totals.queried_tokens += one.queried_tokens
            totals.hit_tokens += one.hit_tokens


def _add_arrivals(summary: Summary, requests: Iterable[Request]) -> None:
    for request in requests:
        summary.num_arrived += 1
        num_tokens = request.record.num_prompt_tokens
        summary.prompt_tokens += num_tokens
        summary.longest_prompt_tokens = max(num_tokens, summary.longest_prompt_tokens)


def _add_admission(summary: Summary, admission: Admission, request: RequestRecord | None) -> None:
    if admission.session_prompt_tokens is not None:
        return  # a session that goes on with the blocks it has
    if admission.resumed:  # vLLM keeps these out of its counters too
        summary.resumed_hit_tokens += admission.hit_tokens
        return
    summary.queried_tokens += admission.queried_tokens
    summary.hit_tokens += admission.hit_tokens
    summary.external_tokens += admission.num_computed_tokens - admission.hit_tokens
    spans = request.multimodal if request is not None else []
    _add_prefix(summary.queried_tokens_by_modality, spans, admission.queried_tokens)
    _add_prefix(summary.hit_tokens_by_modality, spans, admission.hit_tokens)


def _add_prefix(totals: Counter[str], spans: Iterable[MultiModalSpan], num_tokens: int) -> None:
    """The first tokens of a prompt, by modality."""
    if not num_tokens:
        return
    text = num_tokens
    for span in spans:
        inside = max(0, min(span.offset + span.length, num_tokens) - span.offset)
        totals[span.modality] += inside
        text -= inside
    totals[TEXT] += text


def _add_events(summary: Summary, events: Iterable[AnyEvent]) -> None:
    before: AnyEvent | None = None
    for event in events:
        match event:
            case Evicted():  # a block that loses several hashes at once counts once
                same = isinstance(before, Evicted) and before.block_id == event.block_id
                summary.evicted_blocks += not same
            case Preempted():
                summary.preemptions += 1
            case Finished():
                summary.num_finished[event.status] += 1
            case CacheReset():
                summary.resets += event.successful
        before = event
