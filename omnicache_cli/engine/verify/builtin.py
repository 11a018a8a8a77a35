"""omnicache's own tensor cache on a vLLM engine."""

from typing import Any

from omnicache_cli.engine.verify.capture import Given
from omnicache_cli.errors import OmnicacheError
from omnicache_cli.tensor_cache.cache import TensorCache
from omnicache_cli.tensor_cache.layout import StepLayout


class BuiltinCache:
    """`tensor_cache.TensorCache`, fed by the runner."""

    def __init__(self, block_size: int) -> None:
        self.tensor_cache = TensorCache(block_size)
        self._finished: list[str] = []

    def begin(self, scheduler_output: Any) -> None:
        self._finished += scheduler_output.finished_req_ids

    def step(self, layout: StepLayout, outputs: dict[str, Any]) -> Given:
        finished, self._finished = self._finished, []
        try:
            self.tensor_cache.finish(finished)
            self.tensor_cache.begin_step(layout)
            saved = self.tensor_cache.save(outputs)
            rows = {}
            for one in layout.requests:
                given = self.tensor_cache.materialize(one.request_id)
                rows[one.request_id] = dict(given.rows)
        except OmnicacheError as error:
            return Given({}, str(error))
        return Given(rows, payload=saved.payload)

    def close(self) -> None:
        self.tensor_cache.commit()
