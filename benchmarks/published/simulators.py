"""Two published cache simulators over a workload of block ids: hits of its second half, seconds.

Run by `benchmarks/simulate.py` in a Python that has them, in an environment of their own:
pip install kvcache-simulator libcachesim.

Usage: python simulators.py HASHES.jsonl BLOCKS BLOCK_TOKENS
"""

import json
import sys
import time


def kvcache_simulator(path: str, num_blocks: int) -> tuple[int, float]:
    """Hit tokens of its LRU; the first half of the requests warms it up."""
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_file

    start = time.process_time()
    plan = build_execution_plan(parse_trace_file(path))
    hits = simulate_policy(plan, "lru", num_blocks).hitTokens
    return hits, time.process_time() - start


def libcachesim(path: str, num_blocks: int) -> tuple[int, float]:
    """Hit blocks of its LRU, block by block; of each request those before its first miss."""
    import libcachesim

    start = time.process_time()
    cache = libcachesim.LRU(cache_size=num_blocks)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = 0
    with open(path, encoding="utf-8") as lines:
        workload = [json.loads(line)["hash_ids"] for line in lines]
    for number, ids in enumerate(workload):
        is_prefix = True
        for one in ids:
            request.obj_id = one
            is_prefix &= cache.get(request)
            hits += is_prefix and number >= len(workload) // 2
    return hits, time.process_time() - start


def main() -> None:
    path, num_blocks, block_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tokens, first_seconds = kvcache_simulator(path, num_blocks)
    blocks, second_seconds = libcachesim(path, num_blocks)
    found = {
        "kvcache-simulator": {"hit_blocks": tokens / block_tokens, "seconds": first_seconds},
        "libcachesim": {"hit_blocks": blocks, "seconds": second_seconds},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
