"""`omnicache monitor` against real HTTP servers on this machine."""

import json
import os
import pty
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli import advice
from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.monitor.default_rules import RECORD, default_rules
from omnicache_cli.monitor.scrape import TOKEN_VARIABLE
from tests.unit.metrics_pages import page_of
from tests.unit.metrics_server import (
    AFTER,
    IDLE,
    Answer,
    cut_off,
    dripping,
    endless,
    page,
    redirect,
    serving,
)
from tests.unit.run_builder import Admit, Recording, two_rounds
from tests.unit.showing import Ran

Monitor = Callable[..., Ran]
QUICK = ("--interval", "0.1")
PROGRAM = [sys.executable, "-m", "omnicache_cli.cli", "monitor"]


@pytest.fixture
def monitor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Monitor:
    """`omnicache monitor` with these arguments, in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def monitor(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["omnicache", "monitor", *map(str, arguments)])
        code = exit_code_of_run()
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return monitor


def quiet(count: int) -> str:
    """A page with so many queried tokens, 90 % of them hits."""
    return page_of(
        {"0": {"queried": count, "hit": count * 0.9, "preempted": 0, "usage": 0.5}}, capacity=1600
    )


# -- what is told -------------------------------------------------------------------------------


def test_two_samples_and_what_they_say(monitor: Monitor) -> None:
    with serving(page(IDLE), page(AFTER)) as server:
        ran = monitor(server.url, "--once", *QUICK)
        assert [path for path, _ in server.seen] == ["/metrics", "/metrics"]

    lines = ran.out.splitlines()
    assert lines[0] == f"Cache of {server.url}"
    rate = "kv_cache_hit_rate, %                69.75     69.75  8960 of 12846 queried tokens"
    assert rate in lines
    assert "pool in use, tokens     0 of 1575" in lines
    assert any(line.startswith("warning: hit-rate: kv_cache_hit_rate is 0.6975") for line in lines)
    assert any(line.startswith("eviction_frequency: not exposed: start the") for line in lines)
    assert ran.err == f"next: {RECORD}\n"
    assert ran.code == 1


def test_json_has_every_value_and_says_what_is_missing(monitor: Monitor) -> None:
    with serving(page(IDLE), page(AFTER)) as server:
        ran = monitor(server.url, "--once", *QUICK, "--format", "json")

    result = json.loads(ran.out)
    assert (result["command"], result["vllm_version"]) == ("monitor", None)
    whole = result["all_engines"]
    assert whole["window"]["kv_cache_hit_rate"] == 8960 / 12846
    assert whole["lifetime"]["queried_tokens"] == 12846
    assert whole["now"]["kv_pool_capacity_tokens"] == 1575
    assert whole["window"]["eviction_frequency"] is None
    assert "--kv-events-config" in whole["missing"]["window.eviction_frequency"]
    (one,) = result["servers"]
    assert (one["url"], one["error"]) == (server.url, None)
    assert one["engines"][0]["labels"] == {"model_name": "sliding", "engine": "0"}
    assert [finding["rule"] for finding in result["findings"]] == ["hit-rate"]
    assert ran.code == 1


def test_lifetime_takes_one_sample_and_judges_nothing(monitor: Monitor) -> None:
    with serving(page(AFTER)) as server:
        ran = monitor(server.url, "--lifetime", "--format", "json")
        assert len(server.seen) == 1

    result = json.loads(ran.out)
    assert result["all_engines"]["lifetime"]["kv_cache_hit_rate"] == 8960 / 12846
    assert result["all_engines"]["missing"]["window.kv_cache_hit_rate"] == (
        "one sample has no window"
    )
    assert result["findings"] == []
    assert ran.code == 0


def test_several_servers_stand_side_by_side_and_are_summed(monitor: Monitor) -> None:
    def both(first: int, second: int) -> tuple[Answer, Answer]:
        pages = [page_of({"0": {"queried": one, "hit": 0.9 * one}}) for one in (first, second)]
        return page(pages[0]), page(pages[1])

    with serving(*both(0, 100)) as one, serving(*both(0, 900)) as other:
        ran = monitor(one.url, other.url, "--once", *QUICK)

    assert ran.code == 0
    table = ran.out.partition("Engines, over the window\n")[2].splitlines()
    assert [line.split()[:3] for line in table[1:4] if line] == [
        [one.url, "90", "100"],
        [other.url, "90", "900"],
        ["all", "90", "1000"],
    ]


def test_a_stream_of_json_is_one_object_a_line_and_the_whole_at_the_end(monitor: Monitor) -> None:
    with serving(*(page(quiet(100 * number)) for number in range(50))) as server:
        ran = monitor(server.url, *QUICK, "--duration", "0.5", "--format", "json")

    objects = [json.loads(line) for line in ran.out.splitlines()]
    count = len(objects) - 1
    assert count > 1
    assert [one["sample"] for one in objects] == [*range(1, count + 1), count]
    assert [one["is_whole"] for one in objects] == [False] * count + [True]
    assert objects[-1]["all_engines"]["window"]["queried_tokens"] == 100 * (count - 1)
    assert ran.code == 0


def test_a_stream_of_text_is_a_line_a_sample_and_the_whole_at_the_end(monitor: Monitor) -> None:
    with serving(*(page(quiet(100 * number)) for number in range(50))) as server:
        ran = monitor(server.url, *QUICK, "--duration", "0.5")

    heading, *lines = ran.out.splitlines()
    samples = lines[: lines.index(f"Cache of {server.url}")]
    assert heading.split()[:5] == ["sample", "window_s", "hit_%", "ever_%", "queried"]
    assert len(samples) > 1
    assert [line.split()[0] for line in samples] == [str(at + 1) for at in range(len(samples))]
    assert [line.split()[4] for line in samples[1:]] == [
        str(100 * at) for at in range(1, len(samples))
    ]


def test_html_is_one_page_with_everything_escaped(monitor: Monitor, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\\n\x1b[31m\x07"
    text = page_of({"0": {"queried": 5, "hit": 1}}, model=evil)
    with serving(page(text)) as server:
        ran = monitor(server.url, "--once", *QUICK, "-o", tmp_path / "page.html")
        shown = monitor(server.url, "--once", *QUICK)

    written = (tmp_path / "page.html").read_text()
    assert ran.out == ""
    assert written.count("<script") == 1  # our own, which sorts
    assert "&lt;script&gt;alert(1)" in written
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o600
    assert "\x1b" not in shown.out + written
    assert "\\x1b[31m\\x07" in shown.out


def test_a_run_of_the_server_adds_modalities(monitor: Monitor, tmp_path: Path) -> None:
    two_rounds().write(tmp_path / "run")
    with serving(page(AFTER)) as server:
        ran = monitor(server.url, "--lifetime", "--run", tmp_path / "run", "--format", "json")
        missing = monitor(server.url, "--lifetime", "--run", tmp_path / "nothing")

    traced = json.loads(ran.out)["run"]
    assert traced["modal_cache_ratio"].keys() >= {"text"}
    assert missing.code == 3


def test_the_run_of_the_whole_is_read_after_the_last_sample(
    monitor: Monitor, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    early = Recording()
    request = early.arrive("p0-r1", 40)
    early.step({request: 40}, admit={request: Admit([[1, 2, 3]])})
    early.write(folder, is_finished=False)

    def goes_on(handler: BaseHTTPRequestHandler) -> None:
        shutil.rmtree(folder)
        two_rounds().write(folder)  # 80 queried tokens, 32 of them hits
        page(page_of({"0": {"queried": 80, "hit": 32}}))(handler)
        os.kill(os.getpid(), signal.SIGTERM)

    with serving(page(page_of({"0": {"queried": 40, "hit": 0}})), goes_on) as server:
        ran = monitor(server.url, *QUICK, "--run", folder, "--format", "json")

    first, *_, whole = [json.loads(line) for line in ran.out.splitlines()]
    assert whole["is_whole"]
    assert (whole["run"]["queried_tokens"], whole["run"]["hit_tokens"]) == (80, 32)
    assert (first["run"]["queried_tokens"], first["run"]["hit_tokens"]) == (40, 0)
    assert first["run"]["time"] <= first["time"]
    assert whole["run"]["time"] >= whole["time"]


def test_a_run_that_went_away_is_shown_as_it_was(monitor: Monitor, tmp_path: Path) -> None:
    folder = two_rounds().write(tmp_path / "run")

    def takes_it_away(handler: BaseHTTPRequestHandler) -> None:
        shutil.rmtree(folder)
        page(page_of({"0": {"queried": 80, "hit": 32}}))(handler)

    with serving(takes_it_away) as server:
        ran = monitor(server.url, "--lifetime", "--run", folder, "--format", "json")

    result = json.loads(ran.out)
    assert result["run"]["queried_tokens"] == 80
    assert result["run"]["time"] <= result["time"]
    assert "; the run is shown as it was before the first sample\n" in ran.err
    assert ran.code == 0


def test_what_to_type_next_runs_as_it_stands(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = two_rounds().write(tmp_path / "a run")
    nexts = {one for rule in default_rules(str(folder)) for one in rule.next_commands}
    with serving(page(quiet(5))) as server:
        lifetime = monitor(server.url, "--lifetime").err
        once = monitor(server.url, "--once", *QUICK).err
        assert lifetime == f"next: omnicache monitor {server.url} --once\n"
        assert once == "next: omnicache monitor --emit alerts\n"
        nexts |= {line.removeprefix("next: ").strip() for line in (lifetime, once)}
        typed = sorted(one for one in nexts if one.startswith("omnicache "))
        assert typed.pop() == f"omnicache simulate '{folder}' --bound"  # of its own tests
        for line in typed:
            monkeypatch.setattr(sys, "argv", shlex.split(line))
            assert exit_code_of_run() == 0, line

    assert [line.split()[1] for line in typed] == ["explain", "monitor", "monitor", "show"]
    unnamed = [one for rule in default_rules(None) for one in rule.next_commands]
    assert not any(one.startswith("omnicache ") for one in unnamed)


# -- rules and exit codes -----------------------------------------------------------------------


def test_a_rule_that_was_asked_for_decides(monitor: Monitor) -> None:
    with serving(page(quiet(0)), page(quiet(1000))) as server:
        assert monitor(server.url, "--once", *QUICK).code == 0
    with serving(page(quiet(0)), page(quiet(1000))) as server:
        ran = monitor(server.url, "--once", *QUICK, "--fail-on", "kv_cache_hit_rate<0.95")
    assert ran.code == 1
    assert "warning: kv_cache_hit_rate<0.95: kv_cache_hit_rate is 0.9 (900 of 1000" in ran.out
    with serving(page(quiet(0)), page(quiet(1000))) as server:
        assert monitor(server.url, "--once", *QUICK, "--fail-on", "queried_tokens<10").code == 0


def test_a_rule_that_was_asked_for_and_cannot_be_judged_is_no_consent(monitor: Monitor) -> None:
    with serving(page(quiet(5))) as server:
        ran = monitor(server.url, "--once", *QUICK, "--fail-on", "kv_cache_hit_rate<0.85")

    assert ran.code == 3
    assert ran.err.splitlines()[0] == (
        "omnicache: 'kv_cache_hit_rate<0.85' could not be judged: kv_cache_hit_rate: no token in "
        "the window"
    )


def terminating(answer: Answer) -> Answer:
    """The answer, and then this process gets a SIGTERM."""

    def last(handler: BaseHTTPRequestHandler) -> None:
        answer(handler)
        os.kill(os.getpid(), signal.SIGTERM)

    return last


def test_a_server_that_is_away_in_the_end_is_5_though_a_rule_holds(monitor: Monitor) -> None:
    away = page("", status=503)
    with serving(page(IDLE), page(AFTER), away, terminating(away)) as server:
        ran = monitor(server.url, *QUICK, "--format", "json")

    objects = [json.loads(line) for line in ran.out.splitlines()]
    errors = [one["servers"][0]["error"] is not None for one in objects]
    assert errors == [False, False, *[True] * (len(objects) - 2)]
    assert len(objects) > 3
    assert objects[1]["findings"] != []
    assert ran.err.splitlines()[-1] == (
        f"omnicache: {server.url} answers with 503 instead of its metrics; look into its log"
    )
    assert ran.code == 5


def test_a_server_that_is_killed_is_one_line_and_5(monitor: Monitor) -> None:
    with serving(page(IDLE)) as server:

        def answer_and_go(handler: BaseHTTPRequestHandler) -> None:
            page(IDLE)(handler)
            server._server.socket.close()
            handler.close_connection = True

        server._answers = [answer_and_go]
        ran = monitor(server.url, "--once", *QUICK)

    assert ran.err == (
        f"omnicache: {server.url} cannot be reached: Connection refused; is the server up, and is "
        "this its port?\n"
    )
    assert ran.code == 5


def test_one_of_two_that_is_away_leaves_the_other_and_is_5(monitor: Monitor) -> None:
    with serving(page(quiet(0)), page(quiet(100))) as server:
        ran = monitor(server.url, "127.0.0.1:1", "--once", *QUICK)

    assert "90 of 100 queried tokens" in ran.out
    assert "not read: http://127.0.0.1:1 cannot be reached: Connection refused" in ran.out
    assert ran.code == 5


# -- pages and servers that are wrong -------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code", "line"),
    [
        (page("<html>hello</html>", "text/html"), 3, "is not a page of Prometheus metrics; name"),
        (page('{"detail": "x"}', "application/json"), 3, "is not a page of Prometheus metrics;"),
        (page(b"\xff\xfe\x00" * 999), 3, "is not a page of Prometheus metrics;"),
        (page(""), 3, "is not a page of Prometheus metrics;"),
        (page("python_info 1.0\n"), 3, "has Prometheus metrics, but none of vLLM;"),
        (page("", status=404), 3, "has no page /metrics (404);"),
        (page("", status=401), 3, f"refuses to show its metrics (401); set {TOKEN_VARIABLE},"),
        (page("", packed="gzip"), 3, "packs its page, though it was asked not to;"),
        (page("", status=500), 5, "answers with 500 instead of its metrics;"),
        (
            redirect("http://127.0.0.1:1/metrics"),
            3,
            "redirects to http://127.0.0.1:1/metrics (3",
        ),
        (redirect("/metrics"), 3, "redirects without end;"),
        (cut_off, 5, "broke off, or does not speak HTTP"),
        (endless, 3, "sends over 32 MiB, which is no page of metrics;"),
        (dripping, 5, "has not sent its metrics within 0.3 s;"),
    ],
)
def test_each_wrong_server_is_one_line(
    monitor: Monitor, answer: Answer, code: int, line: str
) -> None:
    with serving(answer) as server:
        timeout = ("--timeout", "0.3") if answer is dripping else ()
        ran = monitor(server.url, "--once", *QUICK, *timeout)

    assert ran.err.startswith(f"omnicache: {server.url} {line}")
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert ran.code == code


def test_a_server_that_accepts_and_says_nothing_is_one_line(monitor: Monitor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        begun = time.monotonic()
        ran = monitor(f"http://127.0.0.1:{port}", "--once", "--timeout", "0.2")

    assert time.monotonic() - begun < 30
    assert ran.err.startswith(f"omnicache: http://127.0.0.1:{port} has not sent its metrics within")
    assert ran.code == 5


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("127.0.0.1:1", "http://127.0.0.1:1 cannot be reached: Connection refused;"),
        ("http://name.invalid", "http://name.invalid cannot be reached: "),
        ("ftp://a", "'ftp://a' is no URL of a server; write it like http://localhost:8000"),
        ("http://", "'http://' is no URL of a server;"),
        ("http://a:99999", "'http://a:99999' is no URL: Port out of range 0-65535;"),
        ("http://user:secret@[::1", "'http://[::1' is no URL: Invalid IPv6 URL;"),
        ("http://a\nb", "'http://a\\nb' is no URL of a server;"),
    ],
)
def test_each_wrong_url_is_one_line(monitor: Monitor, url: str, line: str) -> None:
    ran = monitor(url, "--once")

    assert ran.err.startswith(f"omnicache: {line}")
    assert ran.err.count("\n") == 1
    assert "secret" not in ran.err
    assert ran.code == (2 if "no URL" in line else 5)


def test_a_redirect_on_the_same_server_is_followed(monitor: Monitor) -> None:
    with serving(redirect("/metrics/"), page(quiet(5))) as server:
        ran = monitor(server.url, "--lifetime")
        assert [path for path, _ in server.seen] == ["/metrics", "/metrics/"]

    assert ran.code == 0


@pytest.mark.parametrize(
    ("ending", "path"),
    [
        ("", "/metrics"),
        ("/", "/metrics"),
        ("/metrics", "/metrics"),
        ("/metrics/", "/metrics"),
        ("/a/b/", "/a/b/metrics"),
        ("/metrics?format=text#part", "/metrics?format=text"),
    ],
)
def test_a_base_url_and_the_page_s_own_are_the_same(
    monitor: Monitor, ending: str, path: str
) -> None:
    with serving(page(quiet(5))) as server:
        assert monitor(f"{server.url}{ending}", "--lifetime").code == 0
        assert [seen for seen, _ in server.seen] == [path]


def test_ipv6_is_understood(monitor: Monitor) -> None:
    try:
        context = serving(page(quiet(5)), host="::1")
        with context as server:
            ran = monitor(server.url, "--lifetime")
    except OSError as error:
        pytest.fail(f"this machine has no IPv6 loopback: {error}")

    assert ran.code == 0
    assert ran.out.startswith(f"Cache of http://[::1]:{server.port}\n")


# -- credentials ----------------------------------------------------------------------------------


def test_credentials_are_sent_and_shown_nowhere(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "tok-secret")
    with serving(page(quiet(5)), page("", status=401)) as server:
        address = server.url
        one = monitor(address, "--lifetime", "--header", "X-Key: key-secret", "--format", "json")
        refused = monitor(address, "--lifetime", "--header", "X-Key: key-secret")
        headers = server.seen[0][1]

    assert headers["x-key"] == "key-secret"
    assert headers["authorization"] == "Bearer tok-secret"
    assert refused.code == 3
    assert "secret" not in one.out + one.err + refused.out + refused.err


def test_credentials_of_the_url_are_sent(monitor: Monitor) -> None:
    with serving(page(quiet(5)), page("", status=401)) as server:
        address = server.url.replace("http://", "http://user:pass-secret@")
        one = monitor(address, "--lifetime", "--format", "json")
        refused = monitor(address, "--lifetime")
        assert server.seen[0][1]["authorization"].startswith("Basic ")

    assert (one.code, refused.code) == (0, 3)
    assert "secret" not in one.out + one.err + refused.out + refused.err


def test_credentials_do_not_follow_a_redirect_to_another_server(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "tok")
    with serving(page(quiet(5))) as other, serving(redirect(f"{other.url}/metrics")) as server:
        assert monitor(server.url, "--lifetime").code == 3
        assert other.seen == []


@pytest.mark.parametrize("header", ["no-colon-secret", ": secret", "a b: secret", "a: sec\nret"])
def test_a_header_that_is_none_is_refused_without_being_shown(
    monitor: Monitor, header: str
) -> None:
    ran = monitor("--once", "--header", header)

    assert ran.code == 2
    assert "sec" not in ran.err


@pytest.mark.parametrize("proxy", ["no://u:secret@p:1", "socks5://u:secret@p:1", "http://[", "x"])
def test_a_proxy_that_is_none_is_one_line(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    ran = monitor("name.invalid", "--once", "--timeout", "0.5")

    assert ran.err.count("\n") == 1
    assert "secret" not in ran.err
    assert ran.code in (2, 5)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--once", "--duration", "5"], "--once takes two samples; leave it out, or --duration"),
        (["--lifetime", "--fail-on", "steps>1"], "--lifetime takes one sample, which no rule"),
        (["--events-replay", "tcp://a:1"], "--events-replay is for what --events misses;"),
        (["a", "http://a/metrics"], "a server is named twice and would count twice;"),
        (["--fail-on", "x<1"], "rule 'x<1': there is no measure 'x'"),
        (["--emit", "yaml"], "--emit 'yaml' is none of grafana, alerts; choose one"),
        (["--emit", "alerts", "--once"], "--emit asks no server; leave out once"),
    ],
)
def test_options_that_contradict_are_refused_before_a_server_is_asked(
    monitor: Monitor, options: list[str], line: str
) -> None:
    ran = monitor(*options)

    assert ran.err.startswith(f"omnicache: {line}")
    assert ran.code == 2


def test_an_output_that_exists_is_refused_before_a_server_is_asked(
    monitor: Monitor, tmp_path: Path
) -> None:
    (tmp_path / "out.json").write_text("mine")
    with serving(page(quiet(5))) as server:
        ran = monitor(server.url, "-o", tmp_path / "out.json")
        assert server.seen == []

    assert ran.code == 3
    assert (tmp_path / "out.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("module", "options"),
    [("httpx", ()), ("prometheus_client", ()), ("zmq", ("--events", "tcp://127.0.0.1:1"))],
)
def test_a_library_that_is_missing_is_one_line_and_4(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch, module: str, options: tuple[str, ...]
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    ran = monitor("127.0.0.1:1", "--once", *options)

    assert ran.err.count("\n") == 1
    assert "is not installed" in ran.err
    assert ran.err.endswith(f"; {advice.install_extra('monitor')}\n")
    assert ran.code == 4


# -- the end ---------------------------------------------------------------------------------------


def test_termination_ends_the_watch_with_the_whole_of_it(monitor: Monitor) -> None:
    last = terminating(page(quiet(300)))
    with serving(page(quiet(0)), page(quiet(100)), last) as server:
        ran = monitor(server.url, *QUICK, "--format", "json")

    whole = json.loads(ran.out.splitlines()[-1])
    assert whole["is_whole"]
    assert whole["all_engines"]["window"]["queried_tokens"] in (100, 300)
    assert ran.code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["typer", "omnicache_cli.cli.monitor", "httpx"])
def test_termination_while_the_command_is_loaded_is_an_interrupt(
    moment: str, number: signal.Signals
) -> None:
    code = f"""
