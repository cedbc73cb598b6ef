"""Data sets that read windows: under tile axes no rank ever holds a whole image.

    class Scans:                                        # a sample is (image, label)
        def __len__(self): ...
        def __getitem__(self, index): ...               # the whole sample, for layouts without tiles
        def sizes(self, index):                         # (height, width) of each image, None for the rest
            return (9001, 7003), None
        def window(self, index, boxes):                 # the sample again, its images cut to their boxes
            box, _ = boxes
            return torch.from_numpy(self.files[index][box.slices]), self.labels[index]

What `sizes` returns has the structure of a sample. Every image has a size of its own, so that a target may
be larger than the input; each is cut by the rule of ownership.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch.utils.data import Subset

from fivefold.errors import UsageError

__all__ = ["Box", "OnWindows", "Windowed", "check_transform", "on_windows", "windows_of"]


@dataclass(frozen=True)
class Box:
    """A window of an image."""

    size: tuple[int, ...]
    """pixels of the whole image: (height, width), or (depth, height, width)"""
    ranges: tuple[range, ...]
    """the rows, columns, ... of the window"""

    @property
    def slices(self) -> tuple[Any, ...]:
        """Cuts the window out of an array or tensor (..., height, width): `image[box.slices]`."""
        return (..., *(slice(r.start, r.stop) for r in self.ranges))

    @property
    def shape(self) -> tuple[int, ...]:
        """Pixels of the window along each dim."""
        return tuple(map(len, self.ranges))

    @classmethod
    def whole(cls, size: Sequence[int]) -> Box:
        """All of an image."""
        return cls(tuple(size), tuple(map(range, size)))


class Windowed(Protocol):
    """A map-style data set that can read windows of its images.

    A sample is any pytree. Its images are tensors or arrays whose last dims are (height, width) or (depth,
    height, width); before them stand channels, or nothing. An attribute `transform` or `target_transform`
    that is not None has to say that it works on windows (`on_windows`).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any:
        """The whole sample."""
        ...

    def sizes(self, index: int, /) -> Any:
        """A tree of the sample's structure: the size of each image in pixels, None for anything else."""
        ...

    def window(self, index: int, boxes: Any, /) -> Any:
        """The sample with its images cut.

        `boxes` has the structure of a sample: a `Box` for each image, None for anything else. All tiles of
        an image are read with equal seeds.
        """
        ...


@dataclass(frozen=True)
class OnWindows:
    """A transform that may be applied to windows. Made by `on_windows`."""

    function: Callable[[Any], Any]
    works_on_windows: bool = True

    def __call__(self, image: Any) -> Any:
        """Apply the transform."""
        return self.function(image)


def on_windows(function: Callable[[Any], Any]) -> OnWindows:
    """Declare that a transform gives the same pixels whether it sees a window or the whole image.

    So it looks at one pixel at a time, moves none, and draws the same numbers for any size: a factor for
    the whole image will do, noise will not.
    """
    return OnWindows(function)


def check_transform(transform: object) -> None:
    """Raise `UsageError` for a transform that needs whole images, naming it and the remedy."""
    if transform is None:
        return
    steps = getattr(transform, "steps", getattr(transform, "transforms", None))  # a Compose
    if isinstance(steps, (tuple, list)):
        for step in cast(Sequence[object], steps):
            check_transform(step)
    elif not getattr(transform, "works_on_windows", False):
        name = getattr(transform, "__qualname__", None) or repr(transform)
        raise UsageError(
            f"the transform {name} may need the whole image, and the layout has tile axes, under which the "
            "data set reads windows: leave it out, or, if it looks at one pixel at a time and moves none, "
            "wrap it: fivefold.data.windows.on_windows(transform)"
        )


def windows_of(dataset: Any) -> Windowed | None:
    """How windows of a data set are read; None if it does not offer any.

    Looks through torch's `Subset`, and data sets that say by a method `windows()` how theirs are read.
    """
    if isinstance(dataset, Subset):
        inner = windows_of(dataset.dataset)
        return None if inner is None else _Chosen(inner, dataset.indices)
    if callable(of_another := getattr(dataset, "windows", None)):
        return cast("Windowed | None", of_another())
    if callable(getattr(dataset, "sizes", None)) and callable(getattr(dataset, "window", None)):
        return cast(Windowed, dataset)
    return None


class _Chosen:
    """Windows of some samples of a data set."""

    def __init__(self, inner: Windowed, indices: Sequence[int]) -> None:
        self.inner, self.indices = inner, indices
        self.transform: object = getattr(inner, "transform", None)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.inner[self.indices[index]]

    def sizes(self, index: int) -> Any:
        return self.inner.sizes(self.indices[index])

    def window(self, index: int, boxes: Any) -> Any:
        return self.inner.window(self.indices[index], boxes)
