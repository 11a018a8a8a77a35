"""Rules: a small grammar over the measures, and what follows where one holds.

    rule       = condition { "and" condition }
    condition  = term ( "<" | "<=" | ">" | ">=" ) number [ "%" ]
    term       = measure | ( "min" | "max" ) "(" measure ")"

A bare measure is that of the sum over all engines; min and max are over the single engines.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from omnicache_cli.errors import UsageError
from omnicache_cli.monitor.measures import Measures, measure
from omnicache_cli.monitor.values import Value, unknown

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
MAX_RULE = 500
"""Characters of one rule."""

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TOKEN = re.compile(r"\s*(?:(?P<word>[a-z][a-z0-9_]*)|(?P<op><=|>=|<|>)|(?P<mark>[()%]))")
# One number, and none of the forms that only Python reads, such as 1_000 or nan.
_NUMBER = re.compile(r"\s*(?P<number>-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)")


def measure_names() -> list[str]:
    """Every name that a rule may use."""
    none = measure([])
    lifetime = [f"lifetime_{name}" for name in none.lifetime]
    return sorted([*none.window, *none.now, "kv_cache_usage_peak", *lifetime])


@dataclass(frozen=True, slots=True)
class Condition:
    measure: str
    over: Literal["sum", "min", "max"]
    comparison: str
    threshold: float

    @property
    def term(self) -> str:
        return self.measure if self.over == "sum" else f"{self.over}({self.measure})"


@dataclass(frozen=True, slots=True)
class Rule:
    """`must_be_judged`: it was asked for on the command line, so that silence is no answer."""

    name: str
    when: str
    conditions: tuple[Condition, ...]
    severity: Severity = "warning"
    reason: str = ""
    causes: tuple[str, ...] = ()
    next_commands: tuple[str, ...] = ()
    must_be_judged: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that holds, and what it was seen by."""

    rule: Rule
    evidence: str


@dataclass(frozen=True, slots=True)
class Unjudged:
    """A rule of which nobody can say whether it holds."""

    rule: Rule
    why: str


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """UsageError: not of the grammar, or about a measure that there is not."""
    if len(text) > MAX_RULE:
        raise UsageError(f"a rule of {len(text)} characters; {MAX_RULE} is the most")
    reader = _Reader(text)
    conditions = [_condition(reader)]
    while not reader.at_end:
        reader.expect("and")
        conditions.append(_condition(reader))
    return tuple(conditions)


class _Reader:
    """The pieces of one rule, in order."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._at = 0

    @property
    def at_end(self) -> bool:
        return not self.text[self._at :].strip()

    def peek(self) -> str:
        found = _TOKEN.match(self.text, self._at)
        return found.group().strip() if found else ""

    def take(self) -> str:
        found = _TOKEN.match(self.text, self._at)
        if found is None:
            raise self.error("a measure, an operator or `and`")
        self._at = found.end()
        return found.group().strip()

    def number(self) -> float:
        found = _NUMBER.match(self.text, self._at)
        if found is None or not math.isfinite(float(found["number"])):
            raise self.error("a number")
        self._at = found.end()
        value = float(found["number"])
        if self.peek() == "%":
            self.take()
            return value / 100
        return value

    def expect(self, piece: str) -> None:
        before = self._at
        if self.peek() != piece or self.take() != piece:
            self._at = before
            raise self.error(f"`{piece}`")

    def error(self, wanted: str) -> UsageError:
        rest = self.text[self._at :].strip()
        found = f"{rest[:40]!r}" if rest else "the end"
        return UsageError(
            f"rule {self.text!r}: {wanted} is wanted where {found} stands; "
            "a rule reads like kv_cache_hit_rate<0.85 and queried_tokens>=1000"
        )


def _condition(reader: _Reader) -> Condition:
    word = reader.take()
    over: Literal["sum", "min", "max"] = "sum"
    if word in ("min", "max") and reader.peek() == "(":
        over = "min" if word == "min" else "max"
        reader.expect("(")
        word = reader.take()
        reader.expect(")")
    if word not in measure_names():
        raise UsageError(_no_such_measure(reader.text, word))
    if word == "kv_cache_usage_peak" and over == "sum":
        raise UsageError(
            f"rule {reader.text!r}: each engine has a peak of its own; write max({word})"
        )
    comparison = reader.take()
    if comparison not in OPERATORS:
        raise UsageError(f"rule {reader.text!r}: {comparison!r} is none of {', '.join(OPERATORS)}")
    return Condition(word, over, comparison, reader.number())


def _no_such_measure(text: str, word: str) -> str:
    import difflib

    close = difflib.get_close_matches(word, measure_names(), n=1)
    hint = f"; did you mean {close[0]}?" if close else "; docs/monitor.md lists the measures"
    return f"rule {text!r}: there is no measure {word!r}{hint}"


# -- judging ----------------------------------------------------------------------------------


def judge(
    rules: Sequence[Rule], all_engines: Measures, engines: Sequence[tuple[str, Measures]]
) -> tuple[list[Finding], list[Unjudged]]:
    """`engines`: each with the name that a reader knows it by."""
    findings: list[Finding] = []
    unjudged: list[Unjudged] = []
    for rule in rules:
        seen, doubts = [], []
        holds = True
        for condition in rule.conditions:
            value, where = _value_of(condition, all_engines, engines)
            answer = _compare(value, condition)
            if answer is None:
                doubts.append(f"{condition.term}: {value.missing or 'only a lower bound is known'}")
            elif answer:
                seen.append(_said(condition, value, where))
            else:
                holds = False
        if holds and doubts:
            unjudged.append(Unjudged(rule, "; ".join(doubts)))
        elif holds:
            findings.append(Finding(rule, "; ".join(seen)))
    findings.sort(key=lambda one: -SEVERITIES.index(one.rule.severity))
    return findings, unjudged


def _value_of(
    condition: Condition, all_engines: Measures, engines: Sequence[tuple[str, Measures]]
) -> tuple[Value, str]:
    if condition.over == "sum":
        return all_engines.get(condition.measure) or unknown("no engine"), ""
    found = [(one.get(condition.measure) or unknown("no engine"), name) for name, one in engines]
    known = [(value, name) for value, name in found if value.number is not None]
    if not known:
        return found[0] if found else (unknown("no engine"), "")
    pick = min if condition.over == "min" else max
    return pick(known, key=lambda one: one[0].number or 0.0)


def _compare(value: Value, condition: Condition) -> bool | None:
    """None: nobody knows. A lower bound may be enough to know."""
    if value.number is None:
        return None
    answer = OPERATORS[condition.comparison](value.number, condition.threshold)
    if value.is_above and answer != condition.comparison.startswith(">"):
        return None
    return answer


def short(number: float | None) -> str:
    """Counts in full, the rest in four digits."""
    if number is None:
        return "-"
    return f"{number:.0f}" if float(number).is_integer() else f"{number:.4g}"


def _said(condition: Condition, value: Value, where: str) -> str:
    number = f"{'over ' if value.is_above else ''}{short(value.number)}"
    place = f" at {where}" if where else ""
    basis = f" ({value.basis})" if value.basis else ""
    return f"{condition.term} is {number}{place}{basis}"
