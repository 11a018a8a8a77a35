"""The grammar of rules, the rules there are, and rules of one's own."""

import os
from pathlib import Path

import pytest

from omnicache_cli.errors import BadInputError, UsageError
from omnicache_cli.monitor.config import rules_of
from omnicache_cli.monitor.default_rules import default_rules
from omnicache_cli.monitor.fleet import Sample
from omnicache_cli.monitor.measures import Measures
from omnicache_cli.monitor.rules import (
    Condition,
    Rule,
    judge,
    measure_names,
    parse_conditions,
)
from omnicache_cli.monitor.values import Value
from tests.unit.metrics_pages import fleet_of, page_of, tick
from tests.unit.metrics_server import AFTER, IDLE


def rule(when: str) -> Rule:
    return Rule(when, when, parse_conditions(when))


def holds(when: str, *engines: dict[str, Value], total: dict[str, Value]) -> bool | None:
    """None: not judged."""
    found, unjudged = judge(
        [rule(when)],
        Measures(window=total),
        [(f"e{number}", Measures(window=one)) for number, one in enumerate(engines)],
    )
    return None if unjudged else bool(found)


# -- the grammar --------------------------------------------------------------------------------


def test_a_rule_is_conditions_joined_by_and() -> None:
    assert parse_conditions("kv_cache_hit_rate<0.85 and max(kv_cache_usage) >= 95%") == (
        Condition("kv_cache_hit_rate", "sum", "<", 0.85),
        Condition("kv_cache_usage", "max", ">=", 0.95),
    )
    assert parse_conditions(" lifetime_kv_cache_hit_rate > 1e-3 ") == (
        Condition("lifetime_kv_cache_hit_rate", "sum", ">", 0.001),
    )
    assert parse_conditions("kv_cache_hit_rate_change<-10%")[0].threshold == -0.1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "a measure, an operator or `and` is wanted where the end stands"),
        ("kv_cache_hit_rate", "a measure, an operator or `and` is wanted where the end stands"),
        ("kv_cache_hit_rate<", "a number is wanted where the end stands"),
        ("kv_cache_hit_rate<x", "a number is wanted where 'x' stands"),
        ("kv_cache_hit_rate<nan", "a number is wanted where 'nan' stands"),
        ("kv_cache_hit_rate<1e999", "a number is wanted where '1e999' stands"),
        ("kv_cache_hit_rate<1_000", "`and` is wanted where '_000' stands"),
        ("kv_cache_hit_rate==0.5", "a measure, an operator or `and` is wanted where '==0.5'"),
        ("kv_cache_hit_rate<0.5 or preemptions>0", "`and` is wanted where 'or preemptions>0'"),
        ("hit_rate<0.5", "there is no measure 'hit_rate'"),
        ("kv_cache_hitrate<0.5", "did you mean kv_cache_hit_rate?"),
        ("__import__('os')<1", "a measure, an operator or `and` is wanted"),
        ("max(preemptions>0", "`)` is wanted where '>0' stands"),
        ("kv_cache_usage_peak>0.9", "write max(kv_cache_usage_peak)"),
        ("preemptions>0 and", "a measure, an operator or `and` is wanted where the end stands"),
        ("preemptions>" + "0" * 600, "a rule of 612 characters; 500 is the most"),
    ],
)
def test_what_is_no_rule_is_said_in_one_line(text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_conditions(text)

    assert what in str(caught.value)


def test_every_measure_of_a_real_sample_can_be_asked_for() -> None:
    fleet = fleet_of()
    tick(fleet, 0, IDLE)
    sample = tick(fleet, 10, AFTER)

    engine = sample.engines[0].measures
    assert {name for name in measure_names() if engine.get(name) is None} == set()


# -- judging ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "answer"),
    [
        ("preemptions>0", True),
        ("preemptions>3", False),
        ("preemptions>=3", True),
        ("preemptions<3", False),
        ("preemptions<=3", True),
        ("steps>0", None),
        ("preemptions>0 and steps>0", None),  # true and unknown
        ("preemptions>3 and steps>0", False),  # false, whatever the other is
        ("max(preemptions)>2", True),
        ("min(preemptions)>2", False),
        ("max(steps)>0", None),
    ],
)
def test_a_rule_holds_or_not_or_nobody_knows(when: str, answer: bool | None) -> None:
    unknown = Value(None, "not exposed")
    engines = [
        {"preemptions": Value(3), "steps": unknown},
        {"preemptions": Value(0), "steps": unknown},
    ]

    assert holds(when, *engines, total={"preemptions": Value(3), "steps": unknown}) is answer


