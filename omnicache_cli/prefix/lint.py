"""What a configuration will cost the prefix cache, said before a run, each with its fix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from statistics import median
from typing import Any

from omnicache_cli.prefix.lookup import effective, kind_of
from omnicache_cli.report.model import Facts, Lines, Report, Section
from omnicache_cli.trace.records import EngineSource, RequestRecord
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.views.words import counted

LARGE_UNIT = 1024
"""Tokens: a unit from which short shared prefixes are out of reach."""

FINDINGS = {
    "caching-off": "prefix caching is off",
    "unit-longer-than-prompts": "the usual prompt is shorter than one unit",
    "block-does-not-divide": "a block of attention does not divide the block of states",
    "large-unit": "hits come in large units",
    "speculative-drop": "speculative decoding drops a unit from each hit",
    "sparse-retention": "windows and states are kept at the end of prompts only",
}
"""Name -> what it means. `explain --lint --fail-on` takes these names."""


@dataclass(frozen=True, slots=True)
class LintFacts:
    """A configuration, from a run or from engine arguments."""

    enable_prefix_caching: bool
    blocks: tuple[tuple[str, int], ...]  # kind of attention and block size, tokens
    unit: int | None  # every hit is a multiple, tokens; None: by the blocks
    drops_unit: bool  # EAGLE or MTP
    retention_interval: int | None  # of windows and states, tokens; None: everything is kept
    prompt_tokens: tuple[int, ...] = ()  # of the prompts at hand

    @property
    def hit_unit(self) -> int:
        return self.unit or lcm(*(size for _, size in self.blocks))


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    text: str
    fix: str


def findings(facts: LintFacts) -> Iterator[Finding]:
    if not facts.enable_prefix_caching:
        yield Finding(
            "caching-off",
            "prefix caching is off: nothing will hit",
            "set enable_prefix_caching=True; for latent attention on a CPU without AMX vLLM turns "
            "it off again",
        )
        return
    unit = facts.hit_unit
    sizes = sorted({size for _, size in facts.blocks})
    needed = unit * (2 if facts.drops_unit else 1) + 1
    usual = int(median(facts.prompt_tokens)) if facts.prompt_tokens else None
    if usual is not None and usual < needed:
        yield Finding(
            "unit-longer-than-prompts",
            f"the median prompt has {counted(usual, 'token')}, and a hit needs {needed}",
            "a smaller block_size, or for a hybrid model prefix_match_unit below it",
        )
    states = [size for kind, size in facts.blocks if kind == "state"]
    for state in states[:1]:
        odd = [size for kind, size in facts.blocks if kind != "state" and state % size]
        if odd:
            yield Finding(
                "block-does-not-divide",
                f"attention in blocks of {', '.join(map(str, odd))} and states in blocks of {state}"
                f": both end together every {unit} tokens only",
                "set block_size or mamba_block_size so that the first divides the other",
            )
    if unit > sizes[-1] or (unit >= LARGE_UNIT and unit > sizes[0]):
        yield Finding(
            "large-unit",
            f"blocks of {', '.join(map(str, sizes))} make a unit of {unit} tokens: less than that "
            "is never hit",
            "choose block sizes that divide each other and are small, or for a hybrid model set "
            "prefix_match_unit",
        )
    elif unit >= LARGE_UNIT:
        yield Finding(
            "large-unit",
            f"a block has {unit} tokens: a shared prefix shorter than that is never hit",
            "set a smaller block_size; for a hybrid model prefix_match_unit",
        )
    if facts.drops_unit:
        yield Finding(
            "speculative-drop",
            f"speculative decoding drops the last matched unit: each hit is {unit} tokens shorter, "
            f"and prompts under {2 * unit + 1} tokens never hit",
            "a smaller block_size; or leave out speculative_config where prompts repeat",
        )
    if facts.retention_interval == 0 and any(kind != "full" for kind, _ in facts.blocks):
        yield Finding(
            "sparse-retention",
            "windows and states are kept at the end of each prompt only: the first request that "
            "shares less than a whole prompt hits nothing there",
            f"set prefix_cache_retention_interval to a multiple of {unit}, or to null to keep all",
        )


def facts_of_run(run: Run) -> dict[str, LintFacts]:
    """By engine, with the lengths of its prompts."""
    engines: dict[str, EngineSource] = {}
    sources: dict[tuple[int, int], str] = {}
    lengths: dict[str, list[int]] = {}
    for file, record in run.records():
        if isinstance(record, EngineSource):
            engines[record.engine] = record
            sources[id(file), record.source] = record.engine
        elif isinstance(record, RequestRecord) and (id(file), record.source) in sources:
            name = sources[id(file), record.source]
            lengths.setdefault(name, []).append(record.num_prompt_tokens)
    return {
        name: _facts_of_engine(effective(one), lengths.get(name, []))
        for name, one in engines.items()
    }


def _facts_of_engine(engine: EngineSource, lengths: Sequence[int]) -> LintFacts:
    groups = [one for one in engine.groups if one.prefix_cacheable]
    retention = engine.options.get("prefix_cache_retention_interval")
    return LintFacts(
        engine.enable_prefix_caching and bool(groups),
        tuple((kind_of(one) or one.spec, one.block_size) for one in groups),
        engine.cache_hit_alignment_tokens,
        any(one.is_eagle_group for one in groups),
        retention if isinstance(retention, int) else None,
        tuple(lengths),
    )


def lint_report(
    subject: str, facts: dict[str, LintFacts], *, vllm_version: str | None
) -> tuple[Report, list[str]]:
    """The report, and the names of what was found. `facts`: by engine, "" for the only one."""
    sections: list[Section] = []
    data: list[dict[str, Any]] = []
    for name, one in facts.items():
        found = list(findings(one))
        sections.append(Facts(name if len(facts) > 1 else "", _shown(one)))
        for finding in found:
            lines = [finding.text, f"fix: {finding.fix}"]
            sections.append(Lines(finding.name, lines))
        data += [
            {"engine": name or None, "finding": one.name, "detail": one.text, "fix": one.fix}
            for one in found
        ]
    names = [str(one["finding"]) for one in data]
    what = counted(len(names), "finding") if names else "nothing found"
    first = f": {FINDINGS[names[0]]}" if names else ""
    result = {"subject": subject, "findings": data}
    report = Report(
        "explain",
        f"Prefix cache of {subject}: {what}{first}",
        result,
        tuple(sections),
        vllm_version,
    )
    return report, names


def _shown(facts: LintFacts) -> dict[str, str | int | None]:
    shown: dict[str, str | int | None] = {
        "prefix caching": "on" if facts.enable_prefix_caching else "off",
    }
    if facts.blocks:
        shown["blocks"] = ", ".join(f"{kind} {size}" for kind, size in facts.blocks)
        shown["unit of a hit"] = counted(facts.hit_unit, "token")
    if facts.prompt_tokens:
        shown["prompt tokens, median"] = int(median(facts.prompt_tokens))
    return shown
