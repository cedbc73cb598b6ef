"""What the zoo of exactness is made of: a case, how it is judged, and nets to put things into.

Every case trains two steps on 3 ranks with a batch of 8, and on 4 ranks with a batch of 3, where one has
nothing to do; all are judged by the measure that `fivefold verify` applies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.plan import Plan
from fivefold.train.verify import verify
from fivefold.train.verify.report import Report
from ranks import run_ranks

__all__ = [
    "CLASSES",
    "IMAGE",
    "LAYOUTS",
    "VECTOR",
    "Call",
    "Case",
    "Then",
    "expect_exact",
    "flat",
    "run",
]

LAYOUTS = [(3, 8), (4, 3)]
"""ranks and samples"""
IMAGE = (3, 6, 5)
CLASSES = 4


@dataclass(frozen=True)
class Case:
    """How to build a net, what to feed it, and what loss to train it with."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any] = field(default=lambda n: torch.randn(n, *IMAGE))
    targets: Callable[[int], Any] = field(default=lambda n: torch.randint(0, CLASSES, (n,)))
    loss: Callable[..., Any] = field(default_factory=nn.CrossEntropyLoss)


def run(
    case: Case,
    ranks: int,
    samples: int,
    dtype: torch.dtype = torch.float64,
    plan: Plan | None = None,
) -> Report:
    torch.manual_seed(11)
    net = case.build()
    batches = [(case.inputs(samples), case.targets(samples)) for _ in range(2)]

    def check(mesh: Mesh) -> Report:
        return verify(
            lambda: copy.deepcopy(net),
            mesh,
            loss=case.loss,
            batch=batches.__getitem__,
            steps=len(batches),
            dtype=dtype,
        )

    return run_ranks(ranks, check, plan=plan, timeout_s=40)[0]


def expect_exact(case: Case, ranks: int, samples: int) -> None:
    report = run(case, ranks, samples)
    assert report.passed, (report.verdict(), report.notes, report.worst)


class Then(nn.Module):
    """A convolution, something in question, and a classifier."""

    def __init__(self, middle: nn.Module, channels: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1, stride=2)
        self.middle = middle
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.middle(self.conv(x)))
        return self.head(x.mean((2, 3)).view(x.shape[0], -1))


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def flat(width: int = 8, *middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), *middle, nn.Linear(width, CLASSES))


VECTOR: dict[str, Any] = {"inputs": lambda n: torch.randn(n, 5)}
"""inputs of `flat`"""
