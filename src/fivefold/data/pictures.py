"""Picture files: a quick look at whether a file is whole, and reading one to a square of pixels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fivefold.data.images import need
from fivefold.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["SUFFIXES", "check", "decoded", "read"]

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
"""what names of pictures end in, whatever their case"""

# How files begin, and how whole ones end (empty where the format has no fixed ending).
_SIGNATURES = (
    (b"\xff\xd8\xff", b"\xff\xd9"),
    (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"),
    (b"GIF8", b";"),
    (b"BM", b""),
    (b"RIFF", b""),
    (b"II*\0", b""),
    (b"MM\0*", b""),
    (b"P5", b""),
    (b"P6", b""),
)
_TAIL = 8

# Modes of more than 8 bits a channel; Pillow's conversion to RGB clips them to white without a word.
_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")


def check(path: Path) -> None:
    """Raise `DataError` if `path` is evidently no picture, or is truncated.

    Reads a few bytes at both ends. A file that does not end as its format does is decoded to be sure:
    some cameras append bytes of their own.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_TAIL)
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            tail = file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if not size:
        raise DataError(f"{path} is empty (0 bytes); delete it or get it again")
    ending = next((end for start, end in _SIGNATURES if head.startswith(start)), None)
    if ending is None:
        raise DataError(
            f"{path} is not a picture: it begins with {head[:4]!r}, as no known format does; delete it "
            "or get it again"
        )
    if not tail.endswith(ending):
        decoded(path)


def read(path: Path, size: int) -> np.ndarray:
    """The picture as uint8, `size` x `size` x 3 (RGB): shorter side resized to `size`, centre cropped.

    Raises:
        DataError: Pillow is not installed, or the file is missing, truncated, damaged or too deep.
    """
    image = decoded(path)
    from PIL import Image

    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def decoded(path: Path) -> Image.Image:
    """The picture, RGB, in its own size. Raises `DataError` as `read` does."""
    try:
        from PIL import Image
    except ImportError as error:
        raise need("Pillow", "to read pictures", error) from error
    try:
        with Image.open(path) as image:
            if image.mode in _DEEP:
                raise DataError(
                    f"{path} has more than 8 bits per channel (Pillow's mode {image.mode}); "
                    "convert it to 8 bits, with the range of values that matters to you"
                )
            return image.convert("RGB")
    except DataError:
        raise
    except Exception as error:
        # A damaged file can raise nearly anything.
        raise DataError(
            f"{path} cannot be decoded, it is truncated or damaged ({type(error).__name__}: {error}); "
            "delete it or get it again"
        ) from error
