"""Writes test sounds: the same bytes for the same arguments, on every machine."""

import hashlib
import wave
from pathlib import Path

SAMPLES_PER_SECOND = 16_000


def write_test_sound(path: Path, *, seconds: int, seed: int) -> None:
    """Noise, mono, 16 bits, 16 kHz: about 32,000 * seconds bytes. Replaces `path`."""
    noise = hashlib.shake_256(f"omnicache sound {seed}".encode())
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(SAMPLES_PER_SECOND)
        sound.writeframes(noise.digest(2 * SAMPLES_PER_SECOND * seconds))
