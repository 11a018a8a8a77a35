"""Writes the generated parts of the documentation: the JSON Schemas and the table of hook points.

Usage: python docs/generate.py [--check]          (`make docs` runs it; --check only compares)

Everything comes from the code: the schemas from the records themselves, the table from the hooks
that are installed. Needs msgspec and, for the hooks, numpy; no vLLM.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from omnicache_cli.trace.manifest import Manifest
from omnicache_cli.trace.records import SCHEMA_VERSION, AnyRecord

DOCS = Path(__file__).resolve().parent
TRACE_SCHEMA = DOCS / "trace.schema.json"
RUN_SCHEMA = DOCS / "run.schema.json"
HOW_IT_WORKS = DOCS / "how-it-works.md"

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TABLE_BEGIN = "<!-- hooks: written by docs/generate.py -->\n"
TABLE_END = "<!-- end of hooks -->\n"

RECORDED: dict[str, str] = {
    "Scheduler.__init__": "attaches a probe to the scheduler and its pool; declares the engine",
    "Scheduler.schedule": "one `schedule` record; marks the step for the workers",
    "Scheduler.add_request": "one `request` record",
    "Scheduler.update_from_output": "the `output` time; writes the step's record, and the events "
    "since `schedule()` as an `after` record",
    "Request.__init__": "how long the prompt is hashed",
    "Scheduler.finish_requests": "the same, for aborted requests",
    "Scheduler.reset_prefix_cache": "the same, for a reset",
    "Scheduler._preempt_request": "event `preempt`",
    "Scheduler._free_request": "event `finish`",
    "KVCacheManager.allocate_slots": "remembers whose blocks the pool is handling; the `allocate` "
    "time",
    "KVCacheManager.free": "the same",
    "KVCacheManager.get_computed_blocks": "the `lookup` time; of several groups: asks each for its "
    "own hit",
    "KVCacheManager.record_prefix_cache_stats": "queried and hit tokens, kept for the admission",
    "BlockPool.get_new_blocks": "event `alloc`",
    "BlockPool._maybe_evict_cached_block": "event `evict`",
    "BlockPool.cache_full_blocks": "events `hash` and `cache`",
    "BlockPool.cache_partial_block": "event `cache_partial`",
    "BlockPool.move_block_hashes": "event `move`",
    "BlockPool.free_blocks": "event `free`",
    "BlockPool.reset_prefix_cache": "event `reset`",
    "EngineCore.shutdown": "in a process of its own: the `end` record, before a kill",
    "WorkerWrapperBase.shutdown": "the same",
    "GPUModelRunner.__init__": "attaches a probe to the model runner",
    "GPUModelRunner.execute_model": "reads the mark of the step; start of the `prepare` time",
    "GPUModelRunner._model_forward": "reads the forward context for the `forward` or `rank` record",
    "GPUModelRunner.sample_tokens": "the `sample` time",
    "GPUModelRunner.prepare_inputs": "keeps the padded shape that the batch will run with",
    "GPUModelRunner.prepare_attn": "keeps the batch, its block tables and slot mappings",
    "GPUModelRunner.pool": "the record of a pooling model is whole",
    "KVConnector.pre_forward": "reads the batch for the `forward` or `rank` record; the model runs",
    "KVConnector.finish_forward": "end of the `forward` time",
    "ActiveKVConnector.pre_forward": "the same, where there is a KV connector",
    "ActiveKVConnector.finish_forward": "the same",
    "TensorCache.begin_step": "the `save` time: rows of new blocks are forgotten",
    "TensorCache.save": "the `save` time",
    "TensorCache.materialize": "the `restore` time",
    "DeferredWrites.fetch": "the `copy` time: rows that are copied to the host at once",
    "DeferredWrites.hold": "the same: rows that are kept on the device",
    "DeferredWrites.start_of": "the same: copies of kept rows begin",
    "DeferredWrites.land_ready": "the same: copies that have come",
    "DeferredWrites.land": "the same: copies that are waited for",
    "DeferredWrites.land_all": "the same",
    "OmniPrefixCacheManager.new_step_starts": "the `save` time: commits what has come, notes hits",
    "OmniPrefixCacheManager.save_outputs": "the `save` time",
    "OmniPrefixCacheManager.materialize": "the `restore` time",
    "OmniPrefixCacheController.stage_step_host": "the `copy` time: the step's rows to the host",
    "OmniPrefixCacheController.join_host_ready": "the same: waits for the copies of a step before",
    "OmniPrefixCacheController.join": "the same",
    "OmniPrefixCacheController.fetch_host": "the same: rows that are read before they have come",
}
"""What the wrapper of each hook point does, the same in every class of that name. A key too few or
too many stops the generator."""


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = {path: text for path, text in generated().items() if _read(path) != text}
    for path, text in stale.items():
        name = path.relative_to(DOCS.parent)
        if arguments:
            print(f"{name} differs from the code; run: make docs", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return 1 if stale and arguments else 0


def generated() -> dict[Path, str]:
    """Every generated file and its whole text."""
    return {
        TRACE_SCHEMA: _as_text(trace_schema()),
        RUN_SCHEMA: _as_text(run_schema()),
        HOW_IT_WORKS: with_hook_table(HOW_IT_WORKS.read_text(encoding="utf-8")),
    }


def trace_schema() -> dict[str, Any]:
    """JSON Schema of one line of a rank file."""
    return _schema(
        AnyRecord,
        "One line of an omnicache rank file",
        f"Schema version {SCHEMA_VERSION}. The first line of a file is a Header, the last one of a "
        "process that ended in order is an End. docs/trace-format.md says what the fields mean.",
    )


def run_schema() -> dict[str, Any]:
    """JSON Schema of run.json."""
    return _schema(
        Manifest,
        "run.json of an omnicache run folder",
        f"Schema version {SCHEMA_VERSION}. What `omnicache trace` was asked to do.",
    )


def with_hook_table(text: str) -> str:
    """The text with the table between its two markers replaced."""
    head, begin, rest = text.partition(TABLE_BEGIN)
    _, end, tail = rest.partition(TABLE_END)
    if not begin or not end:
        raise SystemExit(f"{HOW_IT_WORKS.name} lacks {TABLE_BEGIN.strip()} or {TABLE_END.strip()}")
    return f"{head}{begin}{hook_table()}{end}{tail}"


def hook_table() -> str:
    """The hook points as a Markdown table, in the order of HOOKS."""
    from omnicache_cli.engine.probe.hooks import HOOKS

    points = [
        (module, f"{owner}.{method}")
        for module, classes in HOOKS.items()
        for owner, methods in classes.items()
        for method in methods
    ]
    if different := {point for _, point in points} ^ RECORDED.keys():
        raise SystemExit(f"RECORDED in {Path(__file__).name} and HOOKS differ: {sorted(different)}")
    lines = ["| module | method | what the probe does there |", "|---|---|---|"]
    last = None
    for module, point in points:
        shown = "" if module == last else f"`{module}`"
        lines.append(f"| {shown} | `{point}` | {RECORDED[point]} |")
        last = module
    return "\n".join(lines) + "\n"


def _schema(kind: Any, title: str, description: str) -> dict[str, Any]:
    head: dict[str, Any] = {"$schema": DIALECT, "title": title, "description": description}
    head |= _without_discriminators(msgspec.json.schema(kind))
    return head


def _without_discriminators(node: Any) -> Any:
    """`discriminator` is OpenAPI's word, not JSON Schema's; the `type` of each record says it."""
    if isinstance(node, list):
        return [_without_discriminators(one) for one in node]
    if not isinstance(node, dict):
        return node
    return {
        name: _without_discriminators(one)
        for name, one in node.items()
        if not (name == "discriminator" and "propertyName" in one)
    }


def _as_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2) + "\n"


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
