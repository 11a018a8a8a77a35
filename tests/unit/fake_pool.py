"""A pool for the pure parts of `simulate`: everything is kept, every request runs at once."""

from collections.abc import Callable

from omnicache_cli.errors import BadInputError
from omnicache_cli.simulate.replay import Admitted, Finished, Stepped
from omnicache_cli.simulate.request import SimRequest
from omnicache_cli.simulate.timeline import BlockState, PoolState
from omnicache_cli.simulate.watch import PoolWatch

BLOCK_SIZE = 16


class FakePool:
    """Satisfies `Pool`: a token of each running request in each step, the prompt in the first."""

    def __init__(self, num_blocks: int) -> None:
        self.watch = PoolWatch(num_blocks)
        self.block_size = BLOCK_SIZE
        self.is_plain = True
        self.on_scheduled: Callable[[Stepped], None] | None = None
        self.running: list[list[object]] = []  # request, tokens left
        self._num_blocks = num_blocks
        self._waiting: list[SimRequest] = []
        self._cached: set[tuple[int, ...]] = set()

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self.running)

    def add(self, request: SimRequest) -> None:
        blocks = -(-request.num_prompt_tokens // BLOCK_SIZE)
        if blocks > self._num_blocks:
            raise BadInputError(
                f"request {request.name} needs {blocks} blocks, and the pool has {self._num_blocks}"
            )
        self._waiting.append(request)

    def step(self) -> Stepped:
        admitted = [self._admit(one) for one in self._waiting]
        tokens = len(self.running)
        for one in self._waiting:
            tokens += one.num_prompt_tokens
            self.running.append([one, one.num_output_tokens])
        self._waiting = []
        stepped = Stepped(tokens, admitted)
        self.watch.end_step(self._num_blocks - 1)
        if self.on_scheduled is not None:
            self.on_scheduled(stepped)
        finished = []
        for entry in list(self.running):
            entry[1] = int(str(entry[1])) - 1
            if not entry[1]:
                finished.append(self._end(entry))
        stepped.finished = finished
        return stepped

    def abort(self, request: SimRequest) -> Finished | None:
        for entry in self.running:
            if entry[0] is request:
                return self._end(entry)
        return None

    def state(self) -> PoolState:
        return PoolState((BlockState(1, (), None, 0),), (1,))

    def _end(self, entry: list[object]) -> Finished:
        self.running.remove(entry)
        request = entry[0]
        assert isinstance(request, SimRequest)
        return Finished(request, [], request.num_prompt_tokens, 0)

    def _admit(self, request: SimRequest) -> Admitted:
        ids = request.token_ids or []
        prefixes = [tuple(ids[:end]) for end in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE) if end]
        hit = 0
        for prefix in prefixes:
            if prefix not in self._cached or len(prefix) >= len(ids):
                break
            hit = len(prefix)
        self._cached.update(prefixes)
        hashes = [repr(prefix).encode() for prefix in prefixes]
        return Admitted(request, hit, request.num_prompt_tokens, False, hashes)
