"""Records the reports of real runs, and draws the pictures of docs/gallery.md from them.

    python docs/gallery.py record    runs every command below on a real engine (some minutes)
    python docs/gallery.py draw      opens each report in a browser, and takes its picture

`make gallery` does both: recording wants the engine's environment, drawing that of the browser
tests. What is recorded, docs/gallery/*.json, is what the browser tests open; so the pages that they
judge are made of real runs, and drawn anew by the code of today.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnicache_cli.report.model import Facts, Lines, Mark, Picture, Report, Section, Table

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "gallery"
CONFIG = ROOT / "tests" / "data" / "kv-size" / "configs"

RECORD_TO = "OMNICACHE_GALLERY_RECORD"
PLANT = "OMNICACHE_GALLERY_PLANT"

WIDTH, MAX_HEIGHT = 900, 480
"""Pixels of a picture."""

MAX_PICTURE_BYTES = 80_000
MAX_ALL_BYTES = 600_000

SERVER = "http://localhost:8000"
"""For which a page says what tests/data/monitor recorded of a server, before requests and after."""

PREPARE = (
    "tiny-model text tiny --quiet",
    "trace tiny --prompts {root}/examples/eviction.jsonl --block-size 32 --max-model-len 160 "
    "--num-gpu-blocks-override 7 --max-tokens 8 --enforce-eager -o run-eviction --quiet",
)


@dataclass(frozen=True, slots=True)
class Page:
    """One report: its name, the command line that makes it, and what it shows."""

    name: str
    command: str
    caption: str
    plant: str = ""  # a fault of verify's self-test that is put into the engine
    codes: tuple[int, ...] = (0,)
    is_pictured: bool = True
    scheme: str = "light"
    at: str = ""  # the section that the picture begins with
    into: str = "-o"  # the option that names the page


PAGES = (
    Page(
        "trace",
        'trace tiny --prompt "$(head -c 997 {root}/LICENSE)" --rounds 2 --max-tokens 40 '
        "--block-size 32 --max-model-len 2048 --enforce-eager -o run --format html",
        "What `trace` ends with: totals, and the time of each phase",
        is_pictured=False,
    ),
    Page(
        "show-steps",
        "show run --format html",
        "The steps of a run",
    ),
    Page(
        "show-step",
        "show run --step 40 --format html",
        "One step as vLLM sees it",
        scheme="dark",
    ),
    Page(
        "show-phases",
        "show run --phases --format html",
        "Where the time of the steps goes, and what was special about the slowest",
        is_pictured=False,
    ),
    Page(
        "show-blocks",
        "show run-eviction --blocks --format html",
        "Who owned which block when, and how full the pool was",
        at="blocks-of-the-pool-by-step",
    ),
    Page(
        "show-check",
        "show run --check --format html",
        "The invariants of every step",
        is_pictured=False,
    ),
    Page("explain", "explain run-eviction --format html", "Why each prefix hit ended where it did"),
    Page(
        "explain-request",
        'explain run-eviction --request "#3" --format html',
        "The evidence for one request: who had the block, and who evicted it",
        is_pictured=False,
    ),
    Page(
        "verify",
        "verify tiny --scenario repeat --scenario one-token --block-size 32 --max-model-len 1024 "
        "--format html",
        "A tensor prefix cache that gives back what a run without a cache computes",
        is_pictured=False,
    ),
    Page(
        "verify-planted",
        "verify tiny --scenario repeat --layers 1 --block-size 32 --max-model-len 1024 "
        "--format html",
        "A planted fault: the cache gives back the first two blocks swapped",
        plant="swapped-blocks",
        at="corruption",
        codes=(1,),
    ),
    Page(
        "verify-self-test",
        "verify tiny --self-test --cache builtin --dtype bfloat16 --block-size 32 "
        "--max-model-len 1024 --format html",
        "Faults that are planted one at a time, and what `verify` calls them",
        at="faults",
    ),
    Page(
        "kv-size",
        "kv-size {config}/gemma-3-27b --available-kv-memory 40GiB --max-model-len 32768 "
        "--max-num-batched-tokens 8192 --format html",
        "The KV cache of a model, counted as vLLM counts it, from its config.json",
    ),
    Page(
        "simulate",
        "simulate run-eviction --blocks 5,6,7,8,9,10,12 --bound --format html",
        "The same requests in pools of other sizes, and what the best eviction order could hit",
        scheme="dark",
        at="pool-sizes",
    ),
    Page(
        "profile",
        "profile tiny --prompts {root}/examples/prompts.jsonl --rounds 20 --block-size 32 "
        "--max-model-len 1024 --enforce-eager -o run-profile --format html",
        "The functions and the phases in which an engine spends its time",
        at="hottest-functions-in-process-engine",
        into="--report",
    ),
    Page(
        "monitor",
        f"monitor {SERVER} --once --format html",
        "The cache of a running server, and what may be wrong with it",
        at="percentiles",
        codes=(1,),
    ),
    Page("tiny-model", "tiny-model --format html", "The kinds of tiny model", is_pictured=False),
    Page(
        "doctor",
        "doctor --format html",
        "What works on a machine, and the lines that mend the rest",
    ),
)

KINDS: dict[str, type[Section]] = {one.__name__: one for one in (Table, Facts, Lines, Picture)}


# -- recording --------------------------------------------------------------------------------


def record() -> None:
    """Run everything in a folder of its own, and keep each report."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for command in PREPARE:
            _run(command, folder, {}, (0,))
        for page in PAGES:
            print(page.command, file=sys.stderr)
            path = FOLDER / f"{page.name}.json"
            variables = {RECORD_TO: str(path), PLANT: page.plant}
            _run(page.command, folder, variables, page.codes)
            text = path.read_text(encoding="ascii")
            for private, shown in ((str(ROOT), "."), (folder, "."), (platform.node(), "host")):
                text = text.replace(private, shown)
            path.write_text(re.sub(r"http://127\.0\.0\.1:\d+", SERVER, text), encoding="ascii")


