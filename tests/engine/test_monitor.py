"""`omnicache monitor` beside a real API server that is traced: it says what was answered."""

import json
import signal
import subprocess
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import summarize
from tests.engine.commands import ended, fetch, free_port, metric, traced, wait_until

SHARED = "Everything that these requests share stands in front. "


def started(run: Path, model: Path, port: int, events: int, replay: int) -> "subprocess.Popen[str]":
    """A traced server with a pool of 39 blocks that publishes its KV events, once it answers."""
    publish = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    server = traced(
        run,
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "4"),
        *("--enforce-eager", "--num-gpu-blocks-override", "40", "--shutdown-timeout", "60"),
        *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(publish)),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )

    def healthy() -> bool:
        try:
            fetch(f"http://127.0.0.1:{port}/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    wait_until(healthy, server)
    return server


def test_a_window_is_what_the_responses_and_the_trace_say(
    tiny_text_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port, events, replay = free_port(), free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    server = started(tmp_path / "run", tiny_text_model, port, events, replay)

    def ask(prompt: str) -> dict[str, Any]:
        body = {
            "model": str(tiny_text_model),
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
        }
        usage: dict[str, Any] = json.loads(fetch(f"{url}/v1/completions", body))["usage"]
        return usage

    ask(SHARED)  # before the watch: no part of its window
    monitor = subprocess.Popen(
        [
            *(sys.executable, "-m", "omnicache_cli.cli", "monitor", url),
            *("--interval", "0.5", "--window", "600", "--format", "json"),
            *("--events", f"tcp://127.0.0.1:{events}"),
            *("--events-replay", f"tcp://127.0.0.1:{replay}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert monitor.stdout is not None
    first = json.loads(monitor.stdout.readline())
    # Each prompt twice: the second one hits. Ten of them do not fit, so that they evict each other.
    prompts = [f"{number % 10}{SHARED * (1 + number % 4)}" for number in range(20)]
    answered = [ask(prompt) for prompt in prompts for _ in range(2)]
    prompt_tokens = sum(usage["prompt_tokens"] for usage in answered)
    cached_tokens = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in answered)
    before = first["all_engines"]["lifetime"]["queried_tokens"]
    wait_until(
        lambda: metric(fetch(f"{url}/metrics"), "prefix_cache_queries") == before + prompt_tokens,
        server,
    )
    seen = first
    while seen["all_engines"]["lifetime"]["queried_tokens"] < before + prompt_tokens:
        seen = json.loads(monitor.stdout.readline())
    monitor.send_signal(signal.SIGINT)
    out, err = monitor.communicate(timeout=30)
    whole = json.loads(out.splitlines()[-1])
    server.send_signal(signal.SIGTERM)
    printed = ended(server)

    window = whole["all_engines"]["window"]
    assert whole["is_whole"]
    assert (window["hit_tokens"], window["queried_tokens"]) == (cached_tokens, prompt_tokens), err
    assert window["kv_cache_hit_rate"] == cached_tokens / prompt_tokens
    assert 0 < window["kv_cache_hit_rate"] < 0.85
    assert window["cached_prompt_tokens"] == cached_tokens
    assert [one["rule"] for one in whole["findings"]] == ["hit-rate"]
    assert monitor.returncode == 1

    summary = summarize(Run(tmp_path / "run"))
    assert window["evicted_blocks"] == summary.evicted_blocks > 0, printed
    (counted,) = whole["kv_events"]
    assert (counted["missed_batches"], counted["unreadable"]) == (0, 0)
    lifetime = whole["all_engines"]["lifetime"]
    assert lifetime["queried_tokens"] == summary.queried_tokens
    assert lifetime["hit_tokens"] == summary.hit_tokens
    assert lifetime["steps"] == summary.num_steps
    assert window["eviction_frequency"] == summary.evicted_blocks / window["steps"]
    assert whole["all_engines"]["now"]["num_blocks"] == 39

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["omnicache", "monitor", url, "--once"])
    assert exit_code_of_run() == 5  # the server is gone
    assert f"{url} cannot be reached: Connection refused" in capsys.readouterr().err
