"""The chain of block hashes of one request: what each is made of."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from omnicache_cli.report.model import Table
from omnicache_cli.trace.records import EngineSource, RequestRecord
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.views.names import RequestName
from omnicache_cli.trace.views.words import runs_text

ROOT = "root"
"""Parent of every first block: vLLM's NONE_HASH, the same for a whole engine."""

SHOWN_IDS = 6
"""Runs of token ids in a line of text; JSON has all."""


@dataclass(frozen=True, slots=True)
class Link:
    """One full hash block of a prompt."""

    block: int
    first_token: int
    end_token: int
    parent: str  # trailing bytes, in hex, as in a trace; ROOT for the first one
    token_ids: list[int] | None  # None: not recorded
    extra_keys: list[str]
    hash: str


def chain_of(run: Run, name: RequestName) -> list[Link]:
    """Of a recorded request; a fresh `Run`, since it is read once."""
    engines: dict[tuple[int, int], EngineSource] = {}
    for file, record in run.records():
        if isinstance(record, EngineSource):
            engines[id(file), record.source] = record
        elif isinstance(record, RequestRecord):
            engine = engines.get((id(file), record.source))
            if (
                engine is not None
                and engine.engine == name.engine
                and record.request_id == name.request_id
            ):
                return links(record, engine.hash_block_size)
    return []


def links(record: RequestRecord, size: int) -> list[Link]:
    keys = dict(record.extra_keys)
    found = []
    parents = pairwise([ROOT, *record.block_hashes])
    for block, (parent, one) in enumerate(parents):
        first, end = block * size, (block + 1) * size
        ids = None if record.token_ids is None else record.token_ids[first:end]
        found.append(Link(block, first, end, parent, ids, keys.get(block, []), one))
    return found


def chain_table(chain: list[Link]) -> Table:
    rows = [
        (
            link.block,
            f"{link.first_token} .. {link.end_token - 1}",
            link.parent,
            "not recorded" if link.token_ids is None else runs_text(link.token_ids, most=SHOWN_IDS),
            ", ".join(link.extra_keys) or None,
            link.hash,
        )
        for link in chain
    ]
    columns = ("block", "tokens", "parent hash", "token ids", "extra keys", "hash")
    return Table("Chain of block hashes", columns, rows)


def chain_data(chain: list[Link]) -> list[dict[str, Any]]:
    return [
        {
            "block": link.block,
            "first_token": link.first_token,
            "end_token": link.end_token,
            "parent_hash": None if link.parent == ROOT else link.parent,
            "token_ids": link.token_ids,
            "extra_keys": link.extra_keys,
            "hash": link.hash,
        }
        for link in chain
    ]
