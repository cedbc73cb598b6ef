"""Data in the file formats of well-known sets, made here: as many samples as are asked for."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["cifar10", "svhn", "tiny_imagenet"]

_BATCHES = 5
_TINY = 64
"""pixels of a side"""


def cifar10(root: Path, train: int, test: int) -> None:
    """The five batches and the test batch of CIFAR-10, pickled as the originals are."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [f"data_batch_{number}" for number in range(1, _BATCHES + 1)]
    for number, name in enumerate((*names, "test_batch")):
        count = test if name == "test_batch" else train // _BATCHES
        images = _images(count, 32, number).transpose(0, 3, 1, 2).reshape(count, -1)
        content: dict[bytes, Any] = {
            b"batch_label": name.encode(),
            b"labels": [index % 10 for index in range(count)],
            b"data": np.ascontiguousarray(images),
            b"filenames": [b"%d.png" % index for index in range(count)],
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def svhn(root: Path, train: int, test: int) -> None:
    """The two .mat files of SVHN's cropped digits."""
    from scipy.io import savemat

    root.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        images = _images(count, 32, count).transpose(1, 2, 3, 0)
        labels = (np.arange(count, dtype=np.uint8) % 10 + 1)[:, None]  # 10 means the digit 0
        content = {"X": images, "y": labels}
        savemat(root / f"{name}_32x32.mat", content, do_compression=True)


def tiny_imagenet(root: Path, train: int, test: int, classes: int = 10) -> None:
    """A folder per class of JPEG files of 64x64 pixels, as Tiny ImageNet has them."""
    for name, count in (("train", train), ("val", test)):
        pictures = _images(count, _TINY, count)
        for index in range(count):
            folder = root / name / f"n{index % classes:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pictures[index]).save(folder / f"{index}.JPEG", quality=90)


def _images(count: int, side: int, seed: int) -> np.ndarray:
    """`count` x `side` x `side` x 3, uint8: smooth ones with noise, so that files have the usual size."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (count, 4, 4, 3))
    smooth = np.kron(coarse, np.ones((1, side // 4, side // 4, 1)))
    return (smooth + draw.normal(0, 12, smooth.shape)).clip(0, 255).astype(np.uint8)
