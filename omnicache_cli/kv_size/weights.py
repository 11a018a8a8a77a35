"""Bytes of a checkpoint's weights from its safetensors headers; no tensor is read."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from omnicache_cli.errors import BadInputError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes in the files: matrices, and vectors, which every tensor-parallel rank holds whole."""

    matrix_bytes: int
    vector_bytes: int
    num_files: int

    @property
    def total_bytes(self) -> int:
        return self.matrix_bytes + self.vector_bytes


def read_weights(folder: Path) -> Weights | None:
    """None where the folder has no safetensors; BadInputError: a file that is damaged."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    matrices = vectors = 0
    for path in files:
        for name, entry in _header(path).items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            if len(entry["shape"]) > 1 and prod(entry["shape"]):
                matrices += end - start
            else:
                vectors += end - start
    return Weights(matrices, vectors, len(files))


def _header(path: Path) -> dict[str, Any]:
    """8 bytes of length, little-endian, then JSON: the safetensors format."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("a header that is no object")
    except (OSError, ValueError, struct.error) as error:
        raise BadInputError(
            f"{path} is no readable safetensors file: {error}; fetch it again, or give --weights"
        ) from None
    return header
