"""The view of a run while it is written: `omnicache show --follow` and `omnicache trace --live`."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import msgspec
import pytest

from omnicache_cli.engine.plugin import ENVIRONMENT_VARIABLE
from omnicache_cli.errors import BadTraceError
from omnicache_cli.live import tail as tail_module
from omnicache_cli.live.follow import check_followed, follow
from omnicache_cli.live.screen import LineScreen
from omnicache_cli.live.tail import FolderTail
from omnicache_cli.live.totals import EngineTotals, RunTotals
from omnicache_cli.trace.files import SUFFIX
from omnicache_cli.trace.records import (
    AfterStep,
    AnyRecord,
    CacheReset,
    Finished,
    Gap,
    RequestRecord,
    SchedulerStep,
)
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import summarize
from tests.unit.run_builder import (
    Admit,
    Recording,
    header,
    two_rounds,
    write_manifest,
)
from tests.unit.showing import Ran, Show

RECORDED = Path(__file__).parents[1] / "data" / "runs"
OMNICACHE = [sys.executable, "-m", "omnicache_cli.cli"]

LAST = {
    "preemption": "step 77, steps/s 249.3, tokens/s 453.2, run 0, wait 0, done 4/4, hit % 47.1, "
    "pool % 0.0, evict 2, preempt 2",
    "two-ranks": "step 39, steps/s 8.3, tokens/s 56.9, run 0, wait 0, done 5/5, hit % 44.3, "
    "pool % 0.0, evict 6, preempt 0",
}


class Writing:
    """A run that grows: `wait` of `follow` appends the next piece, and then ends it."""

    def __init__(self, source: Path, folder: Path, pieces: int) -> None:
        self.folder = folder
        self.now = 0.0
        folder.mkdir()
        self._rest = {path.name: path.read_bytes() for path in sorted(source.glob(f"*{SUFFIX}"))}
        self._size = max(map(len, self._rest.values())) // pieces + 1

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name, content in self._rest.items():
            if content:
                with (self.folder / name).open("ab") as stream:
                    stream.write(content[: self._size])
                self._rest[name] = content[self._size :]

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("name", ["preemption", "two-ranks"])
@pytest.mark.parametrize("pieces", [1, 7, 400])
def test_a_run_that_grows_in_pieces_is_counted_as_the_whole_one(
    name: str, pieces: int, tmp_path: Path
) -> None:
    """Cut anywhere, in the middle of lines too, and files that come later than others."""
    writing = Writing(RECORDED / name, tmp_path / "run", pieces)
    lines: list[str] = []
    totals = follow(
        writing.folder,
        LineScreen(lines.append),
        interval=0.1,
        wait=writing.wait,
        clock=writing.clock,
    )
    (engine,) = totals.engines.values()
    summary = summarize(Run(RECORDED / name))
    assert (
        engine.num_steps,
        engine.scheduled_tokens,
        engine.queried_tokens,
        engine.hit_tokens,
        engine.evicted_blocks,
        engine.preemptions,
        engine.num_arrived,
        engine.num_finished,
    ) == (
        summary.num_steps,
        summary.scheduled_tokens,
        summary.queried_tokens,
        summary.hit_tokens,
        summary.evicted_blocks,
        summary.preemptions,
        summary.num_arrived,
        sum(summary.num_finished.values()),
    )
    assert lines[0] == "no step yet"
    assert lines[-1] == LAST[name]
    assert len(lines) == len(set(lines))
    assert pieces < 400 or len(lines) > 20


def test_a_step_shows_what_is_there_now(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.change(SchedulerStep, 1, num_running=1, num_waiting=2)
    recording.records = recording.records[:6]  # up to step 1
    run = recording.write(tmp_path / "run", is_finished=False)
    lines: list[str] = []
    follow(run, LineScreen(lines.append), interval=1, is_over=lambda: True)
    assert lines == [
        "step 1, steps/s 100.0, tokens/s 100.0, run 1, wait 0, done 0/1, hit % 0.0, pool % 38.1, "
        "evict 0, preempt 0"
    ]


def test_what_is_not_known_is_no_zero(tmp_path: Path) -> None:
    run = Recording().write(tmp_path / "run")
    lines: list[str] = []
    follow(run, LineScreen(lines.append), interval=1)
    assert lines == [
        "step -, steps/s -, tokens/s -, run -, wait -, done 0/0, hit % -, pool % -, evict 0, "
        "preempt 0"
    ]


def test_stages_have_a_line_each_under_their_names(tmp_path: Path) -> None:
    for pid, stage in ((1, "thinker"), (2, "evil\x1b[2J")):
        recording = Recording(engine=f"host.{pid}.0", stage=stage, stage_id=pid - 1)
        number = recording.arrive("r", 40)
        recording.step({number: 40}, admit={number: Admit([[1, 2, 3]])})
        recording.write(tmp_path / "run", name=f"host.{pid}")
    lines: list[str] = []
    follow(tmp_path / "run", LineScreen(lines.append), interval=1)
    assert [line.partition(",")[0] for line in lines] == ["engine thinker", r"engine evil\x1b[2J"]


def test_rates_are_those_of_the_last_seconds() -> None:
    totals = RunTotals()
    recording = Recording()
    totals.add("f", recording.records[0])
    for step in range(2000):  # 100 s of 10 steps a second, then 100 s of one
        at_ns = step * 100_000_000 if step < 1000 else (step - 900) * 1_000_000_000
        scheduled = SchedulerStep(0, step, at_ns, 1, 1, 0, 9, [0] * 3, None)
        totals.add("f", scheduled)
    (engine,) = totals.engines.values()
    assert engine.rate() == (1.0, 3.0)
    assert len(engine._recent) < 60


def engine_with(*records: AnyRecord) -> EngineTotals:
    """What these records of one engine add up to."""
    totals = RunTotals()
    for record in (Recording().records[0], *records):
        totals.add("f", record)
    (engine,) = totals.engines.values()
    return engine


def request(number: int, at_ns: int) -> RequestRecord:
    return RequestRecord(0, number, f"r{number}", at_ns, 0, 8, 16, [])


def step_at(step: int, at_ns: int) -> SchedulerStep:
    return SchedulerStep(0, step, at_ns, 1, 1, 0, 9, [0] * 3, None)


def ended(number: int, step: int, at_ns: int) -> AfterStep:
    return AfterStep(0, step, at_ns, [Finished(number, "length", 1)])


def burst(number: int, first: int, arrival_ns: int) -> list[AnyRecord]:
    """A request with 72 steps, one each 10 ms, and the step that tells the workers of its end."""
    starts = [arrival_ns + one * 10_000_000 for one in range(1, 74)]
    steps = [step_at(first + one, start_ns) for one, start_ns in enumerate(starts)]
    return [
        request(number, arrival_ns),
        *steps[:-1],
        ended(number, first + 71, starts[-1] - 1),
        steps[-1],
    ]


def test_time_without_a_request_does_not_count() -> None:
    """13.7 s of it, with a cache reset in the middle, and then the same burst again."""
    before = burst(0, 0, 0)
    reset = AfterStep(0, 72, 5_000_000_000, [CacheReset(True)])
    again = burst(1, 73, 730_000_000 + 13_700_000_000)
    assert engine_with(*before).rate() == (100.0, 300.0)
    assert engine_with(*before, reset).rate() == (100.0, 300.0)
    assert engine_with(*before, reset, *again).rate() == (100.0, 300.0)
    assert engine_with(*before, reset, *again[:2]).rate() == (100.0, 300.0)


def test_slow_steps_are_slow_and_not_idle() -> None:
    """Two seconds each: of one request, and of a request each that comes when the last one ends."""
    of_one = [step_at(step, step * 2_000_000_000) for step in range(9)]
    assert engine_with(request(0, 0), *of_one).rate() == (0.5, 1.5)
    of_many: list[AnyRecord] = []
    for number, step in enumerate(of_one):
        end_ns = step.start_ns + 2_000_000_000
        of_many += [request(number, step.start_ns), step, ended(number, number, end_ns)]
    assert engine_with(*of_many).rate() == (0.5, 1.5)


def test_a_second_without_a_request_is_a_pause_and_more_is_idle() -> None:
    first = [request(0, 0), step_at(0, 0), ended(0, 0, 1_000_000_000)]
    for pause_ns, seconds in ((1_000_000_000, 2.0), (1_000_000_001, 1.0)):
        at_ns = 1_000_000_000 + pause_ns
        (steps, tokens) = engine_with(*first, request(1, at_ns), step_at(1, at_ns)).rate() or (0, 0)
        assert (steps, tokens) == (1 / seconds, 3 / seconds)


def test_a_single_step_has_no_rate() -> None:
    assert engine_with(request(0, 0), step_at(0, 10_000_000)).rate() is None


# -- files ------------------------------------------------------------------------------------


def test_a_line_is_read_when_it_is_whole_and_only_once(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run")
    path = run / f"host.1{SUFFIX}"
    content = path.read_bytes()
    tail = FolderTail(run)
    path.write_bytes(content[:500])
    first = [record for _, record in tail.read()]
    assert list(tail.read()) == []
    path.write_bytes(content[:400])  # a full disk took half a line back
    assert list(tail.read()) == []
    path.write_bytes(content)
    rest = [record for _, record in tail.read()]
    kept = [
        one
        for one in (msgspec.to_builtins(record) for record in first + rest)
        if one["type"] not in ("header", "end")
    ]
    expected = [
        msgspec.to_builtins(one)
        for one in two_rounds().records
        if type(one).__name__ != "ForwardStep"
    ]
    assert kept == expected


def test_pieces_end_where_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "PIECE_BYTES", 64)
    run = two_rounds().write(tmp_path / "run")
    totals = RunTotals()
    for name, record in FolderTail(run).read():
        totals.add(name, record)
    assert totals.engines["host.1.0"].num_steps == 5


def test_a_line_without_an_end_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "PIECE_BYTES", 64)
    monkeypatch.setattr(tail_module, "MAX_LINE_BYTES", 1000)
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    with (run / f"host.1{SUFFIX}").open("ab") as stream:
        stream.write(b"x" * 5000)
    tail = FolderTail(run)
    assert len(list(tail.read())) == 12
    assert (tail.num_damaged, list(tail.read())) == (1, [])


def test_damage_and_loss_are_said_and_do_not_stop_the_view(tmp_path: Path) -> None:
    recording = two_rounds()
    recording.records.insert(6, Gap(3))
    run = recording.write(tmp_path / "run")
    path = run / f"host.1{SUFFIX}"
    path.write_bytes(path.read_bytes().replace(b'"type":"after"', b'"type":"other"', 1))
    lines: list[str] = []
    follow(run, LineScreen(lines.append), interval=1)
    assert lines[-1] == "3 records could not be written; 1 line could not be read"


def test_a_trace_of_another_schema_is_refused(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run")
    path = run / f"host.1{SUFFIX}"
    path.write_bytes(path.read_bytes().replace(b'"schema_version":1', b'"schema_version":9', 1))
    with pytest.raises(BadTraceError, match="has trace schema 9, this omnicache reads 1"):
        list(FolderTail(run).read())


# -- when it ends -----------------------------------------------------------------------------


def test_a_run_ends_when_its_manifest_says_so(tmp_path: Path) -> None:
    """Its files may have ended before: another process may still come."""
    run = two_rounds().write(tmp_path / "run")
    write_manifest(run, finished=False)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            write_manifest(run, finished=True)

    follow(run, LineScreen(lambda _: None), interval=0.5, wait=wait)
    assert waits == [0.5] * 3


@pytest.mark.parametrize("error", [None, "EngineFailedError"])
def test_a_run_that_failed_has_ended(error: str | None, tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    write_manifest(run, finished=error is None, error=error)
    follow(run, LineScreen(lambda _: None), interval=0.5, wait=pytest.fail)


def test_a_run_that_is_silent_says_so(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    lines: list[str] = []
    now = 0.0

    def wait(_: float) -> None:
        nonlocal now
        now += 5
        if now == 80:
            write_manifest(run)

    follow(run, LineScreen(lines.append), interval=5, wait=wait, clock=lambda: now)
    assert lines[0].startswith("step 4, ")
    assert lines[1:] == ["no record for more than 10 s", "no record for more than 60 s"]


def test_an_engine_that_starts_is_not_called_silent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_manifest(run, finished=False)
    lines: list[str] = []
    now = 0.0

    def wait(_: float) -> None:
        nonlocal now
        now += 30
        if now == 90:
            write_manifest(run)

    follow(run, LineScreen(lines.append), interval=5, wait=wait, clock=lambda: now)
    assert lines == ["no step yet"]


def test_a_folder_that_goes_away_ends_the_view(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    with pytest.raises(BadTraceError, match="is gone"):
        follow(run, LineScreen(lambda _: None), interval=5, wait=lambda _: shutil.rmtree(run))


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTraceError, match="is not a run folder; name"):
        check_followed(tmp_path / "no")
    check_followed(tmp_path)  # empty: a run may begin in it
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(BadTraceError, match="it holds no"):
        check_followed(tmp_path)


# -- show --follow ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["preemption", "two-ranks"])
def test_show_follow_of_a_run_that_has_ended_shows_its_last_state(name: str, show: Show) -> None:
    run = RECORDED / name
    assert show(run, "--follow") == Ran(
        0, f"{LAST[name]}\n", f"next: omnicache show {run} --summary\n"
    )


def test_a_hint_names_a_run_as_a_shell_reads_it(tmp_path: Path, show: Show) -> None:
    run = two_rounds().write(tmp_path / "ev il\n\x1b[31m")
    path = f"$'{tmp_path}/ev il\\012\\033[31m'"
    assert show(run, "--quiet", "--summary").code == 0
    assert show(run).err.splitlines()[-1].startswith(f"next: omnicache show {path} --")
    assert show(run, "--follow").err == f"next: omnicache show {path} --summary\n"


@pytest.mark.parametrize(
    "options", [("--summary",), ("--format", "json"), ("-o", "x"), ("--engine", "0")]
)
def test_show_follow_stands_alone(options: tuple[str, ...], show: Show) -> None:
    ran = show(RECORDED / "preemption", "--follow", *options)
    assert (ran.code, ran.out) == (2, "")


def test_show_follow_says_what_a_cut_run_lacks(tmp_path: Path, show: Show) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    write_manifest(run)
    ran = show(run, "--follow")
    lacks, hint = ran.err.splitlines()
    assert (ran.code, lacks) == (0, show(run, "--phases", "--quiet").err.rstrip("\n"))
    assert lacks.startswith(f"{run}: host.1{SUFFIX} has no end record: ")
    assert hint == f"next: omnicache show {run} --summary"
    assert show(run, "--follow", "--quiet").err == f"{lacks}\n"


@pytest.mark.parametrize("damage", ["worker", "scheduler", "header only", "no file"])
def test_show_follow_of_a_damaged_run_ends_as_other_views(
    damage: str, tmp_path: Path, show: Show
) -> None:
    run = two_rounds().write(tmp_path / "run")
    write_manifest(run)
    path = run / f"host.1{SUFFIX}"
    content = path.read_bytes()
    if damage == "worker":
        path.write_bytes(content.replace(b'{"type":"forward"', b'{"type":"forward"?', 1))
    elif damage == "scheduler":
        path.write_bytes(content.replace(b'"type":"after"', b'"type":"other"', 1))
    elif damage == "header only":
        path.write_bytes(content.splitlines(keepends=True)[0])
    else:
        path.unlink()
    ran = show(run, "--follow")
    assert (ran.code, ran.err) == (3, show(run, "--summary").err)
    assert ran.err.startswith("omnicache: ")
    assert "next: " not in ran.err


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_trace_that_is_no_file_is_refused_and_not_waited_for(
    kind: str, tmp_path: Path, show: Show
) -> None:
    path = tmp_path / f"host.1{SUFFIX}"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    ran = show(tmp_path, "--follow")
    said = f"omnicache: {path} is no regular file; name a run folder of omnicache trace\n"
    assert ran == Ran(3, "", said)
    assert show(tmp_path).err == said


@pytest.mark.parametrize("interval", ["inf", "nan", "1e300", "1e11", "3601", "0", "-inf"])
def test_an_interval_that_cannot_be_waited_for_is_refused(interval: str, show: Show) -> None:
    ran = show(RECORDED / "preemption", "--follow", "--interval", interval)
    assert (ran.code, ran.out) == (2, "")
    assert "--interval" in ran.err


def test_ctrl_c_ends_the_view_and_nothing_is_lost(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    command = [*OMNICACHE, "show", str(run), "--follow", "--interval", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert line.startswith("step 4, ")
    assert (process.returncode, out, err) == (130, "", "omnicache: interrupted\n")


class Terminal:
    """A terminal of 100 columns, and what was written to it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self._pieces: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._ours, 4096)
            except OSError:  # nobody has it open any more
                return
            if not piece:
                return
            self._pieces.append(piece)

    def text(self) -> str:
        """All of it, a line for each that was drawn; once everybody has closed it."""
        os.close(self.theirs)
        self._reader.join(timeout=30)
        os.close(self._ours)
        text = b"".join(self._pieces).decode().replace("\r", "").replace("\x1b[2K", "\n")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_gets_a_table_in_place() -> None:
    screen = Terminal()
    ran = subprocess.run(
        [*OMNICACHE, "show", str(RECORDED / "two-ranks"), "--follow", "--quiet"],
        stdout=screen.theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    lines = screen.text().splitlines()
    assert lines[-2].split() == [
        *("step", "steps/s", "tokens/s", "run", "wait", "done", "hit", "%", "pool", "%"),
        *("evict", "preempt"),
    ]
    assert lines[-1].split() == ["39", "8.3", "56.9", "0", "0", "5/5", "44.3", "0.0", "6", "0"]


# -- trace --live -----------------------------------------------------------------------------


def copying(source: Path) -> list[str]:
    """A command that leaves a recorded run where it was told to trace."""
    code = (
        "import json, os, shutil, sys\n"
        f"folder = json.loads(os.environ['{ENVIRONMENT_VARIABLE}'])['folder']\n"
        "for name in os.listdir(sys.argv[1]):\n"
        "    if name != 'run.json': shutil.copy(os.path.join(sys.argv[1], name), folder)\n"
        "print('the server speaks')\n"
    )
    return [sys.executable, "-c", code, str(source)]


def live_trace(run: Path) -> list[str]:
    command = copying(RECORDED / "two-ranks")
    return [*OMNICACHE, "trace", "-o", str(run), "--live", "--", *command]


def test_live_beside_a_command_draws_on_a_terminal_and_leaves_its_stdout_alone(
    tmp_path: Path,
) -> None:
    screen = Terminal()
    ran = subprocess.run(
        live_trace(tmp_path / "run"),
        stdout=subprocess.PIPE,
        stderr=screen.theirs,
        env={**os.environ, "TERM": "xterm"},
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (0, b"the server speaks\n")
    text = screen.text()
    assert "39     8.3     56.9" in text
    assert text.index("56.9") < text.index("Summary of run")  # it has ended before the totals


def test_live_where_stderr_is_no_terminal_leaves_the_command_alone_and_says_so(
    tmp_path: Path,
) -> None:
    ran = subprocess.run(
        live_trace(tmp_path / "run"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (0, "the server speaks\n")
    assert ran.stderr.splitlines()[0] == (
        "--live is left out: stderr is no terminal, and it belongs to the command"
    )


def view(folder: Path, since_ns: int, form: str = "lines") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "omnicache_cli.live", str(folder), str(since_ns), "0.05", form],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_view_of_a_recording_waits_for_the_new_run_and_ends_with_it(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    write_manifest(run, created_unix_ns=5)  # the run that is replaced
    with view(run, since_ns=10) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        write_manifest(run, created_unix_ns=10, finished=True)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read().startswith("step 4,")


def test_the_view_of_a_recording_ignores_ctrl_c_and_ends_when_told(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    write_manifest(run, created_unix_ns=10, finished=False)
    with view(run, since_ns=10) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stderr.readline().startswith("step 4,")
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.stdin.close()
        assert process.wait(30) == 0


def test_the_view_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    write_manifest(run, created_unix_ns=10, finished=False)
    arguments = [sys.executable, "-m", "omnicache_cli.live", str(run), "10", "0.05", "lines"]
    code = (
        "import json, os, subprocess, sys\n"
        "child = subprocess.Popen(\n"
        "    json.loads(sys.argv[1]), stdin=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "child.stderr.readline()\n"
        "print('drawn', flush=True)\n"
        "os._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(arguments)], stdout=subprocess.PIPE
    ) as parent:
        out, _ = parent.communicate(timeout=30)  # ends when the view, which has it too, has ended
    assert out == b"drawn\n"


def test_the_view_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    write_manifest(run, created_unix_ns=10, finished=False)
    path = run / f"host.1{SUFFIX}"
    bad = msgspec.json.encode(header(schema_version=9))
    path.write_bytes(bad + b"\n")
    with view(run, since_ns=10) as process:
        assert process.wait(30) == 0
        assert process.stderr is not None
        err = process.stderr.read()
    assert err == (
        f"omnicache: the live view has ended: {path} has trace schema 9, this omnicache reads 1; "
        "use the omnicache that records it\n"
    )
