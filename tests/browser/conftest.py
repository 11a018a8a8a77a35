"""A real browser, and pages that `omnicache show` wrote."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.browser.browser import VARIABLE
from tests.unit.run_builder import Admit, Recording

HOSTILE_IDS = [
    "<script>window.ran = 1</script>",
    '"onload="window.ran = 1" x="',
    "'><img src=x onerror=window.ran=1>",
    "</td></tr></table></style><style>*{display:none}</style>",
    "\u202eevil\u2066",
    "a\x00b\x1b[31m",
    "x" * 10_000,
    "日本",
]
"""Request ids. Together they cover markup, attributes, style, hidden characters and length."""

NUM_STEPS = 1240


@dataclass
class Opened:
    """A page in the browser, and what it did that it should not have done."""

    page: Page
    url: str
    console: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    def is_quiet(self) -> bool:
        """Nothing on the console, and nothing requested but the page itself."""
        return not self.console and self.requested == [self.url]


Open = Callable[..., Opened]
Show = Callable[..., Path]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.exit(f"{VARIABLE} names no browser; run: make test-browser", returncode=1)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a file, by default as a user's browser does; `options` are those of a context."""
    contexts: list[BrowserContext] = []

    def open_file(path: Path, *, width: int = 1280, fragment: str = "", **options: Any) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        opened = Opened(context.new_page(), path.as_uri())
        opened.page.on("console", lambda message: opened.console.append(message.text))
        opened.page.on("pageerror", lambda error: opened.console.append(str(error)))
        opened.page.on("request", lambda request: opened.requested.append(request.url))
        opened.page.goto(f"{opened.url}#{fragment}" if fragment else opened.url)
        return opened

    yield open_file
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def show(tmp_path_factory: pytest.TempPathFactory) -> Show:
    """Writes `omnicache show RUN OPTIONS` as a file of this suffix, each once; its path."""
    folder = tmp_path_factory.mktemp("pages")
    written: dict[tuple[str, ...], Path] = {}

    def run(run_folder: Path, *options: str, suffix: str = ".html") -> Path:
        key = (str(run_folder), *options, suffix)
        if key not in written:
            path = folder / f"{len(written)}{suffix}"
            command = [sys.executable, "-m", "omnicache_cli.cli", "show", *key[:-1]]
            ran = subprocess.run([*command, "-o", path], capture_output=True, text=True)
            assert ran.returncode in {0, 1}, ran.stderr
            written[key] = path
        return written[key]

    return run


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One request per hostile id, all in step 0."""
    recording = Recording(num_blocks=128)
    numbers = [recording.arrive(one, 40) for one in HOSTILE_IDS]
    recording.step(
        dict.fromkeys(numbers, 40),
        admit={one: Admit([[3 * one + 1, 3 * one + 2, 3 * one + 3]]) for one in numbers},
    )
    recording.step(dict.fromkeys(numbers, 1))
    for number in numbers:
        recording.finish(number)
    return recording.write(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture(scope="session")
def broken_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose slots of step 1 are not where the block table says."""
    recording = Recording()
    number = recording.arrive("r", 40)
    recording.step({number: 40}, admit={number: Admit([[1, 2, 3]])})
    recording.step({number: 1})
    recording.change_group(1, slot_mapping=[16, 1])
    return recording.write(tmp_path_factory.mktemp("broken") / "run")


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NUM_STEPS steps, each with a request of its own."""
    recording = Recording()
    for step in range(NUM_STEPS):
        number = recording.arrive(f"r{step}", 8)
        recording.step({number: 8}, admit={number: Admit([[1 + step % 40]])})
        recording.finish(number)
    return recording.write(tmp_path_factory.mktemp("long") / "run")


def result_of(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    return result
