"""SVHN from files in the real format, good and bad."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fivefold.data.svhn import Svhn
from fivefold.errors import DataError


def content(labels: list[int]) -> dict[str, Any]:
    """X is 32 x 32 x 3 x N as in the original; image i has value 10 i + channel, but 255 at row 1."""
    images = np.zeros((32, 32, 3, len(labels)), dtype=np.uint8)
    images += np.arange(3, dtype=np.uint8)[:, None] + 10 * np.arange(len(labels), dtype=np.uint8)
    images[1] = 255
    return {"X": images, "y": np.array(labels, dtype=np.uint8)[:, None]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    savemat(tmp_path / "train_32x32.mat", content([1, 10, 9, 4]), do_compression=True)
    savemat(tmp_path / "test_32x32.mat", content([10]), do_compression=True)
    return tmp_path


def test_labels_and_pixels(root: Path) -> None:
    train, test = Svhn(root), Svhn(root, train=False)
    assert train.labels == [1, 0, 9, 4]
    assert test.labels == [0]
    image, label = train[2]
    assert (image.shape, image.dtype, label) == ((3, 32, 32), torch.uint8, 9)
    assert image[:, 0, 5].tolist() == [20, 21, 22]
    assert image[:, 1, 5].tolist() == [255] * 3
    assert type(label) is int


def test_a_missing_file_is_named_with_where_it_comes_from(root: Path) -> None:
    (root / "test_32x32.mat").unlink()
    with pytest.raises(
        DataError, match=r"no test_32x32\.mat; .*\(182 MB\).*\(64 MB\).*housenumbers"
    ):
        Svhn(root, train=False)


@pytest.mark.parametrize("kept", [0, 100, 200, -50, -1])
def test_a_truncated_file_is_named(root: Path, kept: int) -> None:
    path = root / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"train_32x32\.mat (cannot be read, it )?is truncated"):
        Svhn(root)


@pytest.mark.parametrize(
    "change",
    [
        {"X": np.zeros((32, 32, 3, 2), dtype=np.uint8)},
        {"X": np.zeros((32, 32, 3, 1))},
        {"y": np.array([[0]], dtype=np.uint8)},
        {"y": np.array([[11]], dtype=np.uint8)},
        {"X": None},
    ],
)
def test_a_file_of_something_else_is_named(root: Path, change: dict[str, Any]) -> None:
    fields = {
        name: value for name, value in {**content([3]), **change}.items() if value is not None
    }
    savemat(root / "test_32x32.mat", fields)
    with pytest.raises(
        DataError, match=r"test_32x32\.mat is truncated or not a file of SVHN's format 2"
    ):
        Svhn(root, train=False)


def test_without_scipy_the_error_says_what_to_install(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(DataError, match=r'scipy is needed.*pip install "fivefold\[recipes\]"'):
        Svhn(root)
