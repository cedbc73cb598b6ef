"""What tests of divided parameters share: plans, small nets, and gradients to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.mesh import Mesh, start
from fivefold.parallel import clip_grad_norm_, gathering, parallelize
from fivefold.plan import Layout, Memory, Plan
from gates import X, Y
from ranks import run_ranks

__all__ = [
    "BOTH", "Dropped", "X", "Y", "close", "gradients", "on", "plan_of", "small", "trained",
]  # fmt: skip

BOTH = pytest.mark.parametrize("shard", ["optimizer", "parameters"])


def plan_of(shard: Any, layout: Layout | int, **sections: Any) -> Plan:
    layout = Layout(data=layout) if isinstance(layout, int) else layout
    return Plan(layout=layout, memory=Memory(shard=shard), **sections)


SMALL = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def small() -> nn.Module:
    # Random numbers of ranks that are threads would depend on their order.
    return copy.deepcopy(SMALL)


def on(shard: str, ranks: int, check: Callable[[Mesh], Any], **sections: Any) -> list[Any]:
    return run_ranks(ranks, check, plan=plan_of(shard, ranks, **sections), timeout_s=40)


def gradients(net: nn.Module) -> list[Tensor | None]:
    """Copies of the gradients, whole."""
    found = [p.grad for p in net.parameters()]
    return [
        g.full_tensor() if isinstance(g, DTensor) else g if g is None else g.clone() for g in found
    ]


def close(got: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        g is e if e is None or g is None else torch.allclose(g, e, rtol=1e-11, atol=1e-13)
        for g, e in zip(got, expected, strict=True)
    )


class Dropped(nn.Module):
    """Convolutions, batch norm, dropout, and a parameter that is too short to be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.4),
            nn.Conv2d(5, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        )  # fmt: skip
        self.factor = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)) * self.factor)


def trained(shard: str, ranks: int) -> list[list[float]]:
    """Three steps in the process group that there is; the weights and buffers, whole."""
    torch.manual_seed(3)
    gathering.LEAST_BYTES = 1
    net = nn.Sequential(
        nn.Linear(40, 64, bias=False), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 10)
    )
    x, y = torch.randn(7, 40), torch.randint(10, (7,))
    mesh = start(plan_of(shard, ranks), device="cpu")
    model = parallelize(net, mesh, loss=nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        model.step(*model.shard(x, y))
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [value.flatten().tolist() for value in model.full_state_dict().values()]
