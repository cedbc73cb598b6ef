"""What is trained while checkpoints are taken: a net, its optimiser and a step, alike for all contenders."""

from __future__ import annotations

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
IMAGE = 32

Division = Literal["replicated", "sharded"]


@dataclass(frozen=True)
class Training:
    """One rank's part of a run."""

    net: nn.Module
    """wrapped, as the script of a user has it"""
    optimiser: torch.optim.Optimizer
    step: Callable[[], None]
    """forward, backward and update, on a batch made beforehand"""

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
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)]
        net: nn.Module = nn.Sequential(*blocks)
        inputs, targets = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
        criterion: nn.Module = nn.MSELoss()
    else:
        net, criterion = build(model, 10), nn.CrossEntropyLoss()
        inputs, targets = torch.randn(batch, 3, IMAGE, IMAGE), torch.randint(10, (batch,))
    wrapped = divided(net, division)
    optimiser = torch.optim.Adam(wrapped.parameters(), lr=1e-4)

    def step() -> None:
        optimiser.zero_grad()
        criterion(wrapped(inputs), targets).backward()
        optimiser.step()

    return Training(wrapped, optimiser, step)


def divided(net: nn.Module, division: Division) -> nn.Module:
    """Copies on every rank, or parts of every layer."""
    if division == "replicated":
        return DistributedDataParallel(net)
    for child in net.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    whole: Any = fully_shard(net)
    return whole
