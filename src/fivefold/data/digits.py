"""Handwritten digits, inside scikit-learn: 1,797 real images, nothing to download.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI (1998), test part.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fivefold.data.images import ImageArrays, Transform, need
from fivefold.errors import DataError

__all__ = ["Digits"]

_TEST_SAMPLES = 360


class Digits(ImageArrays):
    """Samples (image, digit): float32 1 x 8 x 8 in [0, 1], label 0 to 9.

    1,437 images to train and 360 to test, a fixed split in which every digit has its proportion.

    Raises:
        DataError: scikit-learn is not installed, or came without the images.
    """

    def __init__(self, *, train: bool = True, transform: Transform | None = None) -> None:
        table = np.loadtxt(_file(), delimiter=",", dtype=np.uint8)  # 64 pixels and the digit
        labels = table[:, -1].astype(np.int64)
        held_out = _held_out(labels, _TEST_SAMPLES)
        chosen = np.setdiff1d(np.arange(len(labels)), held_out) if train else held_out
        # Grey levels are 0 to 16, so that a sixteenth of each is exact in float32.
        images = table[chosen, :-1].reshape(-1, 8, 8).astype(np.float32) / np.float32(16)
        super().__init__(
            torch.from_numpy(images).unsqueeze(1),
            labels[chosen].tolist(),
            [str(digit) for digit in range(10)],
            transform,
        )


def _file() -> Path:
    """Found without importing scikit-learn, which takes each rank a second."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        missing = ModuleNotFoundError("No module named 'sklearn'")
        raise need("scikit-learn", "for the handwritten digits that come with it", missing)
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():
        raise DataError(
            f"{file} is missing: this scikit-learn came without the handwritten digits; "
            "pip install --force-reinstall scikit-learn brings them"
        )
    return file


def _held_out(labels: np.ndarray, count: int) -> np.ndarray:
    """`count` indices, ascending: the same share of each class, chosen by a hash of the index.

    Shares are rounded down, and the classes that lose most by that give one more each.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    exact = sizes * count / len(labels)
    quota = np.floor(exact).astype(np.int64)
    losers = np.argsort(quota - exact, kind="stable")[: count - quota.sum()]
    quota[losers] += 1
    chosen: list[int] = []
    for label, some in zip(classes, quota, strict=True):
        members = sorted(np.flatnonzero(labels == label).tolist(), key=_draw)
        chosen += members[: int(some)]
    return np.array(sorted(chosen), dtype=np.int64)


def _draw(index: int) -> bytes:
    return blake2b(index.to_bytes(8, "little"), person=b"fivefold digits").digest()
