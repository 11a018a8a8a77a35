"""How fast a run is read: `omnicache show --summary` over a million request-steps.

Writes a run of decode steps as the probe writes them (64 running requests, B=32) into a temporary
folder, then reads it in a process of its own, and a run of a tenth of the length for the memory.
Beside it the same facts as plain JSON lines, one object per request and step with vLLM's seven
fields, read with msgspec and nothing else done.

Prints one JSON object. Run: python benchmarks/read.py [--request-steps N]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from omnicache_cli.trace.records import (
    Admission,
    AnyRecord,
    BatchDescriptor,
    CacheGroup,
    End,
    EngineSource,
    ForwardStep,
    GroupForward,
    Header,
    RequestRecord,
    SchedulerStep,
    WorkerSource,
)
from omnicache_cli.trace.writer import RankFileWriter

NUM_REQUESTS = 64
BLOCK_SIZE = 32
PROMPT_TOKENS = 64
GROUP = CacheGroup("FullAttentionSpec", BLOCK_SIZE, 2, ["0", "1"], 8192, maps_slots=True)


def records(num_steps: int) -> Iterator[AnyRecord]:
    """One prefill step, then decode steps of 64 requests that never end."""
    numbers = list(range(NUM_REQUESTS))
    blocks_each = (PROMPT_TOKENS + num_steps) // BLOCK_SIZE + 1
    first_block = [1 + number * blocks_each for number in numbers]
    yield EngineSource(
        0, "host.1.0", "tiny", "Scheduler", 1 + NUM_REQUESTS * blocks_each, BLOCK_SIZE, BLOCK_SIZE,
        True, [GROUP], [], {"world_size": 1}, {}, True,
    )  # fmt: skip
    yield WorkerSource(1, "host.1.0", "Runner", 0, 0, 0, "cpu", ["M"], [BLOCK_SIZE], {}, "bfloat16")
    for number in numbers:
        yield RequestRecord(0, number, f"r{number}-00000000", 0, 0, PROMPT_TOKENS, 1 << 20, [])
    for step in range(num_steps):
        start = 0 if step == 0 else PROMPT_TOKENS + step - 1
        count = PROMPT_TOKENS if step == 0 else 1
        end = start + count
        held = -(-end // BLOCK_SIZE)
        grown = step > 0 and start % BLOCK_SIZE == 0
        news = [(number, [[first_block[number] + held - 1, 1]]) for number in numbers]
        yield SchedulerStep(
            0, step, step * 1000, 500, NUM_REQUESTS, 0, 100,
            scheduled=numbers if step == 0 else None,
            num_scheduled_tokens=[count] * NUM_REQUESTS if step == 0 else None,
            admitted=[
                Admission(number, 0, 0, PROMPT_TOKENS, [[first_block[number], held]])
                for number in numbers
            ] if step == 0 else [],
            new_block_ids=news if grown else [],
        )  # fmt: skip
        slots = [first_block[number] * BLOCK_SIZE + start for number in numbers]
        table = [(number, 0, [first_block[number], held]) for number in numbers]
        grown_table = [(row, held - 1, runs) for row, (runs,) in news]
        yield ForwardStep(
            1, step, step * 1000, 10, 20, 30, NUM_REQUESTS,
            [
                GroupForward(
                    NUM_REQUESTS * count, count, end,
                    [0, NUM_REQUESTS + 1] if step else [
                        part for number in range(NUM_REQUESTS + 1) for part in (number * count, 1)
                    ],
                    [end] * NUM_REQUESTS,
                    [part for slot in slots for part in (slot, count)] if step == 0 else None,
                    slots if step else None,
                    table_shape=(NUM_REQUESTS, blocks_each),
                    block_table=table if step == 0 else grown_table if grown else [],
                )
            ],
            [(number, f"r{number}-00000000") for number in numbers] if step == 0 else [],
            numbers if step == 0 else None,
            BatchDescriptor(NUM_REQUESTS * count),
        )  # fmt: skip


def write_run(folder: Path, num_steps: int) -> int:
    """Bytes written."""
    folder.mkdir()
    writer = RankFileWriter(folder, Header(1, "0", "0.30.0", "host", 1, "MainProcess", 0, 0))
    for record in records(num_steps):
        writer.write(record)
    writer.close(End(writer.num_records, 0, {}, 0))
    return writer.path.stat().st_size


def read_by_command(folder: Path) -> tuple[float, int]:
    """Seconds, and peak memory in bytes, of `omnicache show --summary` as a process."""
    command = [str(Path(sys.executable).with_name("omnicache")), "show", str(folder), "--summary"]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--format", "json"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    summary = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    assert summary["requests"] == NUM_REQUESTS
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def plain_json(path: Path, num_steps: int) -> tuple[float, int]:
    """Seconds to decode, and bytes, of one plain JSON object per request and step."""
    with path.open("wb") as stream:
        for step in range(num_steps):
            lines = [
                msgspec.json.encode(
                    {
                        "step": step,
                        "request": f"r{number}-00000000",
                        "num_actual_tokens": NUM_REQUESTS,
                        "max_query_len": 1,
                        "query_start_loc": number,
                        "max_seq_len": PROMPT_TOKENS + step,
                        "seq_lens": PROMPT_TOKENS + step,
                        "slot_mapping": number * 10_000 + step,
                        "block_table": list(range(number * 100, number * 100 + 3)),
                    }
                )
                for number in range(NUM_REQUESTS)
            ]
            stream.write(b"\n".join(lines) + b"\n")
    decode = msgspec.json.Decoder().decode
    started = time.perf_counter()
    with path.open("rb") as stream:
        for line in stream:
            decode(line)
    return time.perf_counter() - started, path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--request-steps", type=int, default=1_000_000)
    num_steps = parser.parse_args().request_steps // NUM_REQUESTS
    with tempfile.TemporaryDirectory() as scratch:
        size = write_run(Path(scratch) / "run", num_steps)
        write_run(Path(scratch) / "short", num_steps // 10)
        _, short_peak = read_by_command(Path(scratch) / "short")
        seconds, peak = read_by_command(Path(scratch) / "run")
        plain_steps = num_steps // 10
        plain_seconds, plain_bytes = plain_json(Path(scratch) / "plain.jsonl", plain_steps)
    request_steps = num_steps * NUM_REQUESTS
    plain_rate = plain_steps * NUM_REQUESTS / plain_seconds
    result = {
        "benchmark": "read",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "request_steps": request_steps,
        "file_mb": round(size / 1e6, 2),
        "seconds": round(seconds, 3),
        "request_steps_per_second": round(request_steps / seconds),
        "peak_memory_mb": round(peak / 1e6, 1),
        "peak_memory_of_a_tenth_mb": round(short_peak / 1e6, 1),
        "plain_json_mb_per_second": round(plain_bytes / plain_seconds / 1e6, 1),
        "plain_json_request_steps_per_second": round(plain_rate),
        "plain_json_at_100_mb_per_second": round(
            100e6 / (plain_bytes / (plain_steps * NUM_REQUESTS))
        ),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
