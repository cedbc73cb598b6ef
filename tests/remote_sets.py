"""Data sets for tests of helpers, which import them by name."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from fivefold.data.images import Transformed
from fivefold.data.transforms import Compose, Normalise, ToFloat
from fivefold.data.windows import Box, on_windows
from streams import Drawing, Numbers


class Slowly(Drawing):
    """2 ms a sample, as if a picture was decoded; no processor is used."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


class Slower(Drawing):
    """2 ms a sample in a trainer, 30 ms in a helper."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.03 if os.environ.get("FIVEFOLD_ROLE") == "helper" else 0.002)
        return super().__getitem__(index)


class Raising(Slowly):
    """Some samples cannot be read: anywhere, or by helpers only."""

    def __init__(self, length: int, bad: list[int], where: str = "everywhere") -> None:
        super().__init__(length)
        self.bad, self.where = bad, where

    def __getitem__(self, index: int) -> Any:
        helps = os.environ.get("FIVEFOLD_ROLE") == "helper"
        if index in self.bad and (helps or self.where == "everywhere"):
            raise ValueError(f"sample {index} is no picture")
        return super().__getitem__(index)


class Absent(Slowly):
    """Files that helpers do not have."""

    def __getitem__(self, index: int) -> Any:
        if os.environ.get("FIVEFOLD_ROLE") == "helper":
            raise FileNotFoundError(2, "No such file or directory", f"/data/{index}.png")
        return super().__getitem__(index)


class Misbuilt(Slowly):
    """Samples that helpers build otherwise: as a list, with a key less, with more dims, of another dtype."""

    def __init__(self, length: int, how: str) -> None:
        super().__init__(length)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if os.environ.get("FIVEFOLD_ROLE") != "helper":
            return sample
        drawn = sample["torch"]
        return {
            "list": [*sample.values()],
            "key": {key: value for key, value in sample.items() if key != "name"},
            "dims": {**sample, "torch": drawn[None]},
            "dtype": {**sample, "torch": drawn.double()},
        }[self.how]


class OnTrainers(Numbers):
    """A file that only trainers have; helpers can be sent samples."""

    def __init__(self, length: int, path: str) -> None:
        super().__init__(length)
        self.path = path

    def raw(self, index: int) -> bytes:
        if os.environ.get("FIVEFOLD_ROLE") == "helper":
            raise FileNotFoundError(self.path)
        with open(self.path, "rb") as file:  # noqa: PTH123
            file.seek(index)
            return file.read(1)

    def decode(self, raw: bytes) -> Any:
        return torch.rand(3) + raw[0], raw[0]

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.raw(index))


class Forgetful(Numbers):
    """Draws from a generator that nobody seeds."""

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.random.default_rng().random(3)), index


class Elsewhere(Numbers):
    """Other numbers on helpers, as another version of a library might give."""

    def __getitem__(self, index: int) -> Any:
        shift = float(os.environ.get("FIVEFOLD_ROLE") == "helper")
        return torch.full((3,), index + shift), index


class Odd:
    """A sample that cannot be sent."""


def odd_collate(samples: list[Any]) -> Any:
    return {"x": torch.stack([x for x, _ in samples]), "odd": Odd()}


class Images(Numbers):
    """Pictures of 3 x 64 x 64 bytes and their labels."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 64, 64), index % 251, dtype=torch.uint8), index


class Fields:
    """Samples (uint8 3 x 23 x 17, target 12 x 9, name) of which windows can be read."""

    def __init__(self, length: int) -> None:
        numbers = torch.arange(length * 3 * 23 * 17) * 2654435761 % 251
        self.images = numbers.to(torch.uint8).view(length, 3, 23, 17)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.window(index, (Box.whole((23, 17)), Box.whole((12, 9)), None))

    def sizes(self, _: int) -> Any:
        return (23, 17), (12, 9), None

    def window(self, index: int, boxes: tuple[Box, Box, None]) -> Any:
        image = self.images[index]
        small = image.sum(0)[::2, ::2]
        return image[boxes[0].slices], small[boxes[1].slices], f"field {index}"


def dimmed(image: torch.Tensor) -> torch.Tensor:
    return image // int(torch.randint(1, 5, ()))


def fields(length: int) -> Any:
    last = Normalise((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    return Transformed(Fields(length), Compose(on_windows(dimmed), ToFloat(), last))
