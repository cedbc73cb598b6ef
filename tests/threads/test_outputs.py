"""What a net returns besides a row for each sample, and a loss of the user's own takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.plan import Layout
from joined import USER, Net, expect_exact, plan_for
from ranks import run_ranks

LAYOUTS = [Layout(data=2), Layout(data=3), Layout(pipe=2)]
ROWS = (4, 6, 5, 4)
"""shares of two and three, which are also the sizes of what is no sample's"""


class Returning(Net):
    """Returns something beside the outputs."""

    def __init__(self, middle: Any, **held: Any) -> None:
        super().__init__(lambda _net, x: x.tanh(), **held)
        self.beside = middle
        self.two, self.three = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.beside(self, x)


def vectors(net: Returning, _x: Tensor) -> Any:
    return {"two": net.two.exp(), "three": net.three * 2}


def number(net: Returning, _x: Tensor) -> Tensor:
    return net.two.exp().sum() + net.first.weight.square().mean()


def by_time(net: Returning, x: Tensor) -> Tensor:
    """Two steps of time, on the leading dim."""
    return torch.stack([net.first(x), net.first(x * 2)])


def several(net: Returning, x: Tensor) -> Tensor:
    """Three rows of every sample."""
    return net.first(x).view(-1, 2)


def added(outputs: tuple[Tensor, Any], targets: Tensor) -> Tensor:
    found, beside = outputs
    total = (found - targets).square().mean()
    for leaf in beside.values() if isinstance(beside, dict) else [beside]:
        total = total + (leaf * torch.arange(1.0, leaf.numel() + 1).view(leaf.shape)).sin().sum()
    return total


@pytest.mark.long(every=8)
@pytest.mark.filterwarnings("ignore:the loss 'added' is not one that Fivefold can take apart")
@pytest.mark.filterwarnings("ignore:the loss cannot be computed in tiles")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("beside", [vectors, number, by_time, several])
def test_outputs_are_gathered_along_the_samples_and_no_others(beside: Any, layout: Layout) -> None:
    expect_exact(layout, beside, kind=Returning, criterion=lambda: added, rows=ROWS)


class OwnLoss(nn.Module):
    """Returns its loss, as models of transformers do that are given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.last(self.first(inputs).tanh())
        return nn.functional.mse_loss(logits, labels), logits


def returned(outputs: tuple[Tensor, Tensor], _targets: None) -> Tensor:
    return outputs[0]


@pytest.mark.filterwarnings("ignore:the loss 'returned' is not one that Fivefold can take apart")
@pytest.mark.filterwarnings("ignore:the loss cannot be computed in tiles")
@pytest.mark.filterwarnings(
    "ignore:it is not known whether samples depend on each other in mse_loss"
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_net_may_return_its_loss(layout: Layout) -> None:
    torch.manual_seed(3)
    start = OwnLoss().double()
    batch = {
        "inputs": torch.randn(5, 5, dtype=torch.float64),
        "labels": torch.randn(5, 3, dtype=torch.float64),
    }
    plain = copy.deepcopy(start)
    wanted = plain(**batch)[0]
    wanted.backward()

    def check(mesh: Mesh) -> None:
        net = copy.deepcopy(start)
        model = ff.parallelize(net, mesh, example=batch, loss=returned)
        torch.testing.assert_close(model.step(model.shard(batch)), wanted.detach())
        for own, other in zip(net.parameters(), plain.parameters(), strict=True):
            if not own.is_meta:
                torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-12)

    run_ranks(layout, check, plan=plan_for(layout))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the loss 'compared' is not one that Fivefold can take apart")
@pytest.mark.parametrize("layout", [Layout(data=2), Layout(pipe=2)], ids=str)
def test_a_loss_that_compares_needs_targets(layout: Layout) -> None:
    def compared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    x = torch.randn(4, 5)

    def check(mesh: Mesh) -> None:
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        model = ff.parallelize(net, mesh, example=x, loss=compared)
        model.step(model.shard(x))

    # The stage that fails does not tell the one before it, whose process would see the other's end.
    plan = plan_for(layout).replace({"comm.timeout_s": 5.0}, USER)
    with pytest.raises(UsageError, match="fails without targets, of which step was given none"):
        run_ranks(layout, check, plan=plan, timeout_s=20)
