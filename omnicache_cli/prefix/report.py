"""Explanations as reports: one request in full, or all of them as a table."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from omnicache_cli.errors import EXIT_DIFFERS, EXIT_DONE
from omnicache_cli.prefix.chain import chain_data, chain_of, chain_table
from omnicache_cli.prefix.explain import Explanation, explain_run
from omnicache_cli.prefix.reasons import COMPLETE, NEW, REASONS, Reason
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.views.names import find_request
from omnicache_cli.trace.views.view import View, engine_title
from omnicache_cli.trace.views.words import counted

TEXT_ROWS = 1000
JSON_ROWS = 100_000
"""Requests listed; all are counted."""


def explain_request(
    run: Run,
    wanted: str,
    engine: str | None,
    *,
    subject: Mapping[str, Any] | None = None,
    with_chain: bool = False,
    fail_on: Collection[str] = (),
) -> View:
    """One request. `subject`: what JSON names instead of the run. `with_chain`: its hashes too.

    BadInputError: no request has this name, or several have.
    """
    name = find_request(run, wanted, engine)
    mine = [
        one
        for one in explain_run(run, name.engine)
        if one.number == name.number and one.request_id == name.request_id
    ]
    sections: list[Section] = []
    for number, one in enumerate(mine):
        sections += _sections(one, sentence(one) if number else "")
    title = sentence(mine[0]) if mine else f"#{name.number} {name.external_id}: not in the steps"
    result = {**(subject or {"run": str(run.folder)}), "requests": [data_of(one) for one in mine]}
    if with_chain:
        chain = chain_of(Run(run.folder), name)
        sections.append(chain_table(chain))
        result["chain"] = chain_data(chain)
    report = Report(
        "explain",
        title,
        result,
        tuple(sections),
        run.vllm_version,
    )
    return View(report, None, _exit_code(mine, fail_on))


def explain_requests(
    run: Run,
    engine: str | None,
    *,
    every_request: bool,
    subject: Mapping[str, Any] | None = None,
    fail_on: Collection[str] = (),
) -> View:
    """Every lookup in one line. `every_request`: JSON_ROWS of them (JSON), else TEXT_ROWS."""
    most = JSON_ROWS if every_request else TEXT_ROWS
    kept: list[Explanation] = []
    counts: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    hit = queried = 0
    warnings: dict[str, None] = {}
    for one in explain_run(run, engine):
        counts[one.reason.name] += 1
        missed[one.reason.name] += (one.queried_tokens or 0) - (one.hit_tokens or 0)
        if not one.resumed:
            hit += one.hit_tokens or 0
            queried += one.queried_tokens or 0
        for line in one.warnings:
            warnings[f"#{one.number} {one.external_id}: {line}"] = None
        if len(kept) < most:
            kept.append(one)
    title = headline(counts, missed, hit, queried)
    sections: list[Section] = [_counts(counts, missed)]
    for name in run.engines:
        rows = [one for one in kept if one.engine == name][:TEXT_ROWS]
        if rows:
            sections.append(_table(engine_title(run, name), rows))
    total = counts.total()
    if total > TEXT_ROWS:
        more = counted(total - TEXT_ROWS, "more lookup")
        sections.append(Lines("", [f"… and {more}; --request ID or --format json"]))
    if warnings:
        sections.append(Lines("Warnings", list(warnings)))
    result = {
        **(subject or {"run": str(run.folder)}),
        "num_lookups": total,
        "listed": len(kept),
        "hit_tokens": hit,
        "queried_tokens": queried,
        "reasons": [
            {"reason": name, "lookups": count, "missed_tokens": missed[name]}
            for name, count in counts.most_common()
        ],
        "requests": [data_of(one) for one in kept],
    }
    report = Report("explain", title, result, tuple(sections), run.vllm_version)
    return View(report, _next(run, kept), _exit_code_of(counts, fail_on))


# -- words ------------------------------------------------------------------------------------


def sentence(one: Explanation) -> str:
    """The answer."""
    who = f"#{one.number} {one.external_id}"
    if one.step is None:
        return f"{who} was not looked up: {one.reason.detail}"
    again = " when it resumed" if one.resumed else ""
    if one.hit_tokens is None:
        return f"{who} was not looked up{again}: {one.reason.detail}"
    tokens = counted(one.queried_tokens or 0, "token")
    return f"{who} hit {one.hit_tokens:,} of {tokens}{again}: {one.reason.detail}"


def headline(counts: Counter[str], missed: Counter[str], hit: int, queried: int) -> str:
    """The answer for a whole run: what cost most of the tokens that had been computed before."""
    total = counts.total()
    if not total:
        return "No request was recorded"
    if not queried:
        (name, _), *_ = counts.most_common(1)
        return f"The cache was never asked in {counted(total, 'lookup')}: {REASONS[name]}"
    share = f"{hit:,} of {counted(queried, 'queried token')} hit"
    costs = [(missed[name], name) for name in counts if name not in COMPLETE | NEW]
    if not costs:
        return f"{share}; nothing was missed that had been in reach"
    _, name = max(costs)
    which = f"{name} ({counts[name]} of {total}): {REASONS[name]}"
    return f"{share}; of what an earlier request had, most was lost to {which}"


def _counts(counts: Counter[str], missed: Counter[str]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (name, count, missed[name], REASONS[name]) for name, count in counts.most_common()
    ]
    return Table("Reasons", ("reason", "lookups", "missed tokens", "meaning"), rows)


def _table(title: str, rows: Iterable[Explanation]) -> Table:
    columns = ("request", "id", "step", "prompt", "hit", "reason", "then")
    return Table(
        title or "Lookups",
        columns,
        [
            (
                f"#{one.number}",
                one.external_id + (" (resumed)" if one.resumed else ""),
                one.step,
                one.num_prompt_tokens,
                one.hit_tokens,
                one.reason.name,
                None if one.following is None else one.following.name,
            )
            for one in rows
        ],
        one_line_rows=True,
    )


def _sections(one: Explanation, title: str) -> list[Section]:
    facts: dict[str, Cell] = {"reason": one.reason.name}
    if one.step is not None:
        facts["step"] = one.step
    facts["prompt tokens"] = one.num_prompt_tokens
    if one.hit_tokens is not None:
        if one.queried_tokens != one.num_prompt_tokens:
            facts["queried tokens"] = one.queried_tokens
        facts["hit tokens"] = one.hit_tokens
        if one.group_hit_tokens:
            facts["hit tokens by group"] = ", ".join(map(str, one.group_hit_tokens))
        if one.donor is not None and one.donor.request >= 0:
            donor = f"#{one.donor.request} {one.donor.name}".rstrip()
            cached = f"cached at step {one.donor.step} by {donor}"
            facts["last block hit"] = f"block id {one.donor.block}, {cached}"
    sections: list[Section] = [Facts(title, facts)]
    if one.reason.evidence:
        sections.append(Lines("Evidence", list(one.reason.evidence)))
    if one.following is not None:
        then = [f"{one.following.name} at {one.following.limit_tokens}: {one.following.detail}"]
        then += [f"   {line}" for line in one.following.evidence]
        sections.append(Lines("What would end it next", then))
    if one.warnings:
        sections.append(Lines("Warnings", list(one.warnings)))
    return sections


def data_of(one: Explanation) -> dict[str, Any]:
    """One lookup for scripts."""
    return {
        "engine": one.engine,
        "number": one.number,
        "request": one.external_id,
        "request_id": one.request_id,
        "step": one.step,
        "resumed": one.resumed,
        "prompt_tokens": one.num_prompt_tokens,
        "queried_tokens": one.queried_tokens,
        "hit_tokens": one.hit_tokens,
        "predicted_hit_tokens": one.predicted_tokens,
        "group_hit_tokens": list(one.group_hit_tokens),
        **_reason_data(one.reason),
        "next": None if one.following is None else _reason_data(one.following),
        "last_block_hit": None if one.donor is None else asdict(one.donor),
        "warnings": list(one.warnings),
    }


def _reason_data(reason: Reason) -> dict[str, Any]:
    return {
        "reason": reason.name,
        "detail": reason.detail,
        "limit_tokens": reason.limit_tokens,
        "evidence": list(reason.evidence),
        "facts": dict(reason.data),
    }


# -- what next --------------------------------------------------------------------------------


def _next(run: Run, kept: list[Explanation]) -> str | None:
    missed = [one for one in kept if one.reason.name not in COMPLETE and one.hit_tokens is not None]
    if not missed:
        return None
    one = missed[-1]
    engine = f" --engine {list(run.engines).index(one.engine)}" if len(run.engines) > 1 else ""
    return f'--request "#{one.number}"{engine}'


def _exit_code(mine: Iterable[Explanation], fail_on: Collection[str]) -> int:
    return _exit_code_of(Counter(one.reason.name for one in mine), fail_on)


def _exit_code_of(counts: Counter[str], fail_on: Collection[str]) -> int:
    return EXIT_DIFFERS if any(counts[name] for name in fail_on) else EXIT_DONE
