"""The exact path as a process of its own: a JSON line per question on stdin, one per answer.

Run by `apart` with "lean" or "whole" as its only argument. What vLLM itself prints goes to stderr.
"""

import gc
import os
import sys

from omnicache_cli.engine.kv_size.accounting import Counter, ExactOptions
from omnicache_cli.engine.kv_size.lean import leave_out
from omnicache_cli.errors import EngineFailedError, EngineMissingError


def main() -> None:
    import msgspec

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    gc.disable()  # importing makes a million objects and no rubbish: a fifth of the time
    if sys.argv[1] == "lean":
        leave_out()
    counter = Counter()
    for line in sys.stdin:
        folder, values = msgspec.json.decode(line)
        options = msgspec.convert(values, ExactOptions)
        found: dict[str, object]
        try:
            found = {"answer": counter.ask(folder, options)}
        except EngineMissingError as error:
            found = {"missing": str(error)}
        except EngineFailedError as error:
            found = {"failed": str(error)}
        answers.write(msgspec.json.encode(found).decode() + "\n")
        answers.flush()
    os._exit(0)  # taking vLLM and torch apart again takes seconds


if __name__ == "__main__":
    main()