import importlib.abc, os, sys

class Terminates(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {moment!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {int(number)})

sys.meta_path.insert(0, Terminates())
sys.argv = ["omnicache", "monitor", "127.0.0.1:1", "--once"]
from omnicache_cli.cli.main import main
main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "omnicache: interrupted\n")


def test_a_reader_that_went_away_is_no_error() -> None:
    with serving(page(quiet(5))) as server:
        command = [*PROGRAM, server.url, *QUICK, "--duration", "30", "--format", "json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"{")
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait(timeout=20) == 0


def test_the_live_view_draws_and_ends_with_the_whole() -> None:
    text = page_of({"0": {"queried": 5, "hit": 1}}, model="m\x1b]0;title\x07")
    parent, child = pty.openpty()
    with serving(page(text)) as server:
        command = [*PROGRAM, server.url, *QUICK, "--duration", "0.45"]
        environment: dict[str, Any] = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        process = subprocess.Popen(
            command, stdout=child, stderr=subprocess.PIPE, stdin=child, env=environment
        )
        os.close(child)
        drawn = b""
        while True:
            try:
                piece = os.read(parent, 4096)
            except OSError:
                break
            if not piece:
                break
            drawn += piece
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        process.stderr.close()
    os.close(parent)

    assert b"Ctrl-C ends and shows the whole of it" in drawn
    assert b"Cache of http://127.0.0.1" in drawn
    assert b"\x1b]0;" not in drawn  # no name of a model reaches the terminal raw


def test_nothing_heavy_is_loaded_before_a_server_is_asked() -> None:
    code = (
        "import sys; import omnicache_cli.cli.monitor; "
        "print(sorted({'httpx', 'zmq', 'rich', 'prometheus_client', 'asyncio'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout == "[]\n"
