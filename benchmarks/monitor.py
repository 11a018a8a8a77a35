"""What `omnicache monitor` costs: one sample of a large page, and its memory over a long watch.

A page as of a server with several engines, about 250 lines each, is served by a process of its own.
Each part is timed alone: fetch, read, measure and judge, report. Then many samples of changing
pages go through the same Fleet, and the memory is read at a tenth and at the end. Times are
milliseconds of the CPU, the median of the repetitions; of the fetch they are of the clock.

Prints one JSON object. Run: python benchmarks/monitor.py [--engines N] [--samples N]
"""

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from omnicache_cli.monitor.default_rules import default_rules
from omnicache_cli.monitor.fleet import Fleet
from omnicache_cli.monitor.page import read_page
from omnicache_cli.monitor.report import monitor_report
from omnicache_cli.monitor.scrape import Scraped, Scraper, target_of

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "monitor" / "vllm-0.30-after.txt"
SERVE = """
import http.server, sys
content = sys.stdin.buffer.read()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *arguments):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def page_of(num_engines: int) -> str:
    """The recorded page, each line of an engine once for each engine."""
    lines = []
    for line in RECORDED.read_text().splitlines():
        if 'engine="0"' in line:
            lines += [line.replace('engine="0"', f'engine="{one}"') for one in range(num_engines)]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def advanced(page: str, by: int) -> str:
    """The same page with higher prefix cache counters."""
    return re.sub(
        r"^(vllm:prefix_cache_\w+_total\{[^}]*\}) (\S+)$",
        lambda found: f"{found[1]} {float(found[2]) + by}",
        page,
        flags=re.MULTILINE,
    )


def fetch_times(page: str, repetitions: int) -> list[float]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(page.encode())
    process.stdin.close()
    target = target_of(f"http://127.0.0.1:{int(process.stdout.readline())}")
    times = []
    try:
        with Scraper([target], {}, 10.0) as scraper:
            for _ in range(repetitions + 1):
                begun = time.perf_counter()
                (scraped,) = scraper.scrape()
                assert isinstance(scraped, Scraped)
                times.append(1e3 * (time.perf_counter() - begun))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return times[1:]  # the first one connects


def fleet_of() -> Fleet:
    return Fleet([target_of("http://server:8000")], default_rules(None), window_seconds=60.0)


def part_times(pages: list[str], repetitions: int) -> dict[str, float]:
    fleet = fleet_of()
    parts: dict[str, list[float]] = {"read": [], "read_measure_judge": [], "report": []}
    for number in range(repetitions):
        page = pages[number % len(pages)]
        begun = time.process_time()
        read_page(page, "server")
        read = time.process_time()
        sample = fleet.add([Scraped(page, 2.0 * number)], monotonic=2.0 * number, time=0.0)
        added = time.process_time()
        monitor_report(sample, list(fleet.history))
        reported = time.process_time()
        parts["read"].append(1e3 * (read - begun))
        parts["read_measure_judge"].append(1e3 * (added - read))
        parts["report"].append(1e3 * (reported - added))
    return {name: round(statistics.median(times), 3) for name, times in parts.items()}


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def memory_over(pages: list[str], samples: int) -> dict[str, float]:
    """MiB at a tenth of the samples and at the end; a restart of the server now and then."""
    fleet = fleet_of()
    found = {}
    begun = time.process_time()
    for number in range(samples):
        page = pages[number % len(pages)]  # from the last to the first one its counters fall
        fleet.add([Scraped(page, 2.0 * number)], monotonic=2.0 * number, time=0.0)
        if number + 1 == samples // 10:
            found["mib_at_a_tenth"] = round(resident_mib(), 1)
    found["mib_at_the_end"] = round(resident_mib(), 1)
    found["cpu_ms_per_sample"] = round(1e3 * (time.process_time() - begun) / samples, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--repetitions", type=int, default=50)
    given = parser.parse_args()
    page = page_of(given.engines)
    pages = [advanced(page, 1000 * number) for number in range(20)]
    result = {
        "engines": given.engines,
        "lines": page.count("\n"),
        "kib": round(len(page) / 1024, 1),
        "ms": {
            "fetch": round(statistics.median(fetch_times(page, given.repetitions)), 3),
            **part_times(pages, given.repetitions),
        },
        "samples": given.samples,
        **memory_over(pages, given.samples),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