@pytest.mark.parametrize(
    ("when", "answer"),
    [
        ("ttft_p99>60", True),  # over 80, so over 60
        ("ttft_p99>90", None),
        ("ttft_p99<90", None),
        ("ttft_p99<60", False),
    ],
)
def test_a_lower_bound_answers_what_it_can(when: str, answer: bool | None) -> None:
    assert holds(when, total={"ttft_p99": Value(80.0, is_above=True)}) is answer


def test_max_and_min_leave_out_engines_of_which_nothing_is_known() -> None:
    engines = [{"preemptions": Value(None, "none")}, {"preemptions": Value(4)}]
    found, _ = judge(
        [rule("max(preemptions)>0")],
        Measures(),
        [(f"engine {number}", Measures(window=one)) for number, one in enumerate(engines)],
    )

    assert [one.evidence for one in found] == ["max(preemptions) is 4 at engine 1"]


# -- the defaults -------------------------------------------------------------------------------


def judged(*pages: str) -> Sample:
    fleet = fleet_of(rules=default_rules(None))
    for number, page in enumerate(pages):
        sample = tick(fleet, 2.0 * number, page)
    return sample


def fired(*pages: str) -> list[str]:
    return [one.rule.name for one in judged(*pages).findings]


def counted(queried: int, hit: int, **more: float) -> str:
    return page_of({"0": {"queried": queried, "hit": hit, "preempted": 0, "usage": 0.1, **more}})


def test_the_default_rules_hold_where_they_should() -> None:
    quiet = counted(0, 0)

    assert fired(quiet, counted(10000, 9000)) == []
    assert fired(quiet, counted(10000, 8000)) == ["hit-rate"]
    assert fired(quiet, counted(999, 100)) == []  # too few tokens to say
    assert fired(quiet, counted(9999, 0)) == []
    assert fired(quiet, counted(10000, 0)) == ["no-hit"]
    assert fired(quiet, counted(10000, 9000, preempted=1)) == ["preemptions"]
    assert fired(counted(0, 0, usage=0.96), counted(10000, 9000)) == ["pool-full"]
    assert fired(counted(100000, 99000), counted(101000, 99880)) == ["hit-rate-falling"]


def test_one_cumulative_scrape_is_never_judged() -> None:
    sample = judged(counted(10000, 100, preempted=50))

    assert sample.findings == []
    assert {one.rule.name for one in sample.unjudged} >= {"hit-rate", "preemptions"}


def test_a_finding_says_what_was_seen_why_it_matters_and_what_to_type() -> None:
    (finding,) = judged(IDLE, AFTER).findings

    assert finding.rule.severity == "warning"
    assert finding.evidence == (
        "kv_cache_hit_rate is 0.6975 (8960 of 12846 queried tokens); hit_tokens is 8960; "
        "queried_tokens is 12846"
    )
    assert finding.rule.next_commands == (
        "start the server under omnicache trace to record a run, and name that here with --run",
    )
    named = {one.name: one for one in default_rules("my run")}
    assert named["hit-rate"].next_commands == (
        "omnicache explain 'my run'",
        "omnicache simulate 'my run' --bound",
    )


def test_every_default_rule_has_a_reason_causes_and_a_next_command() -> None:
    for one in default_rules(None):
        assert one.reason
        assert one.causes
        assert one.next_commands


# -- rules of one's own -------------------------------------------------------------------------


def read(tmp_path: Path, text: str) -> list[Rule]:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return rules_of(default_rules(None), path, [])


