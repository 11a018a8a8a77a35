"""Writes a timeline as one JSON object of the Trace Event Format, an event a line.

The same run gives the same bytes: nothing of the machine or of the moment of writing is in them.
"""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

import msgspec

from omnicache_cli.export.timeline import Timeline

FLUSH_BYTES = 1 << 18


def write_timeline(timeline: Timeline, stream: BinaryIO) -> int:
    """Write all of it; the number of events."""
    encoder = msgspec.json.Encoder()
    buffer = bytearray(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    num_events = 0
    for event in timeline.events():
        if num_events:
            buffer += b",\n"
        encoder.encode_into(event, buffer, len(buffer))
        num_events += 1
        if len(buffer) >= FLUSH_BYTES:
            stream.write(buffer)
            buffer.clear()
    buffer += b'\n],"otherData":' + encoder.encode(timeline.other_data()) + b"}\n"
    stream.write(buffer)
    return num_events


@contextmanager
def compressed(stream: BinaryIO) -> Iterator[BinaryIO]:
    """What is written comes out as gzip, without a name and a date in it."""
    with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=stream, mtime=0) as packed:
        yield cast(BinaryIO, packed)
