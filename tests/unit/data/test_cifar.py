"""CIFAR-10 from files in the real format, good and bad."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.data.cifar import Cifar10
from fivefold.errors import DataError

FOLDER = "cifar-10-batches-py"
NAMES = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]


def batch(count: int, start: int = 0) -> dict[bytes, Any]:
    """A batch of `count` images, each of one value per channel."""
    value = np.arange(start, start + count, dtype=np.uint8)
    data = np.repeat(np.stack([value, value + 50, value + 100], axis=1), 1024, axis=1)
    names = [f"picture_{number}.png".encode() for number in range(count)]
    return {
        b"batch_label": b"testing",
        b"labels": [(start + i) % 10 for i in range(count)],
        b"data": data,
        b"filenames": names,
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / FOLDER).mkdir()
    for number, name in enumerate(NAMES):
        # Protocol 2, as in the original files.
        (tmp_path / FOLDER / name).write_bytes(pickle.dumps(batch(3, 10 * number), protocol=2))
    return tmp_path


def test_the_batches_follow_each_other(root: Path) -> None:
    train, test = Cifar10(root), Cifar10(root, train=False)
    assert (len(train), len(test)) == (15, 3)
    assert train.classes[3] == "cat"
    image, label = train[4]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.uint8
    assert image[:, 7, 9].tolist() == [11, 61, 111]
    assert label == 1
    assert test[0][0][0, 0, 0] == 50


def test_the_folder_itself_may_be_named(root: Path) -> None:
    assert len(Cifar10(root / FOLDER)) == 15


def test_files_as_python_2_wrote_them(root: Path) -> None:
    """Strings of Python 2, numpy.core of old numpy: the bytes of the real files."""
    written = pickle.dumps(batch(2), protocol=2)
    old = written.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert old != written or b"numpy.core.multiarray" in written
    (root / FOLDER / "test_batch").write_bytes(old)
    assert len(Cifar10(root, train=False)) == 2


def test_missing_files_are_named_with_where_they_come_from(root: Path) -> None:
    (root / FOLDER / "data_batch_2").unlink()
    (root / FOLDER / "data_batch_4").unlink()
    with pytest.raises(
        DataError, match=r"no data_batch_2, data_batch_4; .*170 MB.*cs\.toronto\.edu"
    ):
        Cifar10(root)
    with pytest.raises(DataError, match=rf"not in {root}/nowhere/{FOLDER}: no test_batch"):
        Cifar10(root / "nowhere", train=False)


def test_a_truncated_file_is_named(root: Path) -> None:
    path = root / FOLDER / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="data_batch_3 cannot be read, it is truncated"):
        Cifar10(root)


class Trap:
    """What a malicious pickle does: names a function to be called when it is read."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return Path.touch, (self.victim,)


def test_a_file_cannot_run_code(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path = root / FOLDER / "test_batch"
    path.write_bytes(pickle.dumps({**batch(1), b"more": Trap(victim)}, protocol=2))
    with pytest.raises(DataError, match=r"test_batch is not a CIFAR-10 batch.*was not called"):
        Cifar10(root, train=False)
    assert not victim.exists()
    pickle.loads(path.read_bytes())
    assert victim.exists(), "the trap is a real one"


@pytest.mark.parametrize(
    "change",
    [
        {b"data": np.zeros((3, 3072))},
        {b"data": np.zeros((3, 100), dtype=np.uint8)},
        {b"data": [1, 2]},
        {b"labels": [0, 1]},
        {b"labels": [0, 1, 10]},
        {b"labels": None},
    ],
)
def test_a_file_of_something_else_is_named(root: Path, change: dict[bytes, Any]) -> None:
    content = pickle.dumps({**batch(3), **change}, protocol=2)
    (root / FOLDER / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match="test_batch is not a CIFAR-10 batch: it should hold"):
        Cifar10(root, train=False)


def test_a_file_that_is_no_dict_is_named(root: Path) -> None:
    (root / FOLDER / "test_batch").write_bytes(pickle.dumps([1, 2], protocol=2))
    with pytest.raises(DataError, match="test_batch is not a CIFAR-10 batch"):
        Cifar10(root, train=False)
