"""CIFAR-10 from its standard Python files on disk.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from fivefold.data.images import ImageArrays, Transform
from fivefold.errors import DataError

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

    Reads `root/cifar-10-batches-py/`, or `root` if the files lie there. The files are pickles; they are
    read by a reader that builds arrays, lists and dicts and refuses everything else, so that a file from
    a stranger cannot run code.

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
    images, labels = known.get(b"data"), known.get(b"labels")
    if not (
        isinstance(images, np.ndarray)
        and isinstance(labels, list)
        and images.dtype == np.uint8
        and images.shape == (len(labels), 3 * 32 * 32)
        and all(isinstance(label, int) and 0 <= label < len(_CLASSES) for label in labels)
    ):
        raise DataError(
            f"{path} is not a CIFAR-10 batch: it should hold b'data' (N x 3072, uint8) and b'labels' "
            f"(N numbers from 0 to 9); get it again from {_PAGE}"
        )
    return images.reshape(-1, 3, 32, 32), labels


def _unpickled(path: Path) -> Any:
    with path.open("rb") as file:
        try:
            return _ArrayUnpickler(file).load()
        except DataError:
            raise
        except Exception as error:
            # A damaged pickle can raise nearly anything.
            raise DataError(
                f"{path} cannot be read, it is truncated or damaged ({type(error).__name__}: {error}); "
                f"get it again from {_PAGE}"
            ) from error


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into an old pickle."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"unexpected encoding {encoding!r}")
    return text.encode("latin-1")


class _ArrayUnpickler(pickle.Unpickler):
    """Knows arrays only. A pickle names functions to call; any other name ends the reading."""

    _reconstruct: Any = np.empty(0).__reduce__()[0]
    _known: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin1,
    }

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")
        self._name = file.name

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return self._known[module_name, global_name]
        except KeyError:
            raise DataError(
                f"{self._name} is not a CIFAR-10 batch: reading it would call "
                f"{module_name}.{global_name}, and a file of images has no reason to; it was not called"
            ) from None
