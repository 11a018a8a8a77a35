"""Which request of a run the user means."""

import difflib
from dataclasses import dataclass

from omnicache_cli.errors import BadInputError
from omnicache_cli.trace.records import EngineSource, RequestRecord, external_id
from omnicache_cli.trace.run import Run

MAX_CHOICES = 5
"""Names that an error message lists."""


@dataclass(frozen=True, slots=True)
class RequestName:
    """All the names that one request has."""

    engine: str
    number: int  # arrival number in its engine
    external_id: str
    request_id: str  # vLLM's internal id


def find_request(run: Run, wanted: str, engine: str | None = None) -> RequestName:
    """By external id, else by arrival number (#3 or 3), else by vLLM's internal id.

    BadInputError: no request has this name, or several have.
    """
    names = request_names(run, engine)
    bare = wanted.removeprefix("#")
    number = int(bare) if bare.isascii() and bare.isdecimal() and len(bare) < 19 else None
    found = [one for one in names if one.external_id == wanted]
    if not found and number is not None:
        found = [one for one in names if one.number == number]
    if not found:
        found = [one for one in names if one.request_id == wanted]
    if len(found) == 1:
        return found[0]
    if not found:
        raise BadInputError(f"{run.folder} has no request {wanted}; {_nearest(names, wanted)}")
    choices = ", ".join(f"#{one.number} of engine {one.engine}" for one in found[:MAX_CHOICES])
    more = f" and {len(found) - MAX_CHOICES} more" if len(found) > MAX_CHOICES else ""
    raise BadInputError(
        f"{len(found)} requests are called {wanted}: {choices}{more}; "
        "name one by its number, and its engine with --engine"
    )


def request_names(run: Run, engine: str | None = None) -> list[RequestName]:
    """Every request of the run, in the order of arrival in its engine."""
    engines: dict[tuple[int, int], EngineSource] = {}
    order: list[str] = []
    names: dict[tuple[str, int], RequestName] = {}
    for file, record in run.records():
        if isinstance(record, EngineSource):
            engines[id(file), record.source] = record
            if record.engine not in order:
                order.append(record.engine)
        elif isinstance(record, RequestRecord):
            source = engines.get((id(file), record.source))
            if source is None:
                continue  # the merged reader says what is wrong with it
            known = (source.engine, str(order.index(source.engine)), source.stage)
            wanted = engine is None or engine in known
            if wanted and (source.engine, record.request) not in names:
                name = external_id(record.request_id, randomized=source.randomized_request_ids)
                names[source.engine, record.request] = RequestName(
                    source.engine, record.request, name, record.request_id
                )
    return list(names.values())


def _nearest(names: list[RequestName], wanted: str) -> str:
    if not names:
        return "no request was recorded"
    ids = list(dict.fromkeys(one.external_id for one in names))
    near = difflib.get_close_matches(wanted, ids, n=MAX_CHOICES, cutoff=0.4)
    if near:
        return f"nearest: {', '.join(near)}"
    few = ", ".join(ids[:MAX_CHOICES])
    return f"it has {len(ids)}: {few}{', …' if len(ids) > MAX_CHOICES else ''}"
