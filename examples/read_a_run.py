"""Prints how many prompt tokens of each request came from the prefix cache.

Usage: python examples/read_a_run.py RUN          (RUN: a folder of `omnicache trace -o`)

The reader needs no vLLM. A run is read as a stream, so a long one costs no more memory.
"""

import sys
from pathlib import Path

from omnicache_cli.errors import BadTraceError
from omnicache_cli.trace.run import Run


def print_hits(folder: Path) -> None:
    run = Run(folder)
    print(f"{'request':<12}{'prompt tokens':>14}{'hit tokens':>12}  admitted in step")
    for step in run.steps():
        for share in step.scheduled:
            if share.hit_tokens is None or share.resumed:
                continue  # admitted earlier, or back after a preemption
            request = share.request
            print(
                f"{request.external_id:<12}{request.record.num_prompt_tokens:>14}"
                f"{share.hit_tokens:>12}  {step.number}"
            )
    for request in run.never_scheduled:
        print(f"{request.external_id:<12}{request.record.num_prompt_tokens:>14}{'-':>12}  never")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        print_hits(Path(sys.argv[1]))
    except BadTraceError as error:
        sys.exit(str(error))
