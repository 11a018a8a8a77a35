"""The published schemas and docs/trace-format.md follow the code."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import jsonschema
import msgspec
import pytest

from omnicache_cli.trace import records
from omnicache_cli.trace.manifest import MANIFEST_NAME, Manifest
from omnicache_cli.trace.records import (
    BatchDescriptor,
    Cached,
    CachedPartial,
    CacheReset,
    Evicted,
    Gap,
    Hashed,
    HashesMoved,
    MultiModalSpan,
    RankStep,
    WrongHash,
)
from tests.unit.run_builder import Admit, Recording, cache_group, two_rounds, write_manifest

DOCS = Path(__file__).parents[2] / "docs"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()
TRACE_SCHEMA = json.loads((DOCS / "trace.schema.json").read_text(encoding="utf-8"))
RUN_SCHEMA = json.loads((DOCS / "run.schema.json").read_text(encoding="utf-8"))
a_line = jsonschema.Draft202012Validator(TRACE_SCHEMA)
a_manifest = jsonschema.Draft202012Validator(RUN_SCHEMA)
TAGS = {one.__struct_config__.tag: one.__name__ for one in get_args(records.AnyRecord)}
"""Type of a record -> its name in the schema."""


def eventful() -> Recording:
    """Every kind of record and event, two groups, two ranks, optional fields filled in."""
    spans = [MultiModalSpan("image", 1, 32, "00ff")]
    recording = Recording(
        (cache_group(), cache_group(spec="SlidingWindowSpec", sliding_window=64)), ranks=2
    )
    first = recording.arrive(
        "p0",
        40,
        block_hashes=["00" * 8],
        extra_keys=[(0, ["mm:00ff@1", "salt:0123456789abcdef"])],
        multimodal=spans,
        lora_name="adapter",
        lora_id=1,
        cache_salt="0123456789abcdef",
        token_ids=[1, 2, 3],
    )
    recording.step(
        {first: 40},
        admit={first: Admit([[1, 2, 3], [4, 5, 6]])},
        padding=3,
        descriptor=BatchDescriptor(64, 1, uniform=True),
        cudagraph_mode="PIECEWISE",
    )
    recording.step({first: 1}, events=recording.preempt(first))
    recording.records.append(Gap(2))
    recording.records.append(RankStep(9, 1, 0, 1, 2, None, "00" * 8))
    recording.after(
        Hashed(first, 2, ["00" * 8]),
        Cached(first, 1, [0, 2], [4, 2]),
        CachedPartial(first, 0, 3, 40),
        WrongHash(first, 0, 3, 2, "11" * 8, "22" * 8),
        Evicted(1, 0, "00" * 8, first, records.NO_REQUEST),
        HashesMoved(2, 7),
        CacheReset(successful=True),
    )
    recording.finish(first)
    return recording


def lines_of(recording: Recording, folder: Path) -> list[dict[str, Any]]:
    (path,) = recording.write(folder).glob("*.jsonl")
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def structs_of_a_line() -> list[type[msgspec.Struct]]:
    """Every record, and every struct inside one."""
    defined = (value for value in vars(records).values() if isinstance(value, type))
    return [
        one
        for one in defined
        if issubclass(one, msgspec.Struct) and one not in (records.Record, records.Event)
    ]


def test_the_schemas_on_disk_are_those_of_the_code() -> None:
    assert generator.trace_schema() == TRACE_SCHEMA
    assert generator.run_schema() == RUN_SCHEMA


def test_every_generated_part_of_the_docs_is_up_to_date() -> None:
    pytest.importorskip("numpy", reason="the hooks run beside vLLM, which brings numpy")
    assert generator.main(["--check"]) == 0


@pytest.mark.parametrize("schema", [TRACE_SCHEMA, RUN_SCHEMA])
def test_the_schemas_are_sound(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("make", [two_rounds, eventful])
def test_every_line_of_a_run_follows_the_schema(make: Any, tmp_path: Path) -> None:
    for line in lines_of(make(), tmp_path / "run"):
        a_line.validate(line)


def test_the_eventful_run_has_every_record_and_every_event(tmp_path: Path) -> None:
    lines = lines_of(eventful(), tmp_path / "run")
    events = {one.__struct_config__.tag for one in get_args(records.AnyEvent)}
    assert {line["type"] for line in lines} == set(TAGS)
    assert {event[0] for line in lines for event in line.get("events", [])} == events


DAMAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "another type": ("header", {"type": "footer"}),
    "a word for a number": ("schedule", {"step": "first"}),
    "a fraction of a token": ("schedule", {"num_scheduled_tokens": [1.5]}),
    "an event that does not exist": ("after", {"events": [["explode", 1]]}),
    "an event that is too short": ("after", {"events": [["free", 1]]}),
    "half a block table change": ("forward", {"groups": [{"block_table": [[0, 0]]}]}),
    "a null where one must be": ("end", {"dropped": None}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_line_does_not_follow_the_schema(name: str, tmp_path: Path) -> None:
    kind, change = DAMAGE[name]
    line = next(one for one in lines_of(eventful(), tmp_path / "run") if one["type"] == kind)
    assert a_line.is_valid(line)
    assert not a_line.is_valid(line | change)


def test_a_line_that_lacks_a_field_does_not_follow_the_schema(tmp_path: Path) -> None:
    for line in lines_of(two_rounds(), tmp_path / "run"):
        for required in TRACE_SCHEMA["$defs"][TAGS[line["type"]]]["required"]:
            assert not a_line.is_valid({k: v for k, v in line.items() if k != required}), required


def test_a_manifest_follows_its_schema(tmp_path: Path) -> None:
    write_manifest(tmp_path, engine_args={"block_size": 32}, error="EngineFailedError")
    manifest = json.loads((tmp_path / MANIFEST_NAME).read_bytes())
    a_manifest.validate(manifest)
    assert not a_manifest.is_valid(manifest | {"num_rounds": "two"})


def test_check_names_a_file_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "docs" / "run.schema.json"
    stale.parent.mkdir()
    stale.write_text("{}\n")
    monkeypatch.setattr(generator, "DOCS", stale.parent)
    monkeypatch.setattr(generator, "generated", lambda: {stale: "{ }\n"})

    assert generator.main(["--check"]) == 1
    assert capsys.readouterr().err == "docs/run.schema.json differs from the code; run: make docs\n"
    assert stale.read_text() == "{}\n"

    assert generator.main([]) == 0
    assert stale.read_text() == "{ }\n"
    assert generator.main(["--check"]) == 0


@pytest.mark.parametrize("struct", [*structs_of_a_line(), Manifest], ids=lambda one: one.__name__)
def test_every_field_is_explained(struct: type[msgspec.Struct]) -> None:
    text = (DOCS / "trace-format.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)`", text)) | set(re.findall(r"\[([\w, ]+)\]", text))
    words = {word for one in explained for word in one.split(", ")}
    missing = [name for name in struct.__struct_fields__ if name not in words]
    assert missing == []
    tag = struct.__struct_config__.tag
    assert tag is None or tag in words


def examples_of(text: str) -> list[dict[str, Any]]:
    """Every JSON object of a page's json blocks: one a line, or one over many lines."""
    found = []
    for block in re.findall(r"^```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        pieces = block.splitlines() if block.startswith('{"') else [block]
        found += [json.loads(piece) for piece in pieces]
    return found


def test_the_examples_in_the_docs_follow_the_schemas() -> None:
    examples = examples_of((DOCS / "trace-format.md").read_text(encoding="utf-8"))
    lines = [one for one in examples if "type" in one]
    assert {one["type"] for one in lines} == set(TAGS)
    for line in lines:
        a_line.validate(line)
    (manifest,) = [one for one in examples if "type" not in one]
    a_manifest.validate(manifest)


def test_the_example_workload_in_the_docs_is_the_one_in_the_examples_folder() -> None:
    shown = examples_of((DOCS / "trace.md").read_text(encoding="utf-8"))
    example = (DOCS.parent / "examples" / "prompts.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in example.splitlines()] == shown[:-1]
