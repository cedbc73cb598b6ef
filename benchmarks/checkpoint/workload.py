"""What is trained while checkpoints are taken: a net, its optimiser and a step, alike for all contenders."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fivefold.recipes.models import build

__all__ = ["Training", "training"]

WIDTH = 2048
"""of a layer: 4 Mi parameters and as much twice for Adam, 50 MB"""
IMAGE, CLASSES = 64, 200
"""of a photo, as Tiny ImageNet has them"""
PATCH = 48
"""pixels of a side that EDSR doubles"""

Division = Literal["replicated", "sharded"]


@dataclass(frozen=True)
class Training:
    """One rank's part of a run."""

    net: nn.Module
    """wrapped, as the script of a user has it"""
    optimiser: torch.optim.Optimizer
    step: Callable[[], None]
    """forward, backward and update, on a batch made beforehand"""

    def rest(self) -> None:
        """Give back what only a step needs: all contenders are in memory at once."""
        self.optimiser.zero_grad()
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)

    @property
    def state_bytes(self) -> int:
        """Of parameters, buffers and the optimiser, of all ranks together, each counted once."""
        kept = [*self.net.parameters(), *self.net.buffers()]
        for state in self.optimiser.state.values():
            kept += [value for value in state.values() if isinstance(value, Tensor)]
        return sum(t.numel() * t.element_size() for t in kept)


def training(model: str, layers: int, batch: int, division: Division) -> Training:
    """Build a run on the default group: `model` is "mlp" with so many layers, or a recipe's."""
    torch.manual_seed(0)
    if model == "mlp":
        return _perceptron(layers, batch, division)
    return _images(model, batch, division)


def _perceptron(layers: int, batch: int, division: Division) -> Training:
    """A chain of linear layers with Adam, two thirds of whose state are the optimiser's."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)]
    net = divided(nn.Sequential(*blocks), division)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-4)
    inputs, targets = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)

    def step() -> None:
        optimiser.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimiser.step()

    return Training(net, optimiser, step)


def _images(model: str, batch: int, division: Division) -> Training:
    """A recipe's model on noise in the format of its data: bytes, which every step makes numbers of."""
    net = divided(build(model, CLASSES), division)
    if model.startswith("edsr"):
        side, doubled = (batch, 3, PATCH, PATCH), (batch, 3, 2 * PATCH, 2 * PATCH)
        images, wanted = (torch.randint(256, size, dtype=torch.uint8) for size in (side, doubled))
        optimiser: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    else:
        images = torch.randint(256, (batch, 3, IMAGE, IMAGE), dtype=torch.uint8)
        wanted = torch.randint(CLASSES, (batch,))
        optimiser = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimiser.zero_grad()
        made = net(images / 255 - 0.5)
        if wanted.dtype == torch.uint8:
            loss = nn.functional.l1_loss(made, wanted / 255 - 0.5)
        else:
            loss = nn.functional.cross_entropy(made, wanted)
        loss.backward()
        optimiser.step()

    return Training(net, optimiser, step)


def divided(net: nn.Module, division: Division) -> nn.Module:
    """Copies on every rank, or parts of every layer."""
    if division == "replicated":
        return DistributedDataParallel(net, gradient_as_bucket_view=True)
    for child in net.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    whole: Any = fully_shard(net)
    return whole
