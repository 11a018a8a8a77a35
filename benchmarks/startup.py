"""Start-up of the command: --version, --help and shell completion, as whole processes.

Prints one JSON object: the median of RUNS processes each, in seconds, and the bound of the
project. Run: python benchmarks/startup.py
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 5
BOUNDS = {"version": 0.25, "help": 0.6, "completion": 0.25}
OMNICACHE = str(Path(sys.executable).with_name("omnicache"))
COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "version": ([OMNICACHE, "--version"], {}),
    "help": ([OMNICACHE, "--help"], {}),
    "completion": (
        [OMNICACHE],
        {"_OMNICACHE_COMPLETE": "complete_bash", "COMP_WORDS": "omnicache tr", "COMP_CWORD": "1"},
    ),
}


def seconds(command: list[str], environment: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - started


def main() -> None:
    medians = {}
    for name, (command, environment) in COMMANDS.items():
        seconds(command, environment)  # once to warm the file cache
        medians[name] = statistics.median(seconds(command, environment) for _ in range(RUNS))
    result = {
        "benchmark": "startup",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "bounds": BOUNDS,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
