"""The prompts file: what is read, and what is refused with its line."""

from pathlib import Path

import pytest

from omnicache_cli.errors import BadInputError
from omnicache_cli.trace.manifest import parse_request_name, request_name
from omnicache_cli.trace.workload import Lora, Prompt, read_prompts


def read(text: str, folder: Path = Path()) -> list[Prompt]:
    return list(read_prompts(text.encode().splitlines(keepends=True), name="p", folder=folder))


def test_every_field_of_a_line_reaches_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "b.wav").touch()
    (tmp_path / "adapter").mkdir()
    line = (
        '{"prompt": "hello", "images": ["a.png"], "audio": ["b.wav"], "cache_salt": "s", '
        '"lora": {"path": "adapter", "name": "x"}, "max_tokens": 3, "arrival_step": 7}'
    )
    assert read(f"{line}\n\n  \n" + '{"prompt_token_ids": [0, 5]}', tmp_path) == [
        Prompt(
            "hello",
            None,
            (tmp_path / "a.png",),
            (tmp_path / "b.wav",),
            "s",
            Lora(str(tmp_path / "adapter"), "x"),
            3,
            7,
        ),
        Prompt(None, [0, 5]),
    ]


def test_an_adapter_without_a_name_is_called_like_its_folder_or_hub_id(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "sql").mkdir(parents=True)
    line = '{"prompt": "x", "lora": "adapters/sql"}'
    assert read(line, tmp_path)[0].lora == Lora(str(tmp_path / "adapters" / "sql"), "sql")
    assert read(line)[0].lora == Lora("adapters/sql", "sql")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"^p:2: not a prompt \(JSON is malformed"),
        ("[1]", r"^p:2: not a prompt \(Expected `object`, got `array`"),
        ('{"promt": "x"}', r"^p:2: not a prompt \(Object contains unknown field `promt`"),
        ('{"prompt": 5}', r"^p:2: not a prompt \(Expected `str \| null`, got `int`"),
        ("{}", r"^p:2: give exactly one of prompt and prompt_token_ids$"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', r"^p:2: give exactly one"),
        ('{"prompt": ""}', r"^p:2: the prompt is empty"),
        ('{"prompt_token_ids": []}', r"^p:2: the prompt is empty"),
        ('{"prompt_token_ids": [3, -1]}', r"^p:2: token id -1 is negative"),
        ('{"prompt": "x", "max_tokens": 0}', r"^p:2: max_tokens is 0; the least is 1"),
        ('{"prompt": "x", "arrival_step": -1}', r"^p:2: arrival_step is -1; steps start at 0"),
        ('{"prompt": "x", "images": ["none.png"]}', r"^p:2: no image file none.png; paths are"),
        ('{"prompt": "x", "audio": ["none.wav"]}', r"^p:2: no audio file none.wav; paths are"),
        ('{"prompt": "x", "lora": "none"}', r"^p:2: no LoRA folder none; paths are relative"),
        ('{"prompt": "x", "lora": "a/b/c"}', r"^p:2: no LoRA folder a/b/c; paths are relative"),
        ("[" * 100_000, r"^p:2: not a prompt"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        read('{"prompt": "fine"}\n' + line)


def test_bytes_that_are_not_utf8_are_refused_with_the_line() -> None:
    with pytest.raises(BadInputError, match=r"^p:1: not a prompt"):
        list(read_prompts([b'{"prompt": "\xff"}\n'], name="p", folder=Path()))


@pytest.mark.parametrize(("rounds", "name"), [(1, "p3"), (2, "p3-r1"), (12, "p3-r1")])
def test_a_request_name_says_prompt_and_round(rounds: int, name: str) -> None:
    assert request_name(3, 0, rounds) == name
    assert parse_request_name(name, rounds) == (3, 0)


@pytest.mark.parametrize("name", ["chatcmpl-1", "p", "px-r1", "p3-r", "p3-rx", "p3"])
def test_an_id_from_elsewhere_is_no_request_name(name: str) -> None:
    assert parse_request_name(name, 2) is None
