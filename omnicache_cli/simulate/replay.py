"""Sends a workload to one or several pools: who arrives when, and at which of them.

Requests come one by one (`feed`), so that a workload of any length is read once, for as many
replays side by side as there are pool sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol
from zlib import crc32

from omnicache_cli.errors import BadInputError
from omnicache_cli.simulate.bound import Bound
from omnicache_cli.simulate.request import SimRequest
from omnicache_cli.simulate.timeline import PoolState
from omnicache_cli.simulate.watch import PoolWatch

ArrivalMode = Literal["one-by-one", "step", "clock"]
Route = Literal["round-robin", "prefix-hash", "least-loaded"]


@dataclass(slots=True)
class Admitted:
    """A request starts to run, for the first time or after a preemption."""

    request: SimRequest
    hit_tokens: int
    queried_tokens: int  # 0: it does not read the cache, or the cache is off
    resumed: bool
    block_hashes: Sequence[bytes]


@dataclass(slots=True)
class Finished:
    """A request has ended and gave its blocks back."""

    request: SimRequest
    block_hashes: Sequence[bytes]  # the output's too
    num_tokens: int  # computed
    num_preemptions: int


@dataclass(slots=True)
class Stepped:
    """One step of one pool."""

    num_tokens: int
    admitted: Sequence[Admitted] = ()
    finished: Sequence[Finished] = ()
    num_preempted: int = 0


class Pool(Protocol):
    """A scheduler with its block pool."""

    watch: PoolWatch
    block_size: int  # tokens; a hit is counted in these
    is_plain: bool  # one KV cache group, of full attention
    num_unfinished: int
    on_scheduled: Callable[[Stepped], None] | None  # called inside each step, once blocks are taken

    def add(self, request: SimRequest) -> None:
        """BadInputError: it can never run here."""

    def step(self) -> Stepped:
        """Schedule, and pretend to compute. BadInputError: a request can never run."""

    def abort(self, request: SimRequest) -> Finished | None:
        """Its client goes away; None: it has ended before."""

    def state(self) -> PoolState:
        """Every block as it is now. Takes time in proportion to the pool."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests arrive. A step takes `step_seconds` and `token_seconds` for each token."""

    mode: ArrivalMode = "one-by-one"
    concurrency: int = 1  # of one-by-one
    step_seconds: float = 0.02
    token_seconds: float = 0.00002


@dataclass(slots=True)
class Totals:
    """Sums over all pools of a replay."""

    requests: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    hit_blocks: int = 0
    resumed_hit_tokens: int = 0  # of requests that come back after a preemption: not in hit_tokens
    preemptions: int = 0


@dataclass(slots=True)
class Replica:
    """One pool and where it stands."""

    pool: Pool
    bound: Bound | None
    now: float = 0.0  # seconds
    requests: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0


