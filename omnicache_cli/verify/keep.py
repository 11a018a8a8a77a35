"""Rows that failed, kept on disk as safetensors: `expected`, `found`, `positions`."""

import os
import re
from pathlib import Path

from omnicache_cli.errors import RefusedOutputError
from omnicache_cli.verify.results import Verification

SUFFIX = ".safetensors"
_UNSAFE = re.compile(r"[^\w.-]+")


def write_rows(result: Verification, folder: Path) -> int:
    """One file for each corrupt pair that has rows; how many. Files are private.

    RefusedOutputError: the folder cannot be made or written.
    """
    from safetensors.torch import save

    written = 0
    try:
        for (scenario, request, key), rows in result.failing_rows.items():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = _UNSAFE.sub("_", f"{scenario}.{request}.{key}") + SUFFIX
            content = save(rows, {"scenario": scenario, "request": request, "key": key})
            temporary = folder / f".{name}.{os.getpid()}"
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            temporary.replace(folder / name)
            written += 1
    except OSError as error:
        raise RefusedOutputError(
            f"cannot write into {folder}: {error.strerror or error}; name another folder"
        ) from error
    return written
