"""The last steps of a transform, applied to whole batches where they arrive.

    sample:  Compose(RandomCrop, RandomFlip, | ToFloat, Normalise)
                      ── on each sample ──   |  ── on the batch, by the trainer ──
                            uint8 travels    |

A byte a pixel travels instead of four, and a batch is normalised in one go. Only steps that treat each
element by itself can be moved, so the result is the same byte for byte.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor

from fivefold.data.collate import stack
from fivefold.data.source import Samples
from fivefold.data.transforms import Compose, Normalise, ToFloat

__all__ = ["Later", "put_off"]

Step = ToFloat | Normalise


def put_off(dataset: Samples) -> tuple[Samples, Later | None]:
    """The data set without the last steps of its transform, and these; unchanged where there are none.

    Of data sets that declare `transforms_last = True`: a sample, or its first element, is what `transform`
    returned, and nothing else was done to it.
    """
    transform = getattr(dataset, "transform", None)
    if type(transform) is not Compose or not _transforms_last(type(dataset)):
        return dataset, None
    steps = list(transform.steps)
    later: list[Step] = []
    while steps and _can_be_put_off(step := steps[-1]):
        later.insert(0, step)
        steps.pop()
    if not later:
        return dataset, None
    shorter = copy.copy(dataset)
    setattr(shorter, "transform", Compose(*steps))  # noqa: B010
    return shorter, Later(later)


def _can_be_put_off(step: object) -> TypeGuard[Step]:
    return type(step) in (ToFloat, Normalise)


def _transforms_last(kind: type) -> bool:
    """Whether the class that reads samples says so itself: a subclass may do something else to them."""

    def home(name: str) -> type | None:
        return next((base for base in kind.__mro__ if name in vars(base)), None)

    declared = home("transforms_last")
    read = [home(name) for name in ("__getitem__", "window", "windows") if home(name)]
    return (
        declared is not None
        and bool(getattr(kind, "transforms_last", False))
        and all(where is declared for where in read)
    )


class Later:
    """A collate that puts `steps` off, and what `finish` does with its batches.

    A batch is a pair (what `stack` makes, whether the steps are in it already). They are applied at once
    where samples differ in such a way that the batch would come out otherwise, or an error would.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    def __call__(self, samples: list[Any]) -> tuple[Any, bool]:
        """Samples to a batch that `finish` completes."""
        if self._can_wait([_image(sample) for sample in samples]):
            return stack(samples), False
        return stack([self._applied(sample) for sample in samples]), True

    def finish(self, made: tuple[Any, bool]) -> Any:
        """The batch, on whatever device it is."""
        batch, finished = made
        if finished:
            return batch
        image = _image(batch)
        for step in self.steps:
            image = step.on_batch(image)
        return _with_image(batch, image)

    def _can_wait(self, images: list[Any]) -> bool:
        first = images[0]
        return (
            isinstance(first, Tensor)
            and first.dim() > 0
            and first.numel() > 0  # the strides of nothing are another matter
            and all(step.fits(first.shape[0]) for step in self.steps)
            and all(
                isinstance(image, Tensor)
                and image.dtype == first.dtype
                and image.shape == first.shape
                for image in images
            )
        )

    def _applied(self, sample: Any) -> Any:
        image = _image(sample)
        for step in self.steps:
            image = step(image)
        return _with_image(sample, image)


def _image(sample: Any) -> Any:
    return sample[0] if isinstance(sample, tuple) else sample


def _with_image(sample: Any, image: Any) -> Any:
    return (image, *sample[1:]) if isinstance(sample, tuple) else image
