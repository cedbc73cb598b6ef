"""What the image data sets share: samples in memory, and a transform in front of any data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from fivefold.data.source import Samples
from fivefold.data.transforms import Compose
from fivefold.data.windows import Windowed, windows_of
from fivefold.errors import DataError

__all__ = ["ImageArrays", "Transform", "Transformed", "need"]

Transform = Callable[[Tensor], Tensor]
"""One image to one image; draws, if it draws, from the global generators (the loader seeds them)."""


class ImageArrays(Dataset[tuple[Tensor, int]]):
    """Images that fit in memory: samples (image, label).

    `images` is N x C x H x W of any dtype, `labels` N ints that index `classes`.
    """

    transforms_last = True

    def __init__(
        self,
        images: Tensor,
        labels: Sequence[int],
        classes: Sequence[str],
        transform: Transform | None,
    ) -> None:
        assert len(images) == len(labels), (len(images), len(labels))
        self.images = images
        self.labels = list(labels)
        self.classes = tuple(classes)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # A copy, so that a transform that works in place changes this sample only.
        image = self.images[index].clone()
        return (self.transform(image) if self.transform else image), self.labels[index]


class Transformed(Dataset[Any]):
    """`dataset` with `transform` applied to the first element of each sample, the image.

    Offers windows if `dataset` does; `transform` then has to work on windows where there are tile axes.
    """

    transforms_last = True

    def __init__(self, dataset: Samples, transform: Transform) -> None:
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        image, *rest = self.dataset[index]
        return (self.transform(image), *rest)

    def windows(self) -> Windowed | None:
        """How windows are read; None if `dataset` offers none."""
        inner = windows_of(self.dataset)
        return None if inner is None else _TransformedWindows(inner, self.transform)


class _TransformedWindows:
    def __init__(self, inner: Windowed, transform: Transform) -> None:
        self._inner, self._apply = inner, transform
        self.transform = Compose(*_steps(inner), transform)  # for whoever checks it
        self.target_transform = getattr(inner, "target_transform", None)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        image, *rest = self._inner[index]
        return (self._apply(image), *rest)

    def sizes(self, index: int) -> Any:
        return self._inner.sizes(index)

    def window(self, index: int, boxes: Any) -> Any:
        image, *rest = self._inner.window(index, boxes)
        return (self._apply(image), *rest)


def need(package: str, purpose: str, error: ImportError, *, extra: str = "recipes") -> DataError:
    """An error saying that `package` is needed for a `purpose` ("to read .mat files") and how to get it."""
    return DataError(
        f"{package} is needed {purpose}, but is not installed ({error}); "
        f'pip install "fivefold[{extra}]" brings it'
    )


def _steps(dataset: object) -> list[Transform]:
    first = getattr(dataset, "transform", None)
    return [] if first is None else [first]
