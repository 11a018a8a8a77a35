"""How fast a run is exported: a million request-steps to each form, each in a process of its own.

Writes the run of `benchmarks/read.py` (64 running requests, B=32, decode) into a temporary folder
and exports it, imports of the process included. MB/s are of the run's own files, so that the forms
compare; per second of the processor too, for a machine that is shared. The size of what came out is
beside them. A run of a tenth of the length shows whether the
memory grows with the run.

Prints one JSON object. Run: python benchmarks/export.py [--request-steps N]
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from read import NUM_REQUESTS, write_run

FORMS = {
    "perfetto": ("perfetto", "timeline.json"),
    "perfetto_gz": ("perfetto", "timeline.json.gz"),
    "parquet": ("parquet", "parquet"),
    "csv": ("csv", "csv"),
}


def export(run: Path, to: str, output: Path) -> tuple[float, float, int]:
    """Seconds, those of the processor, and peak memory in bytes, of `omnicache export`."""
    command = [str(Path(sys.executable).with_name("omnicache")), "export", str(run)]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--to", to, "-o", str(output), "--quiet"])
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    seconds = time.perf_counter() - started
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def measured(scratch: Path, name: str, run_bytes: int) -> dict[str, Any]:
    to, place = FORMS[name]
    output = scratch / place
    *_, short_peak = export(scratch / "short", to, output)
    shutil.rmtree(output, ignore_errors=True)
    output.unlink(missing_ok=True)
    seconds, cpu_seconds, peak = export(scratch / "run", to, output)
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "mb_per_second": round(run_bytes / seconds / 1e6, 2),
        "mb_per_cpu_second": round(run_bytes / cpu_seconds / 1e6, 2),
        "output_mb": round(size_of(output) / 1e6, 2),
        "peak_memory_mb": round(peak / 1e6, 1),
        "peak_memory_of_a_tenth_mb": round(short_peak / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--request-steps", type=int, default=1_000_000)
    num_steps = parser.parse_args().request_steps // NUM_REQUESTS
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        run_bytes = write_run(scratch / "run", num_steps)
        write_run(scratch / "short", num_steps // 10)
        forms = {name: measured(scratch, name, run_bytes) for name in FORMS}
    result = {
        "benchmark": "export",
        "python": platform.python_version(),
        "pyarrow": importlib.metadata.version("pyarrow"),
        "cpus": os.cpu_count(),
        "request_steps": num_steps * NUM_REQUESTS,
        "run_mb": round(run_bytes / 1e6, 2),
        **forms,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
