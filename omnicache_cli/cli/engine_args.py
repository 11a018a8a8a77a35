"""Engine arguments from a command line: options by vLLM's names, and --engine KEY=VALUE."""

from collections.abc import Iterable, Mapping
from typing import Any

from omnicache_cli.errors import UsageError


def engine_args(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of `names` that were given, and the KEY=VALUE pairs of `engine`. UsageError: a pair is
    none, or says again what was said."""
    from omnicache_cli.engine.options import parse_engine_value

    args = {name: given[name] for name in names if given[name] is not None}
    for pair in given["engine"] or []:
        key, separator, value = pair.partition("=")
        name = key.strip().replace("-", "_")
        if not separator or not name:
            raise UsageError(f"--engine {pair!r} is not KEY=VALUE; write --engine seed=1")
        if name in args:
            raise UsageError(f"engine argument {name} is given twice; give it once")
        args[name] = parse_engine_value(value)
    return args
