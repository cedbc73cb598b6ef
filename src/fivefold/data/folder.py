"""Any directory of images, one folder per class.

root/train/cat/1.jpg     root/val/cat/9.jpg        splits of the user's own (val/ or test/), or
root/cat/1.jpg           root/dog/2.png            one collection, split by a hash of the file's name
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fivefold.data.images import Transform
from fivefold.data.pictures import SUFFIXES, check, read
from fivefold.errors import DataError

__all__ = ["TEST_FRACTION", "ImageFolder"]

TEST_FRACTION = 0.2
"""share of the files held out where the folder has no splits of its own"""

_TRAIN = "train"
_TEST = ("val", "test")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Samples (image, label): uint8 3 x size x size, label an index into `classes`.

    Classes are the names of folders, sorted; pictures may lie in folders within them. A picture is
    resized so that its shorter side is `size`, and cropped at its centre. Where there are no splits, a
    fifth of the files (by a hash of class and name, so that a new file moves no other) is held out; of
    `val/` and `test/`, `val/` is read if both exist.

    Every file is looked at when the data set is opened: its first and last bytes tell whether it is a
    picture and is whole. What that cannot see is found when the picture is read.

    Raises:
        DataError: a folder is missing or empty, a file is truncated or no picture; names it.
    """

    transforms_last = True

    def __init__(
        self,
        root: str | Path,
        *,
        train: bool = True,
        size: int = 64,
        transform: Transform | None = None,
    ) -> None:
        self.root = Path(root)
        self.size = size
        self.transform = transform
        self.classes, self.files, self.labels = _scan(self.root, train)
        for name in self.files:
            check(self.root / name)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = read(self.root / self.files[index], self.size)
        image = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        return (self.transform(image) if self.transform else image), self.labels[index]


def _scan(root: Path, train: bool) -> tuple[tuple[str, ...], list[str], list[int]]:
    """Classes, the chosen files (relative to `root`, sorted within each class), and their labels."""
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; {_expected(root)}")
    if not (root / _TRAIN).is_dir():
        classes, files = _pictures(root, root)
        chosen = {name: [f for f in files[name] if _held_out(f) != train] for name in classes}
        _check_split(root, chosen, train)
    else:
        classes, chosen = _pictures(root, root / _TRAIN)
        if not train:
            held_out = _test_folder(root)
            found, chosen = _pictures(root, held_out)
            if unknown := sorted(set(found) - set(classes)):
                raise DataError(
                    f"{held_out} has classes that {root / _TRAIN} has not: {', '.join(unknown)}; "
                    "a model cannot be tested on what it was never shown"
                )
    samples = [(file, label) for label, name in enumerate(classes) for file in chosen.get(name, [])]
    return classes, [file for file, _ in samples], [label for _, label in samples]


def _test_folder(root: Path) -> Path:
    for name in _TEST:
        if (root / name).is_dir():
            return root / name
    raise DataError(
        f"{root} has a folder {_TRAIN}/ but neither {' nor '.join(f'{name}/' for name in _TEST)}; "
        f"add one of them, or move the classes up into {root} to have a fifth of the files held out"
    )


def _pictures(root: Path, folder: Path) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Classes in `folder` and the pictures of each, as sorted paths relative to `root`."""
    classes = tuple(
        sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    )
    if len(classes) < 2:
        found = f"only the class {classes[0]}" if classes else "no folders of classes"
        raise DataError(f"{folder} has {found}; {_expected(root)}")
    files = {name: _walk(root, folder / name) for name in classes}
    if empty := [name for name in classes if not files[name]]:
        raise DataError(
            f"no picture in {folder / empty[0]}: fill or remove that folder "
            f"(pictures end in {', '.join(sorted(SUFFIXES))})"
        )
    return classes, files


def _walk(root: Path, folder: Path) -> list[str]:
    found: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(parent, name).relative_to(root).as_posix()
            for name in names
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES
        ]
    return sorted(found)


def _held_out(file: str) -> bool:
    digest = blake2b(file.encode(), digest_size=8, person=b"fivefold folder").digest()
    return int.from_bytes(digest, "little") < TEST_FRACTION * 2**64


def _check_split(root: Path, chosen: dict[str, list[str]], train: bool) -> None:
    empty = [name for name, files in chosen.items() if not files]
    if empty and (train or len(empty) == len(chosen)):
        missing = f"of {', '.join(empty)} " if train else ""
        raise DataError(
            f"{root} holds too few pictures: with a fifth held out, none {missing}is left "
            f"{'to train with' if train else 'to test with'}; add some, or make {root}/{_TRAIN} and "
            f"{root}/{_TEST[0]} yourself"
        )


def _expected(root: Path) -> str:
    return (
        f"expected pictures as {root}/<class>/<name>.jpg (or .png, ...), at least two classes, or "
        f"{root}/{_TRAIN}/<class>/... and {root}/{_TEST[0]}/<class>/..."
    )
