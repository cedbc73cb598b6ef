"""Losses that train something of their own, and nets that train nothing: gradients as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout, Plan, Provenance
from ranks import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:the loss .* is not one that Fivefold can take apart",
    "ignore:the loss cannot be computed",
)
USER = Provenance("user", "a test")


class Tempered(nn.Module):
    """A learned temperature, with a penalty on it."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) * torch.exp(-self.level) + self.level


class Sharing(Tempered):
    """It says itself how to be divided."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) * self.level

    def share(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        each = F.mse_loss(outputs, targets, reduction="sum") * self.level
        return each, torch.tensor(float(targets.numel()))


class Penalised(nn.Module):
    """It reads the net's weights, which are no parameters of its own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.level = net, nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        squares = sum((p.square().sum() for p in self.net.parameters()), torch.zeros(()))
        return F.mse_loss(outputs, targets) + self.level * squares


torch.manual_seed(4)
NET = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 1)
).double()


def net() -> nn.Module:
    return copy.deepcopy(NET)


def clamped(loss: nn.Module) -> nn.Module:
    """A hook that is not linear: it has to see the whole gradient."""
    level: Any = loss.level
    level.register_hook(lambda gradient: gradient.clamp(-0.2, 0.2))
    return loss


def trained(model: Any, loss: Any, parameters: list[nn.Parameter], batches: Any) -> list[Tensor]:
    """Gradients after a step, after one that accumulates, and after one behind an update."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found: list[Tensor] = []
    for number, (x, y) in enumerate(batches):
        if number != 1:
            optimizer.zero_grad()
        model(x, y)
        for name, parameter in loss.named_parameters():
            assert (parameter.grad is None) == (name == "unused"), name
        found.append(loss.level.grad.clone())
        if number:
            optimizer.step()
    return [*found, loss.level.detach().clone()]


def expect_as_alone(make: Any, layout: Layout, rows: int, **settings: Any) -> None:
    torch.manual_seed(1)
    batches = [
        (torch.randn(rows, 3, 6, 5).double(), torch.randn(rows, 2, 6, 5).double()) for _ in range(3)
    ]
    plain = net()
    alone = make(plain)

    def alone_step(x: Tensor, y: Tensor) -> None:
        alone(plain(x), y).backward()

    expected = trained(alone_step, alone, [*plain.parameters(), *_own(alone, plain)], batches)

    def check(mesh: Mesh) -> list[Tensor]:
        own = net()
        loss = make(own)
        model = parallelize(own, mesh, loss=loss, example=batches[0][0])
        parameters = [*model.parameters(), *_own(loss, own)]

        def step(x: Tensor, y: Tensor) -> None:
            model.step(*model.shard(x, y))

        return trained(step, loss, parameters, batches)

    plan = Plan(layout=layout).replace(settings, USER)
    for found in run_ranks(layout, check, plan=plan):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def _own(loss: nn.Module, net: nn.Module) -> list[nn.Parameter]:
    of_net = {id(p) for p in net.parameters()}
    return [p for p in loss.parameters() if id(p) not in of_net]


LAYOUTS = [
    (Layout(data=2), 5),
    (Layout(data=3), 2),  # a rank without samples
    (Layout(height=2), 2),
    (Layout(data=2, width=2), 3),
    (Layout(data=3, height=2), 2),
]


@pytest.mark.long(every=8)
@pytest.mark.parametrize("make", [Tempered, Sharing, lambda: clamped(Tempered())])
@pytest.mark.parametrize(("layout", "rows"), LAYOUTS, ids=str)
def test_a_loss_trains_its_own(make: Any, layout: Layout, rows: int) -> None:
    expect_as_alone(lambda _net: make(), layout, rows)


@pytest.mark.parametrize(("layout", "rows"), LAYOUTS, ids=str)
def test_a_loss_that_holds_the_net_trains_it_once(layout: Layout, rows: int) -> None:
    expect_as_alone(Penalised, layout, rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline.micro_batches": 2},
        {"pipeline.schedule": "gems"},
        {"pipeline.schedule": "zero-bubble"},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [Layout(pipe=2), Layout(pipe=2, data=2)], ids=str)
def test_in_stages(layout: Layout, settings: dict[str, Any]) -> None:
    expect_as_alone(lambda _net: clamped(Sharing()), layout, 5, **settings)


@pytest.mark.parametrize("layout", [Layout(pipe=2), Layout(pipe=2, height=2)], ids=str)
def test_in_stages_without_micro_batches(layout: Layout) -> None:
    expect_as_alone(lambda _net: Tempered(), layout, 2, **{"pipeline.micro_batches": 1})


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_where_replicas_divide_parameters(shard: str) -> None:
    expect_as_alone(lambda _net: Tempered(), Layout(data=2), 3, **{"memory.shard": shard})


def test_a_loss_may_hold_a_net_that_is_made_equal() -> None:
    def check(mesh: Mesh) -> list[Tensor]:
        own = net()
        own[0].weight.data += mesh.rank
        parallelize(own, mesh, loss=Penalised(own))
        return [p.detach() for p in own.parameters()]

    first, second = run_ranks(2, check)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_bare_backward_is_refused() -> None:
    def check(mesh: Mesh) -> None:
        loss = Tempered()
        model = parallelize(net(), mesh, loss=loss)
        x, y = model.shard(torch.randn(4, 3, 6, 5).double(), torch.randn(4, 2, 6, 5).double())
        with pytest.raises(UsageError, match="the parameters of the loss would get"):
            loss(model(x), y).backward()

    run_ranks(2, check)


def test_a_net_that_is_frozen_at_first_trains_when_it_is_thawed() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(5, 3, 6, 5).double(), torch.randn(5, 2, 6, 5).double()
    plain = net()
    F.mse_loss(plain(x), y).backward()
    expected = [p.grad for p in plain.parameters()]

    def check(mesh: Mesh) -> tuple[float, list[Tensor | None]]:
        own = net().requires_grad_(False)
        criterion = Tempered()
        model = parallelize(own, mesh, loss=criterion)
        frozen = model.step(*model.shard(x, y)).item()
        own.requires_grad_(True)
        criterion.level.data.zero_()
        model.step(*model.shard(x, y))
        return frozen, [p.grad for p in own.parameters()]

    alone = copy.deepcopy(Tempered())(net()(x), y).item()
    for frozen, found in run_ranks(2, check):
        assert frozen == pytest.approx(alone, rel=1e-12)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
