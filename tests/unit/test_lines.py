"""Lines of prompts that come from anywhere: a FIFO works, a line without an end is refused."""

import os
import threading
from pathlib import Path

import pytest

from omnicache_cli.cli.trace import read_workload
from omnicache_cli.errors import BadInputError
from omnicache_cli.trace import lines as lines_module


def test_a_line_without_an_end_is_refused_at_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_module.MAX_LINE_BYTES == 1 << 28
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1000)

    with pytest.raises(BadInputError) as caught:
        read_workload([], "/dev/zero")
    assert str(caught.value) == ("/dev/zero has a line of more than 1,000 bytes; name JSON lines")


def test_prompts_come_through_a_fifo(tmp_path: Path) -> None:
    fifo = tmp_path / "prompts"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_text, args=('{"prompt": "a"}\n{"prompt": "b"}',))
    writer.start()
    found = read_workload([], str(fifo))
    writer.join()

    assert [one.text for one in found] == ["a", "b"]
