"""Handwritten digits, inside scikit-learn: 1,797 real images, nothing to download.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI (1998), test part.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from fivefold.data.images import ImageArrays, Transform, need

__all__ = ["Digits"]

_TEST_SAMPLES = 360


class Digits(ImageArrays):
    """Samples (image, digit): float32 1 x 8 x 8 in [0, 1], label 0 to 9.

    1,437 images to train and 360 to test, a fixed split in which every digit has its proportion.

    Raises:
        DataError: scikit-learn is not installed.
    """

    def __init__(self, *, train: bool = True, transform: Transform | None = None) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise need(
                "scikit-learn", "for the handwritten digits that come with it", error
            ) from error
        everything: Any = load_digits()
        labels = np.asarray(everything.target, dtype=np.int64)
        held_out = _held_out(labels, _TEST_SAMPLES)
        chosen = np.setdiff1d(np.arange(len(labels)), held_out) if train else held_out
        # Grey levels are 0 to 16, so that a sixteenth of each is exact in float32.
        images = np.asarray(everything.images, dtype=np.float32)[chosen] / np.float32(16)
        super().__init__(
            torch.from_numpy(images).unsqueeze(1),
            labels[chosen].tolist(),
            [str(digit) for digit in range(10)],
            transform,
        )


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
