"""Ten thousand randomly damaged rank files: each is read, or refused in one line."""

import random
from pathlib import Path

import pytest

from omnicache_cli.errors import OmnicacheError
from omnicache_cli.trace.run import Run
from tests.unit.run_builder import two_rounds, write_manifest
from tests.unit.test_damaged_traces import VIEWS

CHUNKS, CHUNK = 10, 1_000
INSERTED = (b"9" * 30, b"-", b"[", b"null", b"\n", b"\0", b"1e9")


def damaged(content: bytes, chosen: random.Random) -> bytes:
    damage = bytearray(content)
    for _ in range(chosen.randint(1, 8)):
        place = chosen.randrange(len(damage))
        match chosen.randrange(4):
            case 0:
                damage[place] = chosen.randrange(256)
            case 1:
                del damage[place : place + chosen.randint(1, 40)]
            case 2:
                damage[place:place] = chosen.choice(INSERTED)
            case 3:
                damage[place:place] = damage[: chosen.randint(1, 400)]
    return bytes(damage)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_damage_never_ends_in_a_traceback(tmp_path: Path, chunk: int) -> None:
    folder = tmp_path / "run"
    (file,) = two_rounds().write(folder).glob("*.trace.jsonl")
    write_manifest(folder)
    content = file.read_bytes()
    refused = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        file.write_bytes(damaged(content, random.Random(seed)))
        for view in VIEWS.values():
            try:
                view(Run(folder))
            except OmnicacheError:
                refused += 1
    assert 0 < refused < CHUNK * len(VIEWS)  # some damage is harmless, most is not
