"""What an epoch is: training on some data and validation on others, both made in the real file formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import formats
import torch
from torch import Tensor, nn
from workload import LAST, MEAN, STD, Photos, make_photos

import fivefold as ff
from fivefold.data.cifar import Cifar10
from fivefold.data.folder import ImageFolder
from fivefold.data.svhn import Svhn
from fivefold.data.transforms import Compose, Normalise, RandomCrop, RandomFlip, ToFloat
from fivefold.parallel.arithmetic import Arithmetic
from fivefold.plan import Offload
from fivefold.recipes import models

CLASSES = 10


@dataclass(frozen=True)
class EpochWork:
    """An epoch, shortened: the proportion of test to training samples is that of the real set."""

    title: str
    model: str
    data: str
    pixels: int
    batch: int
    train: int
    """samples"""
    test: int


WORKS = {
    "validation": EpochWork(
        "ResNet-20, CIFAR-10's proportions (5 : 1)", "resnet20", "cifar", 32, 64, 960, 192
    ),
    "hybrid": EpochWork(
        "ResNet-20, JPEG 500x375 to 32x32, as many test as training samples", "resnet20", "photos",
        32, 32, 320, 320,
    ),
    "cifar10": EpochWork("ResNet-20, CIFAR-10", "resnet20", "cifar", 32, 64, 960, 192),
    "svhn": EpochWork("ResNet-56, SVHN", "resnet56", "svhn", 32, 64, 448, 160),
    "tiny-imagenet": EpochWork(
        "ShuffleNetV2, Tiny ImageNet", "shufflenet_v2_x1_0", "tiny", 64, 64, 640, 64
    ),
}  # fmt: skip


def make_data(work: EpochWork, folder: Path) -> None:
    """Write the files."""
    if work.data == "photos":
        make_photos(folder)
    else:
        maker = {"cifar": formats.cifar10, "svhn": formats.svhn, "tiny": formats.tiny_imagenet}
        maker[work.data](folder, work.train, work.test)


def datasets(work: EpochWork, folder: Path) -> tuple[Any, Any]:
    """Of training, with the usual augmentation, and of validation."""
    plain = Compose(ToFloat(), Normalise(MEAN, STD))
    varied = Compose(
        RandomCrop(work.pixels, padding=work.pixels // 8),
        RandomFlip(),
        ToFloat(),
        Normalise(MEAN, STD),
    )
    if work.data == "photos":
        flipped = Compose(RandomFlip(), ToFloat(), Normalise(MEAN, STD))
        return (
            Photos(folder, work.pixels, flipped, work.train),
            Photos(folder, work.pixels, plain, work.test),
        )
    if work.data == "tiny":
        made = (ImageFolder(folder, train=t, size=64, transform=f) for t, f in _both(varied, plain))
    elif work.data == "svhn":
        digits = Compose(RandomCrop(work.pixels, padding=4), ToFloat(), Normalise(MEAN, STD))
        made = (Svhn(folder, train=t, transform=f) for t, f in _both(digits, plain))
    else:
        made = (Cifar10(folder, train=t, transform=f) for t, f in _both(varied, plain))
    train, test = made
    return train, test


def _both(varied: Any, plain: Any) -> tuple[tuple[bool, Any], tuple[bool, Any]]:
    return (True, varied), (False, plain)


class Run:
    """A run of epochs, with validation or without."""

    def __init__(
        self, work: EpochWork, folder: Path, *, augment: bool, validate: bool, delay: int
    ) -> None:
        plan = ff.Plan(offload=Offload(augmentation=augment, validation=validate), numerics=LAST)
        self.mesh = ff.start(plan)
        torch.manual_seed(0)
        net = Arithmetic(LAST, torch.device("cpu")).net(models.build(work.model, CLASSES))
        train, test = datasets(work, folder)
        example = torch.empty(work.batch, 3, work.pixels, work.pixels)
        self.model = ff.parallelize(net, self.mesh, example=example, loss=nn.CrossEntropyLoss())
        self.train = ff.loader(train, self.mesh, batch_size=work.batch, workers=0)
        self.test = ff.loader(test, self.mesh, batch_size=work.batch, shuffle=False, workers=0)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.validator = ff.Validator(
            self.model, self.test, score=_score, figures=_figures, delay=delay
        )
        self.results: dict[int, list[str]] = {}
        """by epoch, as hexadecimal digits: to be compared bit by bit"""
        self.epochs = 0

    def step(self, images: Tensor, targets: Tensor) -> None:
        """Forward, backward, update."""
        self.model.step(images.to(memory_format=torch.channels_last), targets)
        self.optim.step()
        self.optim.zero_grad()

    def epoch(self, *, validated: bool = True) -> None:
        """All batches once; then a validation is begun, and that of the epoch before comes in."""
        self.model.train()
        for images, targets in self.train:
            self.step(images, targets)
        if validated:
            self.keep(self.validator.submit(self.epochs, self.train.cursor.step))
        self.epochs += 1

    def keep(self, results: Sequence[Any]) -> None:
        """Note results by their epoch."""
        for result in results:
            self.results[result.epoch] = [value.hex() for value in result.sums]

    def finish(self) -> None:
        """Wait for what is still evaluated."""
        self.keep(self.validator.finish())


def _score(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(outputs.double(), targets, reduction="sum")
    right = (outputs.argmax(1) == targets).sum()
    return torch.stack([losses, right.double(), targets.new_tensor(len(targets)).double()])


def _figures(sums: Sequence[float]) -> dict[str, float]:
    return {"loss": sums[0] / sums[2], "accuracy": sums[1] / sums[2]}
