"""`omnicache kv-size` as whole processes, beside two published estimators in the same run.

Prints one JSON object: median seconds and the most memory of RUNS processes each, and what each
answered for a request of 32,768 tokens. The other estimators are installed into an environment of
their own, from the package index; where that is not possible they are null.
Run: python benchmarks/kv_size.py
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = 3
LENGTH = 32768
ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "data" / "kv-size" / "configs"
LLAMA, GEMMA, DEEPSEEK = (CONFIGS / name for name in ("llama-3.1-8b", "gemma-3-27b", "deepseek-v3"))
BOUNDS = {
    "fast, config.json is enough": {"seconds": 0.5},
    "fast, class defaults": {"seconds": 4, "megabytes": 200},
    "exact, 671B parameters": {"seconds": 20, "megabytes": 1024},
}
ESTIMATORS = ("vramcalc==0.1.2", "llm-mem-planner==0.2.2")


def measured(command: list[str]) -> dict[str, Any]:
    """Median seconds, most megabytes of any process under it, and the last output."""
    seconds, output, peak = [], "", 0
    for _ in range(RUNS):
        with tempfile.TemporaryFile("w+") as written:
            started = time.perf_counter()
            process = subprocess.Popen(command, stdout=written, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            seconds.append(time.perf_counter() - started)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command)
            written.seek(0)
            output, peak = written.read(), max(peak, usage.ru_maxrss)
    return {
        "seconds": round(statistics.median(seconds), 3),
        "megabytes": round(peak / 1024),
        "output": output,
    }


def ours(model: Path, *more: str) -> dict[str, Any]:
    omnicache = str(Path(sys.executable).with_name("omnicache"))
    command = [omnicache, "kv-size", str(model), "--max-model-len", str(LENGTH), *more]
    found = measured([*command, "--format", "json"])
    result = json.loads(found.pop("output"))
    request = result.get("request", {}).get("bytes_reserved") or result["needed_bytes"][0]
    return {**found, "gib": round(request / 2**30, 4)}


def published(folder: Path) -> dict[str, Any]:
    """Two estimators that read config.json, each on a model that it takes."""
    environment = folder / "estimators"
    try:
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run(
            [str(environment / "bin" / "pip"), "install", "--quiet", *ESTIMATORS],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return dict.fromkeys(ESTIMATORS)
    scripts = environment / "bin"
    first = [str(scripts / "vramcalc"), "estimate", str(LLAMA / "config.json"), "--json"]
    second = [str(scripts / "llm-mem-planner"), "--config", str(DEEPSEEK / "config.json")]
    return {
        ESTIMATORS[0]: _told([*first, "--seq", str(LENGTH)]),
        ESTIMATORS[1]: _told([*second, "--seq-len", str(LENGTH), "--batch", "1"]),
    }


def _told(command: list[str]) -> dict[str, Any] | None:
    try:
        found = measured(command)
    except subprocess.CalledProcessError:
        return None
    lines = [line for line in found.pop("output").splitlines() if re.search("(?i)kv", line)]
    return {**found, "its lines on the KV cache": [line.strip()[:120] for line in lines[:3]]}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="omnicache-bench-") as folder:
        results = {
            "fast, config.json is enough": ours(LLAMA),
            "fast, class defaults": ours(GEMMA),
            "exact, 671B parameters": ours(DEEPSEEK, "--exact"),
            **published(Path(folder)),
        }
    print(
        json.dumps(
            {
                "benchmark": "kv_size",
                "python": platform.python_version(),
                "cpus": os.cpu_count(),
                "tokens": LENGTH,
                "results": results,
                "bounds": BOUNDS,
            }
        )
    )


if __name__ == "__main__":
    main()
