"""What is trained, on what: photographs in JPEG as a camera leaves them, and small images in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from photo import read
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from fivefold.data.transforms import Compose, Normalise, RandomCrop, RandomFlip, ToFloat
from fivefold.parallel.arithmetic import Arithmetic
from fivefold.plan import Numerics
from fivefold.recipes import models

CLASSES = 10
LENGTH = 100_000
"""samples of a data set; its files are fewer, and read again and again"""
WIDTH, HEIGHT = 500, 375
PHOTOS = 64
QUALITY = 92
"""of JPEG: some 60 kB a photograph"""
LAST = Numerics(memory_format="channels_last")
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


@dataclass(frozen=True)
class Work:
    """A net and what it is fed with."""

    title: str
    model: str
    pixels: int
    batch: int
    bf16: bool = False
    photos: bool = True
    """decoded from JPEG for each sample; else small images in memory"""
    quotas: tuple[int, ...] = (100, 50, 25)
    """percent of a core that the helper is given"""


WORKS = {
    "jpeg-32": Work("JPEG 500x375 to 32x32, ResNet-20, float32", "resnet20", 32, 32),
    "jpeg-32-bf16": Work(
        "JPEG 500x375 to 32x32, ResNet-20, bfloat16", "resnet20", 32, 32, bf16=True
    ),
    "jpeg-64": Work("JPEG 500x375 to 64x64, ShuffleNetV2, float32", "shufflenet_v2_x1_0", 64, 32),
    "light": Work(
        "32x32 in memory, crop and flip, ResNet-20, float32", "resnet20", 32, 64, photos=False,
        quotas=(100,),
    ),
    "decode-224": Work(
        "JPEG 500x375 to 224x224, ResNet-20, float32", "resnet20", 224, 4, quotas=(100,)
    ),
}  # fmt: skip


def make_photos(folder: Path, count: int = PHOTOS) -> None:
    """Write photographs that nobody took: smooth areas, edges and noise, as hard to decode as real ones."""
    draw = np.random.default_rng(0)
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
    for number in range(count):
        picture = np.zeros((HEIGHT, WIDTH, 3), np.float32)
        for _ in range(12):
            y, x, radius = draw.uniform((0, 0, 20), (HEIGHT, WIDTH, 160))
            inside = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
            picture[inside] += draw.uniform(-70, 70, 3)
        wave = np.sin(rows / draw.uniform(3, 30)) + np.cos(columns / draw.uniform(3, 30))
        picture += 128 + 20 * wave[..., None] + draw.normal(0, 9, picture.shape)
        pixels = picture.clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.jpg", quality=QUALITY)


class Photos(Dataset[tuple[Tensor, int]]):
    """Samples (image, label): a JPEG is decoded, and a random part of it resized to `pixels` x `pixels`.

    8 % to all of the area, sides from 3:4 to 4:3: the usual "random resized crop". Files stay in the kernel's
    cache.
    """

    transforms_last = True

    def __init__(
        self,
        folder: Path,
        pixels: int,
        transform: Callable[[Tensor], Tensor],
        length: int = LENGTH,
    ) -> None:
        self.length = length
        self.files = sorted(folder.glob("*.jpg"))
        self.pixels = pixels
        self.transform = transform

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        part = read(self.files[index % len(self.files)], self.pixels)
        pixels = torch.from_numpy(part.transpose(2, 0, 1).copy())
        return self.transform(pixels), index % CLASSES


class Small(Dataset[tuple[Tensor, int]]):
    """Samples (image, label): 32x32 from memory, cropped and flipped as is usual for CIFAR-10."""

    transforms_last = True

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        draw = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (512, 3, 32, 32), dtype=torch.uint8, generator=draw)
        self.transform = transform

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index % len(self.images)]), index % CLASSES


def dataset(work: Work, folder: Path) -> Dataset[tuple[Tensor, int]]:
    """What the net is trained on; floats leave the transform last, so that bytes travel."""
    if work.photos:
        return Photos(folder, work.pixels, Compose(RandomFlip(), ToFloat(), Normalise(MEAN, STD)))
    return Small(
        Compose(RandomCrop(work.pixels, padding=4), RandomFlip(), ToFloat(), Normalise(MEAN, STD))
    )


class Training:
    """A net that learns from a batch, in the way a competent user would have it learn on a CPU."""

    def __init__(self, work: Work) -> None:
        torch.manual_seed(0)
        self.net = Arithmetic(LAST, torch.device("cpu")).net(models.build(work.model, CLASSES))
        self._optim = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        self._loss = nn.CrossEntropyLoss()
        self._bf16 = work.bf16

    def step(self, images: Any, targets: Any) -> None:
        """Forward, backward, update."""
        images = images.to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            loss = self._loss(self.net(images), targets)
        loss.backward()
        self._optim.step()
        self._optim.zero_grad()
