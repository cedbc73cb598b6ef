"""Augmentations, as plain callables on one image: C x H x W, uint8 or float.

`ToFloat` and `Normalise` work on windows of an image too, the others need the whole.

They draw from the global generators, which the loader seeds for every sample; so each is a function of
the sample, the seed and the epoch. Work on uint8 as long as possible: it is a quarter of the bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.errors import UsageError

__all__ = ["Compose", "Normalise", "RandomCrop", "RandomFlip", "RandomShift", "ToFloat"]


class Compose:
    """`Compose(f, g)(image)` is `g(f(image))`."""

    def __init__(self, *steps: Callable[[Tensor], Tensor]) -> None:
        self.steps = steps

    def __call__(self, image: Tensor) -> Tensor:
        """Apply the steps, first to last."""
        for step in self.steps:
            image = step(image)
        return image

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.steps))})"


@dataclass(frozen=True)
class RandomCrop:
    """`size` x `size` from anywhere in the image, after `padding` zeros were put on each side.

    Raises:
        UsageError: the padded image is smaller than that.
    """

    size: int
    padding: int = 0

    def __call__(self, image: Tensor) -> Tensor:
        """A window of the image, with all its channels."""
        _, height, width = image.shape
        free_rows = height + 2 * self.padding - self.size
        free_columns = width + 2 * self.padding - self.size
        if min(free_rows, free_columns) < 0:
            raise UsageError(
                f"cannot crop {self.size} x {self.size} from an image of {height} x {width} padded by "
                f"{self.padding}; resize it first, or choose a smaller size"
            )
        top = random.randint(0, free_rows) - self.padding  # noqa: S311
        left = random.randint(0, free_columns) - self.padding  # noqa: S311
        return _window(image, top, left, self.size, self.size)


@dataclass(frozen=True)
class RandomShift:
    """The image moved by up to `pixels` each way, zeros moving in: for digits, which must not be flipped."""

    pixels: int = 1

    def __call__(self, image: Tensor) -> Tensor:
        """The image, moved."""
        down = random.randint(-self.pixels, self.pixels)  # noqa: S311
        right = random.randint(-self.pixels, self.pixels)  # noqa: S311
        return _window(image, -down, -right, *image.shape[1:])


@dataclass(frozen=True)
class RandomFlip:
    """Left and right swapped, with probability `chance`."""

    chance: float = 0.5

    def __call__(self, image: Tensor) -> Tensor:
        """The image or its mirror image."""
        return image.flip(-1) if random.random() < self.chance else image  # noqa: S311


class ToFloat:
    """uint8 0 to 255 to float32 0 to 1; a float image stays as it is."""

    works_on_windows = True

    def __call__(self, image: Tensor) -> Tensor:
        """The image as float32."""
        return image if image.is_floating_point() else image.float() / 255

    def on_batch(self, images: Tensor) -> Tensor:
        """N images at once, as if each by itself."""
        return images if images.is_floating_point() else images.float().div_(255)

    def fits(self, channels: int) -> bool:  # noqa: ARG002
        """Whether images of so many channels keep them."""
        return True

    def __repr__(self) -> str:
        return "ToFloat()"


class Normalise:
    """(image - mean) / std, one figure per channel; the image must be float, of any number of dims."""

    works_on_windows = True

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean = torch.tensor(mean)
        self.std = torch.tensor(std)

    def __call__(self, image: Tensor) -> Tensor:
        """The image, normalised."""
        channels = (-1, *[1] * (image.dim() - 1))
        return (image - self.mean.view(channels)) / self.std.view(channels)

    def on_batch(self, images: Tensor) -> Tensor:
        """N images at once, as if each by itself."""
        channels = (1, -1, *[1] * (images.dim() - 2))
        mean, std = (figures.to(images.device).view(channels) for figures in (self.mean, self.std))
        return (images - mean).div_(std)

    def fits(self, channels: int) -> bool:
        """Whether images of so many channels keep them: one figure for each, or one for all."""
        return len(self.mean) == len(self.std) and len(self.mean) in (1, channels)

    def __repr__(self) -> str:
        return f"Normalise({self.mean.tolist()}, {self.std.tolist()})"


def _window(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """The window whose corner is at (top, left), which may lie outside; zeros where there is no image."""
    channels, rows, columns = image.shape
    window = image.new_zeros(channels, height, width)
    first_row, last_row = max(top, 0), min(top + height, rows)
    first_column, last_column = max(left, 0), min(left + width, columns)
    if first_row < last_row and first_column < last_column:
        window[:, first_row - top : last_row - top, first_column - left : last_column - left] = (
            image[:, first_row:last_row, first_column:last_column]
        )
    return window
