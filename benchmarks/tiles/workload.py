"""What all contenders compute: a model, images made beforehand, a loss and an optimiser."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fivefold.recipes.models import build, names, returns

CLASSES = 1000
POOL = 2
"""different images, used in turn: no loader takes part"""


@dataclass(frozen=True)
class Workload:
    """One image per step."""

    model: str
    height: int
    width: int
    features: int | None = None
    """of EDSR, where not the model's own"""

    @classmethod
    def of(cls, asked: argparse.Namespace) -> Workload:
        """What the command line of a contender says."""
        return cls(asked.model, asked.height, asked.width, asked.features or None)

    def net(self) -> nn.Module:
        """The model, initialised alike in every contender."""
        torch.manual_seed(0)
        return build(self.model, CLASSES, **({"features": self.features} if self.features else {}))

    def loss(self) -> nn.Module:
        """Of classes cross entropy, of pictures what the paper of EDSR has."""
        return nn.L1Loss() if returns(self.model) == "picture" else nn.CrossEntropyLoss()

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Images and targets."""
        draw = torch.Generator().manual_seed(1)
        return [(torch.randn(self.shape, generator=draw), self._target(draw)) for _ in range(POOL)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the images."""
        return (1, 3, self.height, self.width)

    def _target(self, draw: torch.Generator) -> Tensor:
        match returns(self.model):
            case "picture":
                return torch.randn(1, 3, 2 * self.height, 2 * self.width, generator=draw)
            case "class map":
                return torch.randint(CLASSES, (1, self.height, self.width), generator=draw)
            case "classes":
                return torch.randint(CLASSES, (1,), generator=draw)

    def optimiser(self, net: nn.Module) -> torch.optim.Optimizer:
        """The same for all; the learning rate is small because pictures of noise teach nothing."""
        return torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)


def parser(contenders: list[str], doc: str | None) -> argparse.ArgumentParser:
    """The command line of a contender."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("contender", choices=contenders)
    made.add_argument("--socket", required=True, help="where run.py listens")
    made.add_argument("--model", choices=names(), required=True)
    made.add_argument("--height", type=int, required=True)
    made.add_argument("--width", type=int, required=True)
    made.add_argument("--features", type=int, default=0)
    return made