@dataclass(slots=True)
class Replay:
    """One workload at one pool size.

    `on_admitted` is called for each admission, `on_step` after each step of a pool.
    """

    replicas: list[Replica]
    arrivals: Arrivals
    route: Route = "round-robin"
    on_admitted: Callable[[int, Admitted], None] | None = None
    on_step: Callable[[int, Stepped], None] | None = None
    totals: Totals = field(default_factory=Totals)
    refused: str | None = None  # why it came to no end
    _step: int = 0
    _turn: int = 0
    _aborts: list[tuple[SimRequest, Replica]] = field(default_factory=list)

    def feed(self, request: SimRequest) -> None:
        """The next request of the workload; steps until it arrives."""
        if self.refused is not None:
            return
        try:
            self._wait_for(request)
            replica = self._chosen(request)
            replica.pool.add(request)
        except BadInputError as error:
            self.refused = str(error)
            return
        replica.requests += 1
        self.totals.requests += 1
        self.totals.prompt_tokens += request.num_prompt_tokens
        if request.abort_step is not None:
            self._aborts.append((request, replica))

    def finish(self) -> None:
        """No more requests: until all have ended."""
        try:
            while self.refused is None and self._is_busy():
                self._step_all()
        except BadInputError as error:
            self.refused = str(error)

    # -- arrivals -----------------------------------------------------------------------------

    def _wait_for(self, request: SimRequest) -> None:
        match self.arrivals.mode:
            case "one-by-one":
                while self._num_unfinished() >= self.arrivals.concurrency:
                    self._step_all()
            case "step":
                arrival = request.arrival_step
                while self._is_busy() and (arrival is None or arrival > self._step):
                    self._step_all()
            case "clock":
                self._wait_until(request)

    def _wait_until(self, request: SimRequest) -> None:
        arrival = request.arrival_seconds
        if arrival is None:
            raise BadInputError(
                f"request {request.name} has no time of arrival; leave out --arrivals clock"
            )
        for replica in self.replicas:
            while replica.pool.num_unfinished and replica.now < arrival:
                self._step_one(replica)
            replica.now = max(replica.now, arrival)

    def _num_unfinished(self) -> int:
        return sum(one.pool.num_unfinished for one in self.replicas)

    def _is_busy(self) -> bool:
        return any(one.pool.num_unfinished for one in self.replicas)

    def _chosen(self, request: SimRequest) -> Replica:
        if len(self.replicas) == 1:
            return self.replicas[0]
        if self.route == "least-loaded":
            return min(self.replicas, key=lambda one: one.pool.num_unfinished)
        if self.route == "prefix-hash":
            return self.replicas[_prefix_hash(request, self.replicas[0]) % len(self.replicas)]
        self._turn += 1
        return self.replicas[(self._turn - 1) % len(self.replicas)]

    # -- steps --------------------------------------------------------------------------------

    def _step_all(self) -> None:
        """One step of every pool that has something to do."""
        moved = False
        for replica in self.replicas:
            if replica.pool.num_unfinished:
                moved |= self._step_one(replica)
        self._step += moved
        if self._aborts:
            self._abort()

    def _step_one(self, replica: Replica) -> bool:
        stepped = replica.pool.step()
        arrivals = self.arrivals
        replica.now += arrivals.step_seconds + stepped.num_tokens * arrivals.token_seconds
        self.totals.preemptions += stepped.num_preempted
        for one in stepped.admitted:
            self._count(replica, one)
        for ended in stepped.finished:
            self._end(replica, ended)
        if self.on_step is not None:
            self.on_step(self.replicas.index(replica), stepped)
        return stepped.num_tokens > 0

    def _end(self, replica: Replica, ended: Finished) -> None:
        self.totals.finished += 1
        if replica.bound is not None:
            prompt = ended.request.num_prompt_tokens
            replica.bound.release(ended.block_hashes, prompt, ended.num_tokens)

    def _count(self, replica: Replica, one: Admitted) -> None:
        totals = self.totals
        if one.resumed:  # as vLLM's own counters, which leave these out
            totals.resumed_hit_tokens += one.hit_tokens
        else:
            totals.query_tokens += one.queried_tokens
            totals.hit_tokens += one.hit_tokens
            totals.hit_blocks += one.hit_tokens // replica.pool.block_size
            replica.query_tokens += one.queried_tokens
            replica.hit_tokens += one.hit_tokens
            if replica.bound is not None:
                replica.bound.admit(one.block_hashes, one.queried_tokens)
        if self.on_admitted is not None:
            self.on_admitted(self.replicas.index(replica), one)

    def _abort(self) -> None:
        """Those whose client has gone away by now."""
        for request, replica in self._aborts:
            if (request.abort_step or 0) < self._step:
                ended = replica.pool.abort(request)
                if ended is not None:
                    self._end(replica, ended)
        self._aborts = [one for one in self._aborts if (one[0].abort_step or 0) >= self._step]


def _prefix_hash(request: SimRequest, replica: Replica) -> int:
    """Of the tokens of the first block, or of all where they fill none."""
    size = replica.pool.block_size
    if request.token_ids is not None:
        return crc32(repr(request.token_ids[:size]).encode())
    hashes = request.hashes_of(size)
    return crc32(hashes[0]) if hashes else crc32(request.name.encode())
