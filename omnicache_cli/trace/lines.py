"""Lines of a stream that may never end one: a device, or a file of another kind."""

from collections.abc import Iterator
from typing import IO

from omnicache_cli.errors import BadInputError

MAX_LINE_BYTES = 1 << 28
"""A longer line is no JSON line: a file of another kind must not fill the memory."""


def bounded_lines(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """The lines, with their ends. BadInputError, with `name` for the stream: one is too long."""
    while line := stream.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise BadInputError(
                f"{name} has a line of more than {MAX_LINE_BYTES:,} bytes; name JSON lines"
            )
        yield line
