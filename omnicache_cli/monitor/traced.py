"""What a recorded run of the same server adds: what no metric of vLLM tells."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnicache_cli.monitor.values import Value
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import Summary, summarize


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A run folder's totals, which are those of all that it had recorded when it was read."""

    folder: str
    summary: Summary
    time: float  # seconds since 1970, when it was read

    def as_result(self) -> dict[str, Any]:
        summary = self.summary
        return {
            "folder": self.folder,
            "time": self.time,
            "steps": summary.num_steps,
            "kv_cache_hit_rate": summary.kv_cache_hit_rate,
            "queried_tokens": summary.queried_tokens,
            "hit_tokens": summary.hit_tokens,
            "modal_cache_ratio": summary.modal_cache_ratio,
            "hit_rate_by_modality": summary.hit_rate_by_modality,
            "evicted_blocks": summary.evicted_blocks,
            "eviction_frequency": summary.eviction_frequency,
            "stages": [
                {
                    "engine": engine,
                    "stage_id": stage.stage_id,
                    "stage": stage.stage,
                    "queried_tokens": stage.queried_tokens,
                    "hit_tokens": stage.hit_tokens,
                }
                for engine, stage in summary.stages.items()
            ],
        }

    def agreement(self, queried_tokens: Value, hit_tokens: Value) -> str:
        """Whether the server has counted what the run has, in one line."""
        queried, hits = queried_tokens.number, hit_tokens.number
        if queried is None or hits is None:
            return f"the server does not say what it counted: {queried_tokens.missing}"
        ours = self.summary
        if queried == ours.queried_tokens and hits == ours.hit_tokens:
            return "the server has counted the same lookups and hits"
        return (
            f"the server has counted {hits:.0f} of {queried:.0f} queried tokens, the run "
            f"{ours.hit_tokens} of {ours.queried_tokens}: another server, or one that goes on"
        )


def read_traced(folder: Path) -> TracedRun:
    """BadTraceError: no run, or not readable. One that is still written is read so far."""
    now = time.time()  # before the reading: what is recorded meanwhile may be missing
    return TracedRun(str(folder), summarize(Run(folder)), now)