def test_a_file_adds_replaces_and_switches_off(tmp_path: Path) -> None:
    rules = read(
        tmp_path,
        """
        [monitor]
        off = ["pool-full", "no-hit"]
        [[monitor.rule]]
        name = "hit-rate"
        when = "kv_cache_hit_rate < 60%"
        [[monitor.rule]]
        name = "slow"
        when = "ttft_p99 > 2"
        severity = "critical"
        reason = "our promise"
        causes = ["too much at once"]
        next = "look at the dashboard"
        [other]
        ignored = 1
        """,
    )

    named = {one.name: one for one in rules}
    assert list(named) == ["hit-rate", "preemptions", "hit-rate-falling", "slow"]
    assert named["hit-rate"].conditions == (Condition("kv_cache_hit_rate", "sum", "<", 0.6),)
    assert named["hit-rate"].reason.startswith("prompts repeat")
    slow = named["slow"]
    assert (slow.severity, slow.reason, slow.causes, slow.next_commands) == (
        "critical",
        "our promise",
        ("too much at once",),
        ("look at the dashboard",),
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("monitor = 1", "monitor is a table"),
        ("[monitor\n", "is no TOML"),
        ("[monitor]\nrules = []", "[monitor] has no 'rules'; it has rule and off"),
        ('[monitor]\noff = "x"', "off is a list of names"),
        ('[monitor]\noff = ["x"]', "off names 'x', which is no rule; rules: hit-rate, "),
        ("[monitor]\nrule = 1", "write each rule under a line [[monitor.rule]]"),
        ("[monitor]\nrule = [1]", "rule 1 is no table"),
        ("[[monitor.rule]]\nname = 'x'", "rule 1 has no when"),
        ("[[monitor.rule]]\nwhen = 5", "rule 1: when is text in quotes"),
        ("[[monitor.rule]]\nwhen = 'x'\nif = 1", "rule 1 has no 'if'; it has causes, name, "),
        ("[[monitor.rule]]\nwhen = 'x > 1'", "rule 1: rule 'x > 1': there is no measure 'x'"),
        ("[[monitor.rule]]\nwhen = 'steps>1'\nseverity = 'bad'", "severity is one of info, "),
        ("[[monitor.rule]]\nwhen = 'steps>1'\ncauses = [1]", "causes is a list of texts"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read(tmp_path, text)

    assert what in str(caught.value)
    assert "rules.toml" in str(caught.value)


def test_omnicache_toml_of_the_folder_counts_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("omnicache.toml").write_text("[[monitor.rule]]\nname = 'mine'\nwhen = 'steps > 1'\n")

    assert "mine" in {one.name for one in rules_of(default_rules(None), None, [])}
    with pytest.raises(BadInputError, match=r"cannot read absent\.toml"):
        rules_of([], Path("absent.toml"), [])
    (asked,) = rules_of([], Path("omnicache.toml"), ["steps>5"])[1:]
    assert (asked.name, asked.must_be_judged) == ("steps>5", True)


@pytest.mark.parametrize("kind", ["/dev/zero", "/dev/full", "FIFO", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = Path(kind) if kind.startswith("/") else tmp_path / kind
    if kind == "FIFO":
        os.mkfifo(path)  # nobody writes into it
    if kind == "folder":
        path.mkdir()
    with pytest.raises(BadInputError) as caught:
        rules_of([], path, [])

    assert str(caught.value) in (
        f"{path} is no regular file; name one with rules",
        f"cannot read {path}: Is a directory; name another file",
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = " + "9" * 5000, "is no TOML: Exceeds the limit"),
        ("x = " + "[" * 100_000, "is nested too deeply for rules; mend it"),
        ("#" * ((1 << 20) + 1), "is over a megabyte; is it the right file?"),
    ],
)
def test_a_file_that_no_reader_of_toml_takes_is_one_line(
    tmp_path: Path, text: str, what: str
) -> None:
    with pytest.raises(BadInputError, match=what.replace("?", r"\?")):
        read(tmp_path, text)
