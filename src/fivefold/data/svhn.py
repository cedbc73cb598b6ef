"""SVHN, street-view house numbers, from its standard cropped-digit files on disk ("format 2").

Source: Y. Netzer et al., Reading Digits in Natural Images with Unsupervised Feature Learning (2011).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fivefold.data.images import ImageArrays, Transform, need
from fivefold.errors import DataError

__all__ = ["Svhn"]

_PAGE = "http://ufldl.stanford.edu/housenumbers"


class Svhn(ImageArrays):
    """Samples (image, digit): uint8 3 x 32 x 32, label 0 to 9; 73,257 to train, 26,032 to test.

    Reads `root/train_32x32.mat` or `root/test_32x32.mat`, in which label 10 means the digit 0.

    Raises:
        DataError: the file is missing, damaged or not SVHN, or scipy is not installed.
    """

    def __init__(
        self, root: str | Path, *, train: bool = True, transform: Transform | None = None
    ) -> None:
        path = Path(root) / ("train_32x32.mat" if train else "test_32x32.mat")
        if not path.is_file():
            raise DataError(
                f"SVHN is not in {path.parent}: no {path.name}; put train_32x32.mat (182 MB) and "
                f'test_32x32.mat (64 MB) there, "Format 2: cropped digits" of {_PAGE}'
            )
        images, labels = _arrays(path)
        super().__init__(images, labels, [str(digit) for digit in range(10)], transform)


def _arrays(path: Path) -> tuple[torch.Tensor, list[int]]:
    content = _loaded(path)
    images, labels = content.get("X"), content.get("y")
    if not (
        isinstance(images, np.ndarray)
        and isinstance(labels, np.ndarray)
        and images.dtype == np.uint8
        and images.shape == (32, 32, 3, labels.size)
        and ((labels >= 1) & (labels <= 10)).all()
    ):
        raise DataError(
            f"{path} is truncated or not a file of SVHN's format 2: it should hold X "
            f"(32 x 32 x 3 x N, uint8) and y (N numbers from 1 to 10); get it again from {_PAGE}"
        )
    ordered = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
    return torch.from_numpy(ordered), (labels.reshape(-1).astype(np.int64) % 10).tolist()


def _loaded(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise need("scipy", "to read .mat files", error) from error
    try:
        return loadmat(path, variable_names=["X", "y"])
    except Exception as error:
        # A damaged file can raise nearly anything.
        raise DataError(
            f"{path} cannot be read, it is truncated or damaged ({type(error).__name__}: {error}); "
            f"get it again from {_PAGE}"
        ) from error
