"""What every contender computes: a model, micro-batches of one size made beforehand, a loss, an optimiser."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.recipes.models import build

CLASSES = 1000
CHAIN_CHANNELS = 8


@dataclass(frozen=True)
class Workload:
    """A batch of several micro-batches per step; the model's batch norms see one of them at a time."""

    model: str
    options: Mapping[str, Any]
    image: int
    """pixels along each side"""
    samples: int
    """of a micro-batch"""
    micro_batches: int
    cut: str
    """modules that begin a stage; empty for Fivefold's own choice"""

    @classmethod
    def of(cls, asked: argparse.Namespace) -> Workload:
        """What the command line of a contender says."""
        options = json.loads(asked.options)
        return cls(asked.model, options, asked.image, asked.samples, asked.micro_batches, asked.cut)

    def words(self) -> list[str]:
        """The command line that `of` understands."""
        told = {
            "model": self.model,
            "options": json.dumps(self.options),
            "image": self.image,
            "samples": self.samples,
            "micro-batches": self.micro_batches,
            "cut": self.cut,
        }
        return [word for key, value in told.items() for word in (f"--{key}", str(value))]

    def net(self) -> nn.Module:
        """The model, initialised alike in every contender."""
        torch.manual_seed(0)
        if self.model == "chain":
            return chain(**self.options)
        return build(self.model, CLASSES, **self.options)

    def shape(self, micro_batches: int = 1) -> tuple[int, ...]:
        """Of the images of so many micro-batches."""
        channels = CHAIN_CHANNELS if self.model == "chain" else 3
        return (self.samples * micro_batches, channels, self.image, self.image)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Images and classes of all micro-batches."""
        draw = torch.Generator().manual_seed(1)
        shape = self.shape(self.micro_batches)
        return torch.randn(shape, generator=draw), torch.randint(
            CLASSES, (shape[0],), generator=draw
        )

    def optimiser(self, net: nn.Module) -> torch.optim.Optimizer:
        """The same for all; the learning rate is small because pictures of noise teach nothing."""
        return torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)


def chain(layers: int = 24) -> nn.Module:
    """Layers that all compute and keep the same: stages of it are alike."""
    found: list[nn.Module] = []
    for _ in range(layers):
        found += [nn.Conv2d(CHAIN_CHANNELS, CHAIN_CHANNELS, 3, padding=1), nn.Tanh()]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHAIN_CHANNELS, CLASSES))
    return nn.Sequential(*found, *head)


def parser(contenders: list[str], doc: str | None) -> argparse.ArgumentParser:
    """The command line of a contender."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("contender", choices=contenders)
    made.add_argument("--socket", required=True, help="where run.py listens")
    made.add_argument("--model", required=True)
    made.add_argument("--options", default="{}")
    made.add_argument("--image", type=int, required=True)
    made.add_argument("--samples", type=int, required=True)
    made.add_argument("--micro-batches", type=int, required=True)
    made.add_argument("--cut", default="")
    return made
