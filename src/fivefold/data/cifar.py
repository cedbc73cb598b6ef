"""CIFAR-10 from its standard Python files on disk.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fivefold.data.images import ImageArrays, Transform
from fivefold.errors import DataError
from fivefold.pickles import CallResult, Name, NoData, read_pickle

__all__ = ["Cifar10"]

_FOLDER = "cifar-10-batches-py"
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


class Cifar10(ImageArrays):
    """Samples (image, label): uint8 3 x 32 x 32, label 0 to 9; 50,000 to train, 10,000 to test.

    Reads `root/cifar-10-batches-py/`, or `root` if the files lie there. The files are pickles; they are read
    as data (`fivefold.pickles`), so that a file from a stranger cannot run code.

    Raises:
        DataError: files are missing, damaged or not CIFAR-10; names them.
    """

    def __init__(
        self, root: str | Path, *, train: bool = True, transform: Transform | None = None
    ) -> None:
        batches = [_batch(path) for path in _files(Path(root), train)]
        images = np.concatenate([images for images, _ in batches])
        labels = [label for _, labels in batches for label in labels]
        super().__init__(torch.from_numpy(images), labels, _CLASSES, transform)


def _files(root: Path, train: bool) -> list[Path]:
    here = any((root / name).is_file() for name in (*_TRAIN, *_TEST))
    folder = root if here else root / _FOLDER
    paths = [folder / name for name in (_TRAIN if train else _TEST)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise DataError(
            f"CIFAR-10 is not in {folder}: no {', '.join(missing)}; put the six files data_batch_1 to "
            "data_batch_5 and test_batch there (31 MB each, from cifar-10-python.tar.gz, 170 MB, the "
            f'"CIFAR-10 python version" of {_PAGE})'
        )
    return paths


def _batch(path: Path) -> tuple[np.ndarray, list[int]]:
    """Images, N x 3 x 32 x 32 uint8, and N labels of one file."""
    content = _unpickled(path)
    known: dict[Any, Any] = content if isinstance(content, dict) else {}
    images, labels = _images(known.get(b"data")), known.get(b"labels")
    if not (
        images is not None
        and isinstance(labels, list)
        and len(images) == len(labels)
        and all(isinstance(label, int) and 0 <= label < len(_CLASSES) for label in labels)
    ):
        raise DataError(
            f"{path} is not a CIFAR-10 batch: it should hold b'data' (N x 3072, uint8) and b'labels' "
            f"(N numbers from 0 to 9); get it again from {_PAGE}"
        )
    return images, labels


def _unpickled(path: Path) -> Any:
    def check(name: Name) -> None:
        if str(name) not in _NAMES:
            raise DataError(
                f"{path} is not a CIFAR-10 batch: reading it would call {name!s:.80}, and a file of images "
                "has no reason to; it was not called"
            )

    try:
        return read_pickle(path.read_bytes(), check)
    except NoData as error:
        raise DataError(
            f"{path} cannot be read, it is truncated or damaged ({error}); get it again from {_PAGE}"
        ) from error


_NEW = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_NAMES = {*_NEW, "_codecs.encode", "numpy.ndarray", "numpy.dtype"}


def _images(told: object) -> np.ndarray | None:
    """The array that a pickle tells, as numpy writes it: N x 3 x 32 x 32 uint8; None if it is another.

    numpy gets the bytes alone. The shape, dtype and state that the file tells are compared, never passed on.
    """
    if not isinstance(told, CallResult) or str(told.call) not in _NEW:
        return None
    match told.state:
        case (int(), (int() as count, 3072), CallResult() as dtype, False, bytes() as content):
            kind = dtype.given[:1] if str(dtype.call) == "numpy.dtype" else ()
            if kind in ((b"u1",), ("u1",)) and len(content) == count * 3072:
                return np.frombuffer(content, np.uint8).reshape(count, 3, 32, 32)
        case _:
            pass
    return None
