"""Writes PNG test images: the same bytes for the same arguments, on every machine.

Standard library only. Pixels are stored uncompressed, because two zlib builds may compress one
input to different bytes. It does not know what a model makes of an image.
"""

import hashlib
import struct
import zlib
from pathlib import Path

TILE_PIXELS = 7  # a 14-pixel patch of the image model then holds four colours
_STORED_BLOCK_BYTES = 65_535  # the longest that deflate can store


def write_test_image(path: Path, *, width: int, height: int, seed: int) -> None:
    """A mosaic of random colours, 8-bit RGB, about 3 * width * height bytes. Replaces `path`."""
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width}x{height} pixels has no pixels")
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB, not interlaced
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", _stored(_rows(width, height, seed)))
        + _chunk(b"IEND", b"")
    )


def _rows(width: int, height: int, seed: int) -> bytes:
    """Every row of pixels, each behind its filter byte (0: unfiltered)."""
    num_columns = -(-width // TILE_PIXELS)
    num_bands = -(-height // TILE_PIXELS)
    colours = hashlib.shake_256(f"omnicache image {seed}".encode()).digest(
        3 * num_columns * num_bands
    )
    rows = []
    for band in range(num_bands):
        first = band * num_columns
        tiles = (colours[3 * i : 3 * i + 3] for i in range(first, first + num_columns))
        pixels = b"".join(colour * TILE_PIXELS for colour in tiles)
        rows += [b"\0" + pixels[: 3 * width]] * min(TILE_PIXELS, height - band * TILE_PIXELS)
    return b"".join(rows)


def _stored(data: bytes) -> bytes:
    """`data` as a zlib stream of stored blocks."""
    stream = [b"\x78\x01"]
    for start in range(0, len(data), _STORED_BLOCK_BYTES):
        block = data[start : start + _STORED_BLOCK_BYTES]
        is_last = start + _STORED_BLOCK_BYTES >= len(data)
        stream += [struct.pack("<BHH", is_last, len(block), len(block) ^ 0xFFFF), block]
    return b"".join([*stream, struct.pack(">I", zlib.adler32(data))])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
