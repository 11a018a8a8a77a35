"""What a viewer of timelines makes of an export: every process and thread, and their slices.

The viewer is speedscope, in a real browser. It reads the duration events of the Trace Event Format
and warns on the console about whatever does not nest.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.profile.manifest import (
    ProfileManifest,
    SampledProcess,
    write_profile_manifest,
)
from tests.browser.browser import NoBrowserError
from tests.browser.conftest import Open
from tests.browser.speedscope import find_or_fetch

RECORDED = Path(__file__).parents[1] / "data" / "runs"

EXPECTED_TALK = ("speedscope v", "WebGL initialized", "Importing as Trace Event Format profile")
"""What it says of itself; `import: N ms` too, and the browser's own words about its graphics."""


@pytest.fixture(scope="session")
def viewer() -> Path:
    try:
        return find_or_fetch()
    except NoBrowserError as error:
        pytest.fail(str(error))


@dataclass
class Track:
    """One thread of a timeline, as the viewer names it, and the names of its slices."""

    name: str
    slices: set[str]


Load = Callable[[Path], tuple[list[Track], list[str]]]


@pytest.fixture
def load(open_page: Open, viewer: Path, tmp_path: Path) -> Load:
    """Export a run and open it: its tracks, and what is on the console that should not be."""

    def load(run: Path) -> tuple[list[Track], list[str]]:
        exported = tmp_path / "run.json"
        command = [sys.executable, "-m", "omnicache_cli.cli", "export", str(run)]
        subprocess.run([*command, "--to", "perfetto", "-o", str(exported)], check=True)
        content = base64.b64encode(exported.read_bytes()).decode()
        script = tmp_path / "load.js"  # as speedscope's own command does it
        script.write_text(f"speedscope.loadFileFromBase64('run.json', {json.dumps(content)})")
        opened = open_page(viewer, fragment=f"localProfilePath={script}&view=sandwich")
        page = opened.page
        page.set_viewport_size({"width": 1280, "height": 4000})  # it draws the rows in sight only
        page.get_by_text("Symbol Name").wait_for()
        count = int(page.locator("body").inner_text().split("(1/")[1].split(")")[0])
        tracks = []
        for number in range(1, count + 1):
            page.get_by_text(f"({number}/{count})").wait_for()
            lines = page.locator("body").inner_text().splitlines()
            title = next(line for line in lines if line.endswith(f"({number}/{count})"))
            rows = page.locator("tr", has=page.locator("td")).filter(has_text="%)")
            names = {row.split("\t")[-1].strip() for row in rows.all_inner_texts()}
            tracks.append(Track(title.removesuffix(f" ({number}/{count})"), names))
            page.keyboard.press("n")  # the next one
        talk = [line for line in opened.console if not _is_expected(line)]
        return tracks, talk

    return load


def _is_expected(line: str) -> bool:
    return line.startswith((*EXPECTED_TALK, "import:", "[.WebGL"))


def plain(names: set[str]) -> set[str]:
    """Without arguments: the viewer puts them behind the name."""
    return {name.partition(" {")[0] for name in names}


def test_every_process_and_thread_of_a_run_is_there_with_its_slices(load: Load) -> None:
    tracks, talk = load(RECORDED / "two-ranks")
    assert talk == []
    assert [one.name for one in tracks] == [
        "EngineCore (host, pid 20493) (pid 20493), scheduler host.20493.0 (tid 1)",
        "VllmWorker-0 (host, pid 20678) (pid 20678), "
        "model runner, rank 0 of host.20493.0 on cpu (tid 1)",
        "VllmWorker-1 (host, pid 20679) (pid 20679), "
        "model runner, rank 1 of host.20493.0 on cpu (tid 1)",
    ]
    scheduler, first, second = tracks
    assert plain(scheduler.slices) == {"schedule", "lookup", "allocate", "output"}
    assert plain(first.slices) == {"execute_model", "prepare", "forward", "sample"}
    assert plain(second.slices) == {"execute_model", "prepare", "forward", "sample"}
    steps = {_arguments(name)["step"] for name in first.slices if name.startswith("execute")}
    assert steps == set(range(40))
    hits = [_arguments(name).get("hit_tokens") for name in scheduler.slices if "admitted" in name]
    assert sorted(hits) == [0, 0, 32, 128, 128]


def _arguments(name: str) -> Any:
    return json.loads(name[name.index("{") :])


def test_samples_of_the_same_run_stand_beside_it(load: Load, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for path in (RECORDED / "preemption").iterdir():
        (run / path.name).write_bytes(path.read_bytes())
    header = json.loads(next(run.glob("*.jsonl")).read_text().partition("\n")[0])
    frames = [
        {
            "ph": ph,
            "name": name,
            "pid": header["pid"],
            "tid": 140_000,
            "ts": ts,
            "args": {"line": 1},
        }
        for ph, name, ts in [
            ("B", "run_busy_loop", 0),
            ("B", "step", 0),
            ("E", "step", 9_000),
            ("B", "shutdown", 9_000),
            ("E", "shutdown", 10_000),
            ("E", "run_busy_loop", 10_000),
        ]
    ]
    (run / "trace.json").write_text(json.dumps(frames))
    process = SampledProcess(
        header["pid"], header["host"], "engine core", "python", 2, header["started_unix_ns"], 0,
        10**9, {"chrometrace": "trace.json"},
    )  # fmt: skip
    write_profile_manifest(
        run, ProfileManifest(1, "0.1.0", "0.4.3", 100, False, False, False, [process])
    )
    tracks, talk = load(run)
    assert talk == []
    assert len(tracks) == 3
    (samples,) = (one for one in tracks if "py-spy: thread 140000" in one.name)
    assert samples.name.startswith(f"MainProcess (host, pid {header['pid']})")
    assert plain(samples.slices) == {"run_busy_loop", "step", "shutdown"}
