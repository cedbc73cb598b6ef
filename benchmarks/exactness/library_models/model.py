"""A model of a library, made small: how it is built, what it is given, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

__all__ = ["CLASSES", "Model", "ids", "image", "image_map", "volume_map"]

CLASSES = 5
AUXILIARY = 0.4

Batch = tuple[Any, Tensor]


@dataclass(frozen=True)
class Model:
    """`make` builds the net; `batch` draws inputs and targets of some rows; `tiled` ones are given images."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, Generator], Batch]
    loss: Callable[[Any, Tensor], Tensor]
    rows: int = 4
    tiled: bool = True
    rounds: float = 1e-10
    """what a layout may be off by in any case: more for nets that compute parts in float32 by themselves"""


def image(
    make: Callable[[], nn.Module],
    *size: int,
    rows: int = 4,
    channels: int = 3,
    plain: bool = True,
    name: str = "",
) -> Model:
    """A classifier of images or volumes. `plain`: it returns one tensor; `name`: of its argument, if told."""

    def batch(count: int, draw: Generator) -> Batch:
        x = torch.randn((count, channels, *size), generator=draw)
        return {name: x} if name else x, torch.randint(CLASSES, (count,), generator=draw)

    return Model(make, batch, nn.CrossEntropyLoss() if plain else Classes(), rows)


def image_map(
    make: Callable[[], nn.Module],
    *size: int,
    rows: int = 4,
    channels: int = 3,
    plain: bool = True,
    name: str = "",
    scale: int = 1,
) -> Model:
    """A net that says a class of every pixel. `plain`: it returns one tensor; `scale`: how much smaller."""

    def batch(count: int, draw: Generator) -> Batch:
        x = torch.randn((count, channels, *size), generator=draw)
        shape = (count, *(n // scale for n in size))
        return {name: x} if name else x, torch.randint(CLASSES, shape, generator=draw)

    return Model(make, batch, nn.CrossEntropyLoss() if plain else Classes(), rows)


def volume_map(make: Callable[[], nn.Module], *size: int, rows: int = 4) -> Model:
    """One that says a class of every voxel of volumes with one channel."""
    return image_map(make, *size, rows=rows, channels=1)


def ids(
    make: Callable[[], nn.Module],
    words: int,
    *,
    length: int = 7,
    rows: int = 4,
    each: bool = True,
    decoder: bool = False,
) -> Model:
    """A net of word numbers with padding: a class of `each` word, or of the whole text."""

    def batch(count: int, draw: Generator) -> Batch:
        text = torch.randint(3, words, (count, length), generator=draw)
        known = torch.ones_like(text)
        known[0, length - 2 :] = 0
        inputs = {"input_ids": text, "attention_mask": known}
        if decoder:
            inputs["decoder_input_ids"] = torch.randint(3, words, (count, 4), generator=draw)
        shape = (count, 4 if decoder else length) if each else (count,)
        return inputs, torch.randint(words if each else CLASSES, shape, generator=draw)

    return Model(make, batch, Words() if each else Classes(), rows, tiled=False)


class Classes:
    """Cross entropy of nets that return more than a tensor: of the main output, and what comes beside it."""

    def share(self, outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
        """The sum over targets, and their number."""
        main, *more = _logits(outputs)
        loss = F.cross_entropy(main, targets, reduction="sum")
        for each in more:
            loss = loss + AUXILIARY * F.cross_entropy(each, targets, reduction="sum")
        return loss, targets.numel()

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """The mean over targets."""
        numerator, denominator = self.share(outputs, targets)
        return numerator / denominator


class Words(Classes):
    """Of every word, as language models have it."""

    def share(self, outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
        """The sum over words, and their number."""
        main = _logits(outputs)[0]
        told = F.cross_entropy(main.flatten(0, 1), targets.flatten(), reduction="sum")
        return told, targets.numel()


def _logits(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        told = [outputs[key] for key in ("logits", "out", "aux") if key in outputs]
        return [each for each in told if isinstance(each, Tensor)]
    return [each for each in outputs if isinstance(each, Tensor)]
