"""A session for the self-test: an engine session that faults can be planted into."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from omnicache_cli.engine.options import EngineOptions
from omnicache_cli.engine.verify.plants import FAULTS, Damage, one_value_per_request
from omnicache_cli.engine.verify.points import points_of
from omnicache_cli.engine.verify.session import CacheKind, EngineSession, SessionOptions
from omnicache_cli.trace.workload import Prompt
from omnicache_cli.verify.run import Shape
from omnicache_cli.verify.runs import RunRows


class SelfTestSession(EngineSession):
    """`verify.selftest.PlantingSession` on vLLM."""

    def __init__(self, engine: EngineOptions, options: SessionOptions) -> None:
        super().__init__(engine, options)
        self._known: dict[str, RunRows] = {}

    def use_cache(self, kind: CacheKind) -> None:
        super().use_cache(kind)
        # vLLM-Omni deals payload out to the requests; omnicache hands it through
        self.warm_capture.payload = one_value_per_request if kind == "builtin" else None

    def why_not_planted(self, name: str) -> str | None:
        if name == "payload-as-rows" and self.cache_kind != "builtin":
            return "vLLM-Omni deals payload out to the requests by a rule of its own"
        return None

    def without_cache(
        self, prompts: Mapping[str, Prompt], max_tokens: int, shape: Shape, cut: Mapping[str, int]
    ) -> RunRows:
        """Faults sit in what is cached: the same run without a cache need not run twice."""
        asked = repr((sorted(prompts.items()), max_tokens, shape, sorted(cut.items())))
        if asked not in self._known:
            self._known[asked] = super().without_cache(prompts, max_tokens, shape, cut)
        return self._known[asked]

    @contextmanager
    def planted(self, name: str) -> Iterator[None]:
        """The fault is there while this lasts; the cache is a new one before and behind it."""
        self.use_cache(self.cache_kind)
        damage = Damage(self, points_of)
        try:
            FAULTS[name](damage)
            yield
        finally:
            damage.close()
            self.use_cache(self.cache_kind)
