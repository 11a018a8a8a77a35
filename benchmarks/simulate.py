"""How fast `omnicache simulate` is beside a bare loop over vLLM's own Scheduler.

One workload of token ids (prompts of 612 tokens, 512 of them shared with others, B=16), three ways
in one process, in turn: the bare Scheduler, `simulate` from a JSON-lines file, and the bare
KVCacheManager. All must hit the same. Times are seconds of the CPU. Then a workload of hash ids at
two lengths, each in a process of its own, for the memory. With --published PYTHON, an interpreter
that has kvcache-simulator and libcachesim, their hits and times stand beside it.

Prints one JSON object. Run: python benchmarks/simulate.py [--requests N] [--long N]
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
SHARED_TOKENS = 512
OWN_TOKENS = 100
NUM_PREFIXES = 64
HERE = Path(__file__).parent


def prompts(count: int) -> list[list[int]]:
    chance = random.Random(1)
    prefixes = [
        [chance.randrange(1, 150_000) for _ in range(SHARED_TOKENS)] for _ in range(NUM_PREFIXES)
    ]
    return [
        chance.choice(prefixes) + [chance.randrange(1, 150_000) for _ in range(OWN_TOKENS)]
        for _ in range(count)
    ]


def plan_of(num_blocks: int) -> Any:
    from omnicache_cli.engine.modelfree.scheduler import GroupPlan, PoolPlan

    return PoolPlan((GroupPlan("full", BLOCK_SIZE),), num_blocks=num_blocks, max_num_seqs=256)


def bare_scheduler(
    workload: list[list[int]], num_blocks: int, concurrency: int, output_tokens: int
) -> tuple[int, float]:
    """Hit tokens, seconds: nothing but vLLM's own objects."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from omnicache_cli.engine.modelfree.scheduler import build

    scheduler, hasher, _ = build(plan_of(num_blocks), log_stats=False)
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    waiting = iter(enumerate(workload))
    running, hits = 0, 0
    start = time.process_time()
    exhausted = False
    while running or not exhausted:
        while running < concurrency and not exhausted:
            one = next(waiting, None)
            if one is None:
                exhausted = True
                break
            number, ids = one
            scheduler.add_request(Request(str(number), ids, params, None, block_hasher=hasher))
            running += 1
        if not running:
            break
        output = scheduler.schedule()
        hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = scheduler.requests[name]
            sampled.append([0] if request.num_computed_tokens >= request.num_tokens else [])
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        scheduler.update_from_output(output, ran)
        running -= len(scheduler.finished_req_ids)
    return hits, time.process_time() - start


def simulate(path: Path, num_blocks: int, concurrency: int, first: int = 0) -> tuple[int, float]:
    """The same by what the command runs, from reading the file to the totals.

    Hits of the requests from number `first` on.
    """
    from omnicache_cli.engine.modelfree.replay import ReplayPool, SharedHashes
    from omnicache_cli.simulate.forms import Lines, Reading
    from omnicache_cli.simulate.replay import Arrivals
    from omnicache_cli.simulate.source import open_lines
    from omnicache_cli.simulate.study import Setup, Size, run_study

    pool = ReplayPool(plan_of(num_blocks), SharedHashes())
    setup = Setup((Size(num_blocks),), Arrivals(concurrency=concurrency), lists_requests=first > 0)
    start = time.process_time()
    with open_lines(str(path)) as lines:
        study = run_study(iter(Lines(lines, str(path), Reading())), setup, lambda _: pool)
    hits = study.points[0].replay.totals.hit_tokens
    hits -= sum(one.hit_tokens for one in study.listed[:first])
    return hits, time.process_time() - start


