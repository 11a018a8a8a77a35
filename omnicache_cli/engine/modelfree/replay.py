"""One scheduler with its block pool for `simulate`: vLLM's own, with nobody computing.

Satisfies `omnicache_cli.simulate.replay.Pool`. A step costs little more than vLLM's own: the bare
loop is in `benchmarks/simulate.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

from omnicache_cli.engine.adapter import short_hash
from omnicache_cli.engine.modelfree.scheduler import MAX_STEPS_WITHOUT_TOKENS, PoolPlan, build
from omnicache_cli.engine.options import first_line
from omnicache_cli.errors import BadInputError
from omnicache_cli.simulate.replay import Admitted, Finished, Stepped
from omnicache_cli.simulate.request import SimRequest
from omnicache_cli.simulate.timeline import BlockState, PoolState
from omnicache_cli.simulate.watch import PoolWatch


@dataclass(slots=True)
class Hashes:
    """Block hashes of one request."""

    hashes: list[bytes]
    with_output: bool  # also those of the output that are known; what follows nobody shares


class SharedHashes:
    """Hashes of the latest request, for all pools that it is sent to."""

    def __init__(self) -> None:
        self._request: SimRequest | None = None
        self._by_size: dict[int, Hashes] = {}

    def get(self, request: SimRequest, size: int) -> Hashes | None:
        return self._by_size.get(size) if request is self._request else None

    def keep(self, request: SimRequest, size: int, hashes: Hashes) -> None:
        if request is not self._request:
            self._request, self._by_size = request, {}
        self._by_size[size] = hashes


class ReplayPool:
    """See `Pool`. EngineMissingError: no vLLM here. UsageError: vLLM refuses the plan."""

    def __init__(self, plan: PoolPlan, shared: SharedHashes) -> None:
        self.watch = PoolWatch(plan.num_blocks)
        self.num_unfinished = 0
        self.on_scheduled: Callable[[Stepped], None] | None = None
        self.is_plain = len(plan.groups) == 1 and plan.groups[0].kind == "full"
        self._plan = plan
        self._shared = shared
        self._scheduler, self._hasher, self._algorithm = build(plan, log_stats=False)
        self.block_size = int(self._scheduler.block_size)
        self.hash_block_size = int(self._scheduler.hash_block_size)
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._pool.metrics_collector = self.watch
        self._full_blocks = [one.block_size for one in plan.groups if one.kind == "full"]
        self._live: dict[str, Any] = {}  # vLLM's requests, by our own names
        self._names: dict[int, str] = {}  # of live requests, by identity of the SimRequest
        self._num_added = 0
        self._num_preempted = 0
        self._lonely = False  # a request was preempted with no other running: it can never fit
        self._idle = 0  # steps without a token
        self._adapters: dict[Any, int] = {}
        self._watch_preemptions()

    # -- requests -----------------------------------------------------------------------------

    def add(self, request: SimRequest) -> None:
        """BadInputError: the pool or the model's length is too small for it."""
        self._refuse_too_large(request)
        name = str(self._num_added)
        self._num_added += 1
        try:
            made = self._request(name, request)
            self._scheduler.add_request(made)
        except ValueError as error:
            raise BadInputError(f"vLLM refuses {request.name}: {first_line(error)}") from error
        self._live[name] = made
        self._names[id(request)] = name
        self.num_unfinished += 1

    def abort(self, request: SimRequest) -> Finished | None:
        """Its client goes away; None: it has ended before."""
        from vllm.v1.request import RequestStatus

        name = self._names.get(id(request))
        if name is None:
            return None
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return self._end(name)

    def _refuse_too_large(self, request: SimRequest) -> None:
        tokens = request.num_prompt_tokens + request.num_output_tokens
        if tokens > self._plan.max_model_len:
            raise BadInputError(
                f"request {request.name} needs {tokens} tokens, and a request has at most "
                f"{self._plan.max_model_len}; give a larger --max-model-len"
            )
        blocks = sum(
            -(-(tokens - 1) // size) for size in self._full_blocks
        )  # the last not computed
        if blocks > self._plan.num_blocks:
            raise BadInputError(
                f"request {request.name} needs {blocks} blocks, and the pool has "
                f"{self._plan.num_blocks}; give a larger pool"
            )

    # -- steps --------------------------------------------------------------------------------

    def step(self) -> Stepped:
        scheduler = self._scheduler
        output = scheduler.schedule()
        stepped = Stepped(output.total_num_scheduled_tokens)
        if self._num_preempted:
            self._note_preemptions(stepped)
        if output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids:
            stepped.admitted = self._admitted(output)
        if stepped.num_tokens:
            self._idle = 0
            self.watch.end_step(self._pool.free_block_queue.num_free_blocks)
        else:
            self._count_idle()
        if self.on_scheduled is not None:
            self.on_scheduled(stepped)
        scheduler.update_from_output(output, self._ran(output.num_scheduled_tokens))
        if scheduler.finished_req_ids:
            stepped.finished = self._finished(scheduler.finished_req_ids)
        return stepped

    def _ran(self, scheduled: dict[str, int]) -> Any:
        """What a worker would answer: a token of each request whose prompt is computed."""
        live = self._live
        names = list(scheduled)
        sampled = []
        for name in names:
            request = live[name]
            if request.num_computed_tokens >= len(request._all_token_ids):
                sampled.append([request.next_token()])
            else:
                sampled.append([])
        return _output_class()(
            req_ids=names,
            req_id_to_index=dict(zip(names, range(len(names)), strict=True)),
            sampled_token_ids=sampled,
        )

    def _admitted(self, output: Any) -> list[Admitted]:
        found = [
            self._admission(one.req_id, one.num_computed_tokens)
            for one in output.scheduled_new_reqs
        ]
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            found += [
                self._admission(name, computed)
                for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
                if name in cached.resumed_req_ids
            ]
            order = {name: number for number, name in enumerate(output.num_scheduled_tokens)}
            found.sort(key=lambda one: order[self._names[id(one.request)]])
        return found

    def _admission(self, name: str, hit_tokens: int) -> Admitted:
        request = self._live[name]
        resumed, request.has_run = request.has_run, True
        asked = self._plan.enable_prefix_caching and not request.skip_reading_prefix_cache
        return Admitted(
            request.simulated,
            hit_tokens,
            len(request._all_token_ids) if asked else 0,
            resumed,
            request.block_hashes,
        )

    def _finished(self, names: Sequence[str]) -> list[Finished]:
        return [self._end(name) for name in sorted(names, key=int) if name in self._live]

    def _end(self, name: str) -> Finished:
        request = self._live.pop(name)
        del self._names[id(request.simulated)]
        self.num_unfinished -= 1
        return Finished(
            request.simulated,
            request.block_hashes,
            request.num_computed_tokens,
            request.num_preemptions,
        )

    def _watch_preemptions(self) -> None:
        scheduler = self._scheduler
        preempt = scheduler._preempt_request

        def preempting(*args: Any, **kwargs: Any) -> Any:
            self._num_preempted += 1
            self._lonely = self._lonely or not scheduler.running
            return preempt(*args, **kwargs)

        scheduler._preempt_request = preempting

    def _note_preemptions(self, stepped: Stepped) -> None:
        if self._lonely:
            raise BadInputError(
                f"a request outgrows the pool of {self._plan.num_blocks} blocks by itself; "
                "give a larger pool"
            )
        stepped.num_preempted, self._num_preempted = self._num_preempted, 0

    def _count_idle(self) -> None:
        if self.num_unfinished:
            self._idle += 1
            if self._idle > MAX_STEPS_WITHOUT_TOKENS:
                raise BadInputError(
                    f"vLLM cannot run a request in {self._plan.num_blocks} blocks; "
                    "give a larger pool"
                )

    # -- vLLM's Request -----------------------------------------------------------------------

    def _request(self, name: str, request: SimRequest) -> Any:
        size = self.hash_block_size
        known = self._shared.get(request, size) or self._known(request)
        tokens = request.token_ids
        made = _request_class()(
            name,
            [0] * request.num_prompt_tokens if tokens is None else tokens,
            _params(request.num_output_tokens, request.skip_reading_prefix_cache),
            None,
            mm_features=_features(request),
            lora_request=self._lora(request),
            cache_salt=request.cache_salt,
            block_hasher=self._hasher if known is None else self._from_list(known, name),
        )
        self._shared.keep(request, size, known or Hashes(made.block_hashes.copy(), False))
        made.start(request, size)
        return made

    def _known(self, request: SimRequest) -> Hashes | None:
        """None: vLLM's own hasher has to look at the request."""
        hashes = request.hashes_of(self.hash_block_size)
        if hashes is not None:
            return Hashes(hashes, with_output=True)
        if request.media or request.adapter or request.cache_salt:
            return None
        return Hashes(self._hashes_of_text(request.token_ids or []), with_output=False)

    def _hashes_of_text(self, tokens: list[int]) -> list[bytes]:
        """What vLLM's hasher gives where a block has no key beside its tokens, in half the time."""
        from vllm.v1.core import kv_cache_utils

        size, algorithm, all_tokens = self.hash_block_size, self._algorithm, tuple(tokens)
        found: list[bytes] = []
        parent = kv_cache_utils.NONE_HASH
        for end in range(size, len(tokens) + 1, size):
            parent = algorithm((parent, all_tokens[end - size : end], None))
            found.append(parent)
        return found

    def _from_list(self, known: Hashes, name: str) -> Callable[[Any], list[bytes]]:
        """A block hasher that gives what is known, and then vLLM's, or such as nobody shares."""
        hashes, size, hasher = known.hashes, self.hash_block_size, self._hasher

        def of_prompt(request: Any) -> list[bytes]:
            grown = request.block_hashes or not hashes
            found: list[bytes] = hasher(request) if grown else list(hashes)
            return found

        def of_all(request: Any) -> list[bytes]:
            start, end = len(request.block_hashes), len(request._all_token_ids) // size
            if end <= start:
                return []
            found = hashes[start:end]
            made_up = range(start + len(found), end)
            return [*found, *(f"{name} {number}".encode() for number in made_up)]

        return of_all if known.with_output else of_prompt

    def _lora(self, request: SimRequest) -> Any:
        if request.adapter is None:
            return None
        from vllm.lora.request import LoRARequest

        key = (request.adapter.name, request.adapter.path)
        number = self._adapters.setdefault(key, len(self._adapters) + 1)
        return LoRARequest(request.adapter.name, number, lora_path="not loaded")

    # -- the pool, block by block -------------------------------------------------------------

    def state(self) -> PoolState:
        """Every block as it is now. Takes time in proportion to the pool."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        owners: dict[int, list[str]] = {}
        for manager in self._scheduler.kv_cache_manager.coordinator.single_type_managers:
            for name, blocks in manager.req_to_blocks.items():
                for block in blocks:
                    if not block.is_null and name in self._live:
                        owners.setdefault(block.block_id, []).append(
                            self._live[name].simulated.name
                        )
        queue = [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]
        blocks = [
            BlockState(
                block.block_id,
                tuple(owners.get(block.block_id, ())),
                None if block.block_hash is None else short_hash(get_block_hash(block.block_hash)),
                int(block.ref_cnt),
            )
            for block in self._pool.blocks
            if not block.is_null
        ]
        return PoolState(tuple(blocks), tuple(queue))


@cache
def _output_class() -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput


@cache
def _params(max_tokens: int, skip_reading_prefix_cache: bool) -> Any:
    """Requests of the same length share one: nobody changes it here."""
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        skip_reading_prefix_cache=skip_reading_prefix_cache,
    )


def _features(request: SimRequest) -> Any:
    if not request.media:
        return None
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return [
        MultiModalFeatureSpec(
            data=None,
            modality=item.modality,
            identifier=item.hash,
            mm_position=PlaceholderRange(offset=item.offset, length=item.length),
        )
        for item in sorted(request.media, key=lambda item: item.offset)
    ]


@cache
def _request_class() -> Any:
    from vllm.v1.request import Request

    class Simulated(Request):
        """vLLM's, and what it stands for. Media are in the hashes; nobody encodes them here."""

        num_encoder_inputs = 0
        has_encoder_inputs = False
        has_run = False

        def start(self, request: SimRequest, size: int) -> None:
            """A made-up answer is one token again and again, the same for the same prompt."""
            self.simulated = request
            self._answer = request.output_token_ids
            tail = self._all_token_ids[len(self.block_hashes) * size :]
            last = self.block_hashes[-1] if self.block_hashes else b""
            self._made_up = -1 - crc32(last + repr(tail).encode())

        def next_token(self) -> int:
            given, made = self._answer, len(self._output_token_ids)
            return given[made] if made < len(given) else self._made_up

    return Simulated
