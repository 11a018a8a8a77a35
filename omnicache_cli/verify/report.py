"""A verification as a Report."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from omnicache_cli.errors import EXIT_BAD_INPUT, EXIT_DIFFERS, EXIT_DONE
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.verify.judge import LOGPROBS, TOKENS
from omnicache_cli.verify.pictures import error_pictures
from omnicache_cli.verify.results import Pair, Verdict, Verification

EXIT_CODES = {
    Verdict.EQUAL: EXIT_DONE,
    Verdict.ROUNDING: EXIT_DONE,
    Verdict.NOTHING: EXIT_BAD_INPUT,
    Verdict.CORRUPTION: EXIT_DIFFERS,
}


def verify_report(
    result: Verification, facts: dict[str, Cell], *, vllm_version: str | None
) -> Report:
    """`facts`: what was run on what, in the order in which it is to be read."""
    sections: list[Section] = [Facts("", facts), _pairs_table(result.pairs)]
    wrong = [one for one in result.pairs if one.verdict is Verdict.CORRUPTION]
    if wrong:
        sections.append(_corruption_lines(wrong))
    sections += error_pictures(result.pairs, result.block_size)
    unproved = _unproved_lines(result, facts)
    if unproved:
        sections.append(Lines("Nothing verified", unproved))
    if result.not_run:
        lines = [f"{name}: {why}" for name, why in result.not_run]
        sections.append(Lines("Not run", lines))
    sections.append(Lines("", [summary_line(result)]))
    data = {
        **{name.replace(" ", "_"): value for name, value in facts.items()},
        "verdict": result.verdict,
        "hit_tokens": result.hit_tokens,
        "pairs": [pair_data(one) for one in result.pairs],
        "not_run": [{"scenario": name, "why": why} for name, why in result.not_run],
    }
    title = f"Verification: {result.verdict}"
    return Report("verify", title, data, tuple(sections), vllm_version)


def summary_line(result: Verification) -> str:
    """One line that says it all, the last of the report."""
    counts = Counter(one.verdict for one in result.pairs)
    several = ", ".join(f"{counts[one]} {one}" for one in Verdict if counts[one])
    requests = {(one.scenario, one.request) for one in result.pairs if one.hit_tokens}
    blocks = {(one.scenario, one.request): one.hit_blocks for one in result.pairs}
    hits = f"{result.hit_tokens} hit tokens in {sum(blocks.values())} blocks"
    pairs = f"{len(result.pairs)} pairs: {several or 'none'}"
    many = f"{len(requests)} request{'' if len(requests) == 1 else 's'}"
    return f"verify: {result.verdict}: {hits} of {many}; {pairs}"


def _pairs_table(pairs: list[Pair]) -> Table:
    """What was served from the cache, and of the rest what is not equal."""
    shown = [one for one in pairs if one.hit_tokens or one.verdict is not Verdict.EQUAL]
    columns = (
        *("scenario", "request", "hit tokens", "blocks", "key", "rows", "KiB", "restored"),
        *("differ %", "max error", "rel. error", "allowed", "verdict"),
    )
    rows: list[tuple[Cell, ...]] = []
    for one in shown:
        sampled = one.key in (TOKENS, LOGPROBS)
        share = 100 * one.num_differing_rows / one.num_rows if one.num_rows else None
        rows.append(
            (
                one.scenario,
                one.request,
                one.hit_tokens,
                one.hit_blocks,
                one.key,
                None if sampled else one.num_rows,
                None if sampled else round(one.num_bytes / 1024, 1),
                None if sampled else one.num_restored_rows,
                None if share is None else round(share, 1),
                _short(one.max_abs_error),
                _short(one.relative_error),
                _short(one.allowed),
                str(one.verdict),
            )
        )
    return Table("Requests", columns, rows, one_line_rows=True)


def _corruption_lines(wrong: list[Pair]) -> Lines:
    lines = []
    for one in wrong:
        lines.append(f"{one.scenario}, {one.request}, {one.key}: {one.fault}: {one.diagnosis}")
        place = one.place
        if place is None:
            continue
        where = [f"token {place.token}"]
        where += [f"block {place.block} of the request"] if place.block is not None else []
        where += [f"block id {place.block_id}"] if place.block_id is not None else []
        where += [f"slot {place.slot}"] if place.slot is not None else []
        where += [f"step {place.step}"] if place.step is not None else []
        lines.append(f"   starts at {', '.join(where)}")
        if place.column is not None:
            lines.append(f"   expected {_values(place.expected)} from column {place.column} on")
            lines.append(f"   found    {_values(place.found)}")
    return Lines("Corruption", lines)


def _unproved_lines(result: Verification, facts: dict[str, Cell]) -> list[str]:
    lines = [
        f"{one.scenario}, {one.request}: {one.diagnosis}"
        for one in result.pairs
        if one.verdict is Verdict.NOTHING and one.key == TOKENS
    ]
    lines += [
        f"{one.scenario}, {one.request}: its prompt fills no block and leaves a token to compute, "
        f"so it cannot hit: a block has {facts['block size']} tokens"
        for one in result.pairs
        if one.must_hit and not one.hit_tokens and one.verdict is not Verdict.NOTHING
        if one.key == TOKENS
    ]
    return lines if result.pairs else ["no scenario could be run"]


def pair_data(one: Pair) -> dict[str, Any]:
    data = asdict(one)
    place = data.pop("place") or {}
    errors = data.pop("row_errors")
    return {
        **data,
        "row_errors": None if one.verdict is Verdict.EQUAL else list(errors),
        "share_of_differing_rows": one.num_differing_rows / one.num_rows if one.num_rows else None,
        "token": place.get("token"),
        "block": place.get("block"),
        "block_id": place.get("block_id"),
        "slot": place.get("slot"),
        "step": place.get("step"),
        "column": place.get("column"),
        "expected_values": list(place.get("expected", ())),
        "found_values": list(place.get("found", ())),
    }


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.2g}")


def _values(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4g}" for value in values)
