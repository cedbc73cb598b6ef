"""Scores of windows, whose sums over all windows are those of whole images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fivefold.data.windows import Box, Windowed
from fivefold.errors import UsageError
from fivefold.parallel.modes import sums_of
from fivefold.parallel.trees import map_tensors

__all__ = ["WindowScore"]

_RELATIVE, _ABSOLUTE = 1e-3, 1e-6
"""of sums over parts of a window: a score may add in float32, and what is no sum is off by more"""


class WindowScore:
    """`score(outputs, targets)` of `ParallelModel.evaluate`, for windows of samples (image, target).

    Raises `UsageError` for a data set whose targets are no images.
    """

    def __init__(self, score: Callable[[Any, Any], Tensor], windows: Windowed) -> None:
        self._score, self._windows, self._tried = score, windows, False
        for index in range(len(windows)):
            self.size(index)

    def size(self, index: int) -> tuple[int, ...]:
        """Pixels of a target."""
        sizes = self._windows.sizes(index)
        target = sizes[1] if not isinstance(sizes[0], int) and len(sizes) == 2 else None
        if not isinstance(target, (tuple, list)) or not all(isinstance(n, int) for n in target):
            raise UsageError(
                f"score compares windows with those of a target, and sample {index} is not (image, target), "
                "both images: give the data set targets, such as TiffImages(files, targets=files)"
            )
        return tuple(target)

    def pixel(self, index: int) -> Box:
        """One pixel of a target."""
        size = self.size(index)
        return Box(size, (range(1),) * len(size))

    def sums(self, outputs: Any, target: Tensor, box: Box) -> Tensor:
        """Of a window, one sample; float64, on the CPU. Both may be changed."""
        parts = [] if self._tried else self._of_halves(outputs, target, box)
        found = sums_of(self._score(outputs, target)).detach()
        if parts:
            self._compare(parts[0], parts[1], found)
        self._tried = True
        return found.cpu()

    def _of_halves(self, outputs: Any, target: Tensor, box: Box) -> list[Tensor]:
        """The sums of two halves of a window; none of a single pixel."""
        dim = max(range(len(box.shape)), key=box.shape.__getitem__) - len(box.shape)
        half = box.shape[dim] // 2

        def cut(start: int, stop: int) -> Callable[[Tensor], Tensor]:
            def of(leaf: Tensor) -> Tensor:
                fits = leaf.shape[-len(box.shape) :] == box.shape
                return (leaf.narrow(dim, start, stop - start) if fits else leaf).clone()

            return of

        parts = [cut(0, half), cut(half, box.shape[dim])] if half else []
        return [sums_of(self._score(map_tensors(of, outputs), of(target))) for of in parts]

    @staticmethod
    def _compare(one: Tensor, other: Tensor, both: Tensor) -> None:
        """Raise `UsageError` unless the sums of two halves add up to those of the window."""
        alike = len(one) == len(other) == len(both)
        if not alike or not torch.allclose(one + other, both, _RELATIVE, _ABSOLUTE, equal_nan=True):
            raise UsageError(
                "score has to return sums over pixels, and those of two halves of a window do not add up to "
                "those of all of it: return sums and counts, such as squared errors and pixels, and divide "
                "them at the end"
            )
