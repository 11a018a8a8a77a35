"""Hub ids, against a hub on this machine: what is fetched, what is said when it cannot be."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.unit.kv_size_truth import CONFIGS

pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA = (CONFIGS / "llama-3.1-8b" / "config.json").read_bytes()


class Hub(ThreadingHTTPServer):
    """One model, org/model, with config.json and nothing beside it; org/gated may not be read."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[str] = []


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        self.server.asked.append(self.path)
        model, _, name = self.path.lstrip("/").partition("/resolve/main/")
        code, error = 200, ""
        if model == "org/gated":
            code, error = 403, "GatedRepo"
        elif model != "org/model":
            code, error = 404, "RepoNotFound"
        elif name != "config.json":
            code, error = 404, "EntryNotFound"
        body = LLAMA if code == 200 else b"{}"
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"1234"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(model: str, endpoint: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*"} | more
    return subprocess.run(
        [sys.executable, "-m", "omnicache_cli.cli", "kv-size", model, "--format", "json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def address(hub: Hub) -> str:
    return f"http://127.0.0.1:{hub.server_address[1]}"


def test_a_hub_id_is_fetched_and_then_found_without_the_network(hub: Hub, tmp_path: Path) -> None:
    first = run("org/model", address(hub), tmp_path)
    asked = [path for path in hub.asked if path.startswith("/org/")]
    again = run("org/model", address(hub), tmp_path, HF_HUB_OFFLINE="1")

    assert (first.returncode, first.stderr) == (0, "")
    assert json.loads(first.stdout)["bytes_per_token"] == 131_072
    assert again.stdout == first.stdout
    assert {path.rpartition("/")[2] for path in asked} == {
        *("config.json", "hf_quant_config.json", "preprocessor_config.json")
    }
    assert [path for path in hub.asked if path.startswith("/org/")] == asked


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/nothing", "no model on http://127.0.0.1"),
        ("org/gated", "is gated and this account may not read it"),
        ("org/no space", "HFValidationError"),
    ],
)
def test_a_model_that_cannot_be_read_is_one_line(
    model: str, message: str, hub: Hub, tmp_path: Path
) -> None:
    ran = run(model, address(hub), tmp_path)

    assert (ran.returncode, ran.stdout) == (3, "")
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_hub_that_is_away_is_one_line_at_once(hub: Hub, tmp_path: Path) -> None:
    """A port that nobody listens on any more; huggingface_hub itself would retry for 25 s."""
    endpoint = address(hub)
    hub.shutdown()  # while its thread polls the socket, closing it alone leaves the port open
    hub.server_close()
    ran = run("org/model", endpoint, tmp_path)

    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr == (
        "omnicache: org/model is no file here and no model in the local cache, and "
        f"{endpoint} is not reached; download its config.json and name the folder\n"
    )


def test_a_folder_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    ran = run(str(CONFIGS / "gemma-3-27b"), address(hub), tmp_path)

    assert ran.returncode == 0
    assert hub.asked == []
