"""The transform that peers are compared with, in Pillow and numpy: their environments have no torch."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path

import numpy as np
from PIL import Image

PIXELS = 32
BATCH = 32
LEAST_AREA = 0.08
ASPECTS = (3 / 4, 4 / 3)


def part(width: int, height: int) -> tuple[float, float, float, float]:
    """A random part of an image: 8 % of its area to all of it, sides from 3:4 to 4:3."""
    area = random.uniform(LEAST_AREA, 1.0) * width * height
    aspect = math.exp(random.uniform(*(math.log(side) for side in ASPECTS)))
    wide = min(math.sqrt(area * aspect), width)
    high = min(math.sqrt(area / aspect), height)
    left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
    return left, top, left + wide, top + high


def read(path: Path, pixels: int = PIXELS) -> np.ndarray:
    """A JPEG file decoded, and a random part of it resized: pixels x pixels x 3, uint8."""
    image = Image.open(io.BytesIO(path.read_bytes()))
    image = image if image.mode == "RGB" else image.convert("RGB")
    box = part(*image.size)
    return np.asarray(image.resize((pixels, pixels), Image.Resampling.BILINEAR, box=box))