def _run(command: str, folder: str, variables: dict[str, str], codes: Sequence[int]) -> None:
    shell = f"{shlex.quote(sys.executable)} {shlex.quote(__file__)} run {command}"
    ran = subprocess.run(
        ["bash", "-c", shell.format(root=ROOT, config=CONFIG)],
        check=False,
        cwd=folder,
        env={**os.environ, "VLLM_PLUGINS": "omnicache_cli", "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.DEVNULL,
    )
    if ran.returncode not in codes:
        raise SystemExit(f"exit code {ran.returncode}: {command}")


def run(arguments: Sequence[str]) -> int:
    """One command line of omnicache in this process, whose report is kept as well."""
    from omnicache_cli.cli.main import exit_code_of_run
    from omnicache_cli.report import formats

    as_html = formats.FORMATS["html"]

    def keeping(report: Report) -> str:
        Path(os.environ[RECORD_TO]).write_text(dump(report), encoding="ascii")
        return as_html(report)

    if os.environ.get(RECORD_TO):
        formats.FORMATS["html"] = keeping
    if plant := os.environ.get(PLANT):
        _plant(plant)
    if SERVER not in arguments:
        sys.argv = ["omnicache", *arguments]
        return exit_code_of_run()
    with _recorded_server() as url:
        sys.argv = ["omnicache", *(url if one == SERVER else one for one in arguments)]
        return exit_code_of_run()


@contextmanager
def _recorded_server() -> Iterator[str]:
    from tests.unit.metrics_server import AFTER, IDLE, page, serving

    with serving(page(IDLE), page(AFTER)) as server:
        yield server.url


def _plant(name: str) -> None:
    """Every cache that `verify` makes is damaged by this fault of its self-test."""
    from omnicache_cli.engine.verify import session
    from omnicache_cli.engine.verify.plants import FAULTS, Damage
    from omnicache_cli.engine.verify.points import points_of

    class Planted(session.EngineSession):
        def _open(self, *given: Any) -> None:
            super()._open(*given)
            FAULTS[name](Damage(self, points_of))

    session.EngineSession = Planted  # type: ignore[misc]


def dump(report: Report) -> str:
    sections = [{"kind": type(one).__name__, **asdict(one)} for one in report.sections]
    told = {
        "command": report.command,
        "title": report.title,
        "vllm_version": report.vllm_version,
        "sections": sections,
    }
    return json.dumps(told, separators=(",", ":")) + "\n"


def load(path: Path) -> Report:
    """A report as it was recorded, without what only JSON shows."""
    told = json.loads(path.read_text(encoding="ascii"))
    sections = tuple(_section(one) for one in told["sections"])
    return Report(told["command"], told["title"], {}, sections, told["vllm_version"])


def _section(told: dict[str, Any]) -> Section:
    values = {name: _tuples(value) for name, value in told.items() if name != "kind"}
    if told["kind"] == "Picture":
        values["marks"] = tuple(Mark(**one) for one in told["marks"])
    if told["kind"] == "Facts":
        values["items"] = told["items"]
    return KINDS[told["kind"]](**values)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# -- drawing ----------------------------------------------------------------------------------


def draw() -> None:
    """A picture of a part of each page, as a browser shows it."""
    from playwright.sync_api import sync_playwright

    from omnicache_cli.report.html import as_html
    from tests.browser.browser import find_or_fetch

    program = find_or_fetch()  # which drives it itself, to see that it works
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        for page in (one for one in PAGES if one.is_pictured):
            path = Path(folder) / f"{page.name}.html"
            path.write_text(as_html(load(FOLDER / f"{page.name}.json")), encoding="ascii")
            opened = browser.new_page(
                viewport={"width": WIDTH, "height": 100}, color_scheme=page.scheme
            )
            opened.goto(path.as_uri())
            height = opened.evaluate("document.documentElement.scrollHeight")
            opened.set_viewport_size({"width": WIDTH, "height": min(height, MAX_HEIGHT)})
            if page.at:
                opened.evaluate(f"document.getElementById({page.at!r}).scrollIntoView()")
            opened.screenshot(path=FOLDER / f"{page.name}.png")
            opened.close()
        browser.close()


def main() -> int:
    match sys.argv[1:]:
        case ["record"]:
            record()
        case ["draw"]:
            sys.path.insert(0, str(ROOT))
            draw()
        case ["run", *arguments]:
            return run(arguments)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
