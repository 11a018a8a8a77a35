"""The ring in which the ranks of one stage compare digests."""

import os
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the probe runs beside vLLM, which brings numpy")

from omnicache_cli.engine.probe.digest_board import DigestBoard, DigestReader

DIGEST = "0123456789abcdef"


def test_a_reader_finds_a_published_step_and_no_other(tmp_path: Path) -> None:
    reader = DigestReader(tmp_path, "host.1.0", 0)
    assert reader.digest_of(0) is None  # no board yet
    board = DigestBoard(tmp_path, "host.1.0", 0)
    assert reader.digest_of(0) is None
    board.publish(0, DIGEST)
    board.publish(1, "ff" * 8)
    assert [reader.digest_of(step) for step in (0, 1, 2)] == [DIGEST, "ff" * 8, None]
    assert DigestReader(tmp_path, "host.1.0", 1).digest_of(0) is None  # another stage
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_ring_keeps_256_steps(tmp_path: Path) -> None:
    board, reader = DigestBoard(tmp_path, "e", 0), DigestReader(tmp_path, "e", 0)
    for step in range(300):
        board.publish(step, f"{step:016x}")
    found = [step for step in range(310) if reader.digest_of(step) is not None]
    assert found == list(range(44, 300))
    assert (next(tmp_path.iterdir())).stat().st_size == 16 + 256 * 16


def test_a_reader_outlives_the_board(tmp_path: Path) -> None:
    board, reader = DigestBoard(tmp_path, "e", 0), DigestReader(tmp_path, "e", 0)
    board.publish(7, DIGEST)
    assert reader.digest_of(7) == DIGEST
    board.close()
    assert list(tmp_path.iterdir()) == []
    assert reader.digest_of(7) == DIGEST
    reader.close()
    assert reader.digest_of(7) is None


def test_a_board_that_was_cut_short_says_nothing(tmp_path: Path) -> None:
    board, reader = DigestBoard(tmp_path, "e", 0), DigestReader(tmp_path, "e", 0)
    board.publish(3, DIGEST)
    os.truncate(next(tmp_path.iterdir()), 20)
    assert reader.digest_of(3) is None