def bare_manager(workload: list[list[int]], num_blocks: int) -> tuple[int, float]:
    """vLLM's KVCacheManager alone: look up, allocate, free; one by one, no output."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from omnicache_cli.engine.modelfree.scheduler import build

    scheduler, hasher, _ = build(plan_of(num_blocks), log_stats=False)
    manager = scheduler.kv_cache_manager
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    hits = 0
    start = time.process_time()
    for number, ids in enumerate(workload):
        request = Request(str(number), ids, params, None, block_hasher=hasher)
        blocks, computed, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(
            request,
            len(ids) - computed,
            num_new_computed_tokens=computed,
            new_computed_blocks=blocks,
        )
        hits += computed
        manager.free(request)
    return hits, time.process_time() - start


def compared(count: int, num_blocks: int, concurrency: int, output_tokens: int, rounds: int) -> Any:
    """Requests per second of both, in turn; their ratio, and that of two bare loops."""
    workload = prompts(count)
    bare, ours, ratios, equals = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        lines = (
            json.dumps({"prompt_token_ids": ids, "max_tokens": output_tokens}) for ids in workload
        )
        path.write_text("\n".join(lines))
        for _ in range(rounds):
            expected, seconds = bare_scheduler(workload, num_blocks, concurrency, output_tokens)
            hits, own_seconds = simulate(path, num_blocks, concurrency)
            again = bare_scheduler(workload, num_blocks, concurrency, output_tokens)[1]
            if hits != expected:
                raise SystemExit(f"simulate hits {hits} tokens, the bare Scheduler {expected}")
            bare.append(count / seconds)
            ours.append(count / own_seconds)
            ratios.append((seconds + again) / 2 / own_seconds)
            equals.append(seconds / again)
    return {
        "concurrency": concurrency,
        "output_tokens": output_tokens,
        "hit_tokens": hits,
        "scheduler_requests_per_second": round(statistics.median(bare)),
        "simulate_requests_per_second": round(statistics.median(ours)),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(one, 3) for one in ratios],
        "scheduler_against_itself": [round(one, 3) for one in equals],
    }


def hashed(count: int) -> Iterator[str]:
    """Conversations by hash ids: 64 to 128 tokens, the first 48 shared by a 1,000th of them."""
    chance = random.Random(2)
    for number in range(count):
        length = chance.randint(64, 128)
        shared = [3 * chance.randrange(1000) + index for index in range(3)]
        own = [10_000 + 8 * number + index for index in range(-(-length // BLOCK_SIZE) - 3)]
        yield json.dumps({"input_length": length, "output_length": 1, "hash_ids": shared + own})


def long_log(count: int) -> Any:
    """Peak memory and time of a log that is never whole in memory, in this process."""
    from omnicache_cli.engine.modelfree.replay import ReplayPool, SharedHashes
    from omnicache_cli.simulate.forms import Lines, Reading
    from omnicache_cli.simulate.study import Setup, Size, run_study

    shared = SharedHashes()
    lines = (line.encode() for line in hashed(count))
    start = time.process_time()
    study = run_study(
        iter(Lines(lines, "log", Reading(hash_tokens=BLOCK_SIZE))),
        Setup((Size(4096),)),
        lambda num_blocks: ReplayPool(plan_of(num_blocks), shared),
    )
    return {
        "requests": study.num_requests,
        "hit_rate": study.points[0].hit_rate,
        "cpu_seconds": round(time.process_time() - start, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def published(python: str, count: int, num_blocks: int) -> Any:
    """The same workload as block ids, at two published simulators and here, one at a time.

    Hits of its second half: kvcache-simulator counts no other.
    """
    workload = prompts(count)
    ids: dict[tuple[int, ...], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hashes.jsonl"
        with path.open("w") as file:
            for prompt in workload:
                ends = range(BLOCK_SIZE, len(prompt) + BLOCK_SIZE, BLOCK_SIZE)
                chain = [ids.setdefault(tuple(prompt[:end]), len(ids)) for end in ends]
                line = {"input_length": len(prompt), "hash_ids": chain, "block_size": BLOCK_SIZE}
                file.write(json.dumps(line) + "\n")
        tokens, seconds = simulate(path, num_blocks, 1, count // 2)
        script = str(HERE / "published" / "simulators.py")
        ran = subprocess.run(
            [python, script, str(path), str(num_blocks), str(BLOCK_SIZE)],
            check=True,
            capture_output=True,
            text=True,
        )
    found = json.loads(ran.stdout.splitlines()[-1])
    found["simulate"] = {"hit_blocks": tokens / BLOCK_SIZE, "seconds": seconds}
    return {"num_blocks": num_blocks, "requests": count, **found}


def in_a_process(*arguments: str) -> Any:
    ran = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=100_000, help="requests of the long log")
    parser.add_argument("--published", metavar="PYTHON")
    parser.add_argument("--only-long", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_PLUGINS", "omnicache_cli")
    from omnicache_cli.engine.options import prepare_environment

    prepare_environment(engine_process=False)
    if options.only_long:
        print(json.dumps(long_log(options.only_long)))
        return
    count, num_blocks, rounds = options.requests, options.blocks, options.rounds
    one_by_one = compared(count, num_blocks, 1, 1, rounds)
    hits, seconds = bare_manager(prompts(count), num_blocks)
    if hits != one_by_one["hit_tokens"]:
        raise SystemExit(f"the bare KVCacheManager hits {hits} tokens")
    result = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "requests": count,
        "prompt_tokens": SHARED_TOKENS + OWN_TOKENS,
        "num_blocks": num_blocks,
        "one_by_one": one_by_one,
        "eight_at_a_time": compared(count // 4, num_blocks, 8, 32, rounds),
        "kv_cache_manager_requests_per_second": round(count / seconds),
        "long_logs": [
            in_a_process("--only-long", str(length))
            for length in (options.long // 10, options.long)
            if length
        ],
        "published": published(options.published, count, num_blocks) if options.published else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
