"""docs/why-did-it-miss.md: every command gives what stands there, and every reason is there.

Commands about recorded runs are checked where those runs are made, in test_examples.py.
"""

import re
import shlex
from pathlib import Path

import pytest

from omnicache_cli.prefix.reasons import REASONS
from tests.engine.test_trace_command import omnicache

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "why-did-it-miss.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n\$ (omnicache explain .+)\n((?:.*\n)*?)```", PAGE)
NOT_SHOWN = {"embeds-differ", "unknown"}


def shown(run: str) -> list[tuple[str, str]]:
    """Commands of the page about this run, and their outputs."""
    return [(command, output) for command, output in BLOCKS if f" {run} " in command]


WITHOUT_A_RUN = [one for one in BLOCKS if " --prompts " in one[0]]


@pytest.mark.parametrize(("command", "output"), WITHOUT_A_RUN, ids=lambda one: one[:80])
def test_a_command_of_the_page(
    command: str,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    assert omnicache(*shlex.split(command)[1:], "--quiet") == 0
    assert capsys.readouterr().out.endswith(output)  # vLLM may log before it


def test_the_page_has_each_reason_and_shows_it() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", PAGE, re.MULTILINE))
    assert rows == REASONS
    named = {
        name
        for _, output in BLOCKS
        for name in re.findall(r"^reason +([a-z-]+)$", output, re.MULTILINE)
    }
    assert named == REASONS.keys() - NOT_SHOWN


def test_every_command_is_checked_somewhere() -> None:
    examples = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for command, _ in BLOCKS:
        about = command.split()[2]
        assert " --prompts " in command or f"-o {about}`" in examples or f"-o {about} " in examples
