"""Test images: real PNGs, the same bytes every time. Read back here without an image library."""

import hashlib
import struct
import zlib
from pathlib import Path

import pytest

from omnicache_cli.engine.tiny_images import write_test_image


def chunks(png: bytes) -> dict[bytes, bytes]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    found, position = {}, 8
    while position < len(png):
        (length,) = struct.unpack_from(">I", png, position)
        kind_and_data = png[position + 4 : position + 8 + length]
        (checksum,) = struct.unpack_from(">I", png, position + 8 + length)
        assert zlib.crc32(kind_and_data) == checksum
        found[kind_and_data[:4]] = kind_and_data[4:]
        position += 12 + length
    return found


@pytest.mark.parametrize(("width", "height"), [(1, 1), (50, 31), (336, 224)])
def test_an_image_is_a_png_with_every_row(tmp_path: Path, width: int, height: int) -> None:
    write_test_image(tmp_path / "image.png", width=width, height=height, seed=1)

    found = chunks((tmp_path / "image.png").read_bytes())
    assert list(found) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", found[b"IHDR"]) == (width, height, 8, 2, 0, 0, 0)
    assert len(zlib.decompress(found[b"IDAT"])) == height * (1 + 3 * width)


def test_the_bytes_hang_on_the_arguments_alone(tmp_path: Path) -> None:
    write_test_image(tmp_path / "image.png", width=30, height=20, seed=7)

    digest = hashlib.sha256((tmp_path / "image.png").read_bytes()).hexdigest()
    assert digest == "c89b8bea7ed6d8f704ac7e1ccb269970d39f4fa0b070431ff109b36e54415f8d"


def test_another_seed_is_another_picture(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_test_image(tmp_path / f"{seed}.png", width=30, height=20, seed=seed)

    assert (tmp_path / "1.png").read_bytes() != (tmp_path / "2.png").read_bytes()


def test_an_image_without_pixels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0x5 pixels"):
        write_test_image(tmp_path / "image.png", width=0, height=5, seed=1)
