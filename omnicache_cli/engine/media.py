"""Reads the pictures and the sound of a prompt, as vLLM takes them."""

from pathlib import Path
from typing import Any

from omnicache_cli import advice
from omnicache_cli.engine.options import first_line
from omnicache_cli.errors import BadInputError, EngineMissingError


def read_image(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise BadInputError(f"cannot read the image {path}: {first_line(error)}") from error


def read_audio(path: Path) -> Any:
    """(samples, sampling rate in Hz), mono."""
    try:
        import soundfile
    except ModuleNotFoundError as error:
        raise EngineMissingError(
            f"cannot read the audio {path}: soundfile is not installed; "
            f"{advice.install('soundfile')}"
        ) from error
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        raise BadInputError(f"cannot read the audio {path}: {first_line(error)}") from error
    return samples.mean(axis=1), rate
