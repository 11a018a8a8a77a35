"""The rules of the Trace Event Format that timelines are held against do find what is wrong."""

from typing import Any

import pytest

from tests.unit.trace_event_format import problems

NAMED: list[dict[str, Any]] = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "p"}},
    {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "t"}},
]
SLICE = {"ph": "X", "pid": 1, "tid": 1, "ts": 10, "dur": 10, "name": "a"}
BEGIN = {"ph": "B", "pid": 1, "tid": 1, "ts": 1, "name": "a"}
SPAN = {"ph": "b", "pid": 1, "tid": 1, "ts": 1, "cat": "c", "id": "1", "name": "a"}
COUNTER = {"ph": "C", "pid": 1, "ts": 1, "name": "a", "args": {"x": 1}}
MARK = {"ph": "i", "pid": 1, "tid": 1, "ts": 1, "s": "p", "name": "a"}


def test_a_right_file_has_no_problem() -> None:
    events = [
        *NAMED,
        SLICE,
        {**SLICE, "ts": 10.5, "dur": 9.5},
        {**SLICE, "ts": 20},
        BEGIN,
        {**BEGIN, "ph": "E", "ts": 2},
        SPAN,
        {**SPAN, "name": "b"},
        {**SPAN, "ph": "e", "name": "b"},
        {**SPAN, "ph": "e"},
        COUNTER,
        MARK,
    ]
    assert problems({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}}) == []


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([{**SLICE, "ph": "Z"}], "event 2: ph is 'Z'"),
        ([{**SLICE, "ts": "10"}], "event 2: ts is '10'"),
        ([{**SLICE, "ts": float("nan")}], "event 2: ts is nan"),
        ([{**SLICE, "dur": -1}], "event 2: dur is -1"),
        ([{**SLICE, "pid": "1"}], "event 2: pid is '1'"),
        ([{**SLICE, "tid": True}], "event 2: tid is True"),
        ([{**SLICE, "cat": ["a"]}], "event 2: cat is ['a']"),
        ([{**SLICE, "colour": "red"}], "event 2: X with colour"),
        ([{**SPAN, "id": 1}], "event 2: id is 1"),
        ([{"ph": "X", "pid": 1, "tid": 1, "ts": 1, "name": "a"}], "event 2: X without dur"),
        ([{**COUNTER, "args": {"x": "1"}}], "event 2: values of a counter are {'x': '1'}"),
        ([{**COUNTER, "args": {}}], "event 2: values of a counter are {}"),
        ([{**MARK, "s": "x"}], "event 2: s is 'x'"),
        ([{**NAMED[0], "args": {}}], "event 2: metadata process_name is {}"),
        ([NAMED[0]], "two times process_name of pid 1, tid None"),
        ([{**COUNTER, "pid": 2}], "pid 2 has no name yet"),
        ([{**SLICE, "tid": 2}], "tid 2 of pid 1 has no name yet"),
        (
            [SLICE, {**SLICE, "ts": 15, "name": "b"}],
            "b at 15000 of (1, 1) ends after the slice that it begins in",
        ),
        ([BEGIN], "B of (1, 1) without E"),
        ([BEGIN, {**BEGIN, "ph": "E", "name": "b"}], "E b at 1 of (1, 1) ends nothing"),
        ([SPAN], "b of ('c', '1') without e"),
        ([{**SPAN, "ph": "e"}], "e a of ('c', '1') ends nothing"),
        ([SPAN, {**SPAN, "ph": "e", "ts": 0}], "e a of ('c', '1') goes back in time"),
        ([SPAN, {**SPAN, "ph": "e"}] * 2, "('c', '1') is used again"),
    ],
)
def test_each_rule_is_looked_at(events: list[dict[str, Any]], problem: str) -> None:
    assert problems({"traceEvents": NAMED + events}) == [problem]


def test_the_file_itself_is_looked_at() -> None:
    assert problems([]) == ["no object with traceEvents"]
    assert problems({"traceEvents": [], "displayTimeUnit": "s"}) == [
        "displayTimeUnit of the file is 's'"
    ]
