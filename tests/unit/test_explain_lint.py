"""`omnicache explain --lint`, and the prompts file of `explain --prompts`."""

from pathlib import Path

import pytest

from omnicache_cli.errors import BadInputError
from omnicache_cli.prefix.lint import FINDINGS, LintFacts, findings
from omnicache_cli.prefix.prompts import Adapter, MediaItem, read_asked
from tests.unit.pool_builder import PoolRecording
from tests.unit.run_builder import Admit, cache_group
from tests.unit.test_explain import Explain, explain

__all__ = ["explain"]


def facts(**changes: object) -> LintFacts:
    usual = {
        "enable_prefix_caching": True,
        "blocks": (("full", 16),),
        "unit": 16,
        "drops_unit": False,
        "retention_interval": 0,
        "prompt_tokens": (500,),
    }
    return LintFacts(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"enable_prefix_caching": False}, ["caching-off"]),
        ({"prompt_tokens": (16,)}, ["unit-longer-than-prompts"]),
        ({"prompt_tokens": (17,)}, []),
        (
            {"prompt_tokens": (32,), "drops_unit": True},
            ["unit-longer-than-prompts", "speculative-drop"],
        ),
        ({"prompt_tokens": (33,), "drops_unit": True}, ["speculative-drop"]),
        ({"prompt_tokens": ()}, []),
        (
            {"blocks": (("full", 128), ("state", 528)), "unit": 16896, "prompt_tokens": (20000,)},
            ["block-does-not-divide", "large-unit", "sparse-retention"],
        ),
        (
            {"blocks": (("full", 528), ("state", 528)), "unit": 528, "prompt_tokens": (5000,)},
            ["sparse-retention"],
        ),
        (
            {
                "blocks": (("full", 128), ("full", 4096), ("full", 32)),
                "unit": 4096,
                "prompt_tokens": (2048,),
            },
            ["unit-longer-than-prompts", "large-unit"],
        ),
        ({"blocks": (("full", 2144),), "unit": 2144, "prompt_tokens": (9000,)}, ["large-unit"]),
        ({"blocks": (("full", 16), ("window", 16)), "retention_interval": None}, []),
        ({"blocks": (("full", 16), ("window", 16))}, ["sparse-retention"]),
    ],
)
def test_findings(changes: dict[str, object], names: list[str]) -> None:
    found = list(findings(facts(**changes)))
    assert [one.name for one in found] == names
    assert set(names) <= FINDINGS.keys()
    assert all(one.fix for one in found)


def test_the_findings_of_a_run(tmp_path: Path, explain: Explain) -> None:
    recording = PoolRecording(
        [cache_group(block_size=4, is_eagle_group=True)], cache_hit_alignment_tokens=4
    )
    a = recording.arrive("a", 8, block_hashes=["a0", "a1"])
    recording.step({a: 8}, admit={a: Admit([[1, 2]])})
    recording.write(tmp_path / "run")

    ran = explain("run", "--lint")

    assert ran.lines == [
        "Prefix cache of run: 2 findings: the usual prompt is shorter than one unit",
        "prefix caching         on",
        "blocks                 full 4",
        "unit of a hit          4 tokens",
        "prompt tokens, median  8",
        "",
        "unit-longer-than-prompts",
        "the median prompt has 8 tokens, and a hit needs 9",
        "fix: a smaller block_size, or for a hybrid model prefix_match_unit below it",
        "",
        "speculative-drop",
        "speculative decoding drops the last matched unit: each hit is 4 tokens shorter, and "
        "prompts under 9",
        "tokens never hit",
        "fix: a smaller block_size; or leave out speculative_config where prompts repeat",
    ]
    assert (ran.code, ran.err) == (0, "")
    assert explain("run", "--lint", "--fail-on", "speculative-drop").code == 1
    assert explain("run", "--lint", "--fail-on", "large-unit").code == 0
    result = explain("run", "--lint", "--format", "json").json
    assert [one["finding"] for one in result["findings"]] == [
        "unit-longer-than-prompts",
        "speculative-drop",
    ]


# -- the prompts file -------------------------------------------------------------------------


def test_prompts_have_names_media_salts_and_adapters() -> None:
    lines = [
        b'{"prompt": "a", "lora": "x"}\n',
        b"\n",
        b'{"id": "b", "prompt_token_ids": [1, 2], "lora": {"name": "x", "path": "y"}, '
        b'"media": [{"hash": "h", "offset": 0, "length": 2, "modality": "audio"}], '
        b'"cache_salt": "s", "max_tokens": 3}\n',
    ]
    one, two = read_asked(lines, name="p")
    assert (one.name, one.text, one.adapter) == ("p0", "a", Adapter("x"))
    assert (two.name, two.token_ids, two.adapter) == ("b", [1, 2], Adapter("x", "y"))
    assert two.media == (MediaItem("h", 0, 2, "audio"),)
    assert (two.cache_salt, two.max_tokens) == ("s", 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "p:1: give exactly one of prompt and prompt_token_ids"),
        ('{"prompt": ""}', "p:1: the prompt is empty"),
        ('{"prompt_token_ids": [-1]}', "p:1: token id -1 is negative"),
        ('{"prompt": "a", "max_tokens": 0}', "p:1: max_tokens is 0; the least is 1"),
        ('{"prompt": "a", "arrival_step": -1}', "p:1: step -1 is negative; steps start at 0"),
        ('{"prompt": "a", "images": ["b.png"]}', "without an engine images go by hash: media"),
        (
            '{"prompt": "a", "media": [{"hash": "", "offset": 0, "length": 1}]}',
            "media from token 0",
        ),
        (
            '{"prompt_token_ids": [1], "media": [{"hash": "a", "offset": 0, "length": 2}]}',
            "p:1: media ends at token 2, and the prompt has 1",
        ),
        (
            '{"prompt": "a", "id": "x"}\n{"prompt": "a", "id": "x"}',
            "p:2: a line before it has the id",
        ),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, message: str) -> None:
    with pytest.raises(BadInputError) as error:
        list(read_asked(line.encode().splitlines(), name="p"))
    assert message in str(error.value)


def test_a_prompts_file_that_is_not_there_or_empty(tmp_path: Path, explain: Explain) -> None:
    ran = explain("--prompts", tmp_path / "none.jsonl")
    assert (ran.code, ran.out) == (3, "")
    assert "name a JSON-lines file" in ran.err
    (tmp_path / "empty.jsonl").write_text("\n")
    ran = explain("--prompts", tmp_path / "empty.jsonl")
    assert (ran.code, "holds no prompt" in ran.err) == (3, True)


@pytest.mark.parametrize("group", ["full", "full:0", "sliding:16", "mamba:16:2", "cross:16"])
def test_a_group_that_is_none(tmp_path: Path, explain: Explain, group: str) -> None:
    ran = explain("--prompts", tmp_path / "p.jsonl", "--group", group)
    assert (ran.code, ran.out) == (2, "")
    assert f"--group '{group}' is no KV cache group" in ran.err


def test_a_retention_interval_that_is_none(tmp_path: Path, explain: Explain) -> None:
    ran = explain("--prompts", tmp_path / "p.jsonl", "--retention-interval", "some")
    assert ran.code == 2
    assert "--retention-interval 'some': write a number of tokens, or null" in ran.err
