"""Gradients that end within the net are None in all stages before: weight decay leaves these alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout, Plan
from fivefold.torch_private import KEPT_APPLY_SEEN
from joined import CHECKED, USER, expect_close
from ranks import run_ranks

pytestmark = CHECKED


class _Stopping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:  # noqa: ARG004
        return None


@torch.library.custom_op("fivefold_tests::stopping", mutates_args=())
def stopping(x: Tensor) -> Tensor:
    return x.clone()


stopping.register_fake(torch.empty_like)
stopping.register_autograd(lambda _ctx, _grad: None)


@torch.library.custom_op("fivefold_tests::unit", mutates_args=())
def unit(x: Tensor) -> Tensor:
    return x * 2.0


unit.register_fake(torch.empty_like)
unit.register_autograd(lambda _ctx, grad: grad / (grad.norm() + 1e-3))


def detached(x: Tensor) -> Tensor:
    return x.detach()


def data_of(x: Tensor) -> Tensor:
    return x.data.clone()


def unwatched(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def compared(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


class Stopped(nn.Module):
    """Nothing of the loss reaches the first two layers."""

    def __init__(self, ends: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.ends = ends

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(self.ends(x) if number == 2 else x))
        return x


def made(ends: Callable[[Tensor], Tensor]) -> Stopped:
    torch.manual_seed(1)
    return Stopped(ends).double()


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    "ends", [detached, data_of, unwatched, compared, _Stopping.apply, stopping]
)
@pytest.mark.parametrize(
    ("ranks", "pipeline"),
    [(3, {}), (4, {"schedule": "zero-bubble"}), (4, {"schedule": "chimera"}),
     (2, {"schedule": "interleaved", "stages_per_rank": 2})],
    ids=["1f1b", "zero-bubble", "chimera", "interleaved"],
)  # fmt: skip
def test_gradients_that_end_within_the_net(
    ends: Callable[[Tensor], Tensor], ranks: int, pipeline: dict[str, Any]
) -> None:
    nets = [made(ends) for _ in range(ranks + 1)]
    x, y = torch.randn(8, 5).double(), torch.randn(8, 5).double()
    plain = nets[-1]
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.MSELoss()(plain(x), y).backward()
        optimizer.step()

    def check(mesh: Mesh) -> None:
        net = nets[mesh.rank]
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        own = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        for _ in range(2):
            own.zero_grad()
            model.step(*model.shard(x, y))
            own.step()
        wanted = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            expect_close(parameter.grad, wanted[name].grad, name)
            torch.testing.assert_close(parameter, wanted[name])

    plan = Plan(layout=Layout(pipe=ranks))
    plan = plan.replace({f"pipeline.{key}": value for key, value in pipeline.items()}, USER)
    if ends == _Stopping.apply and not KEPT_APPLY_SEEN:
        with pytest.raises(UsageError, match=r"kept as f = F\.apply.*, or F\.apply\(x\)"):
            run_ranks(plan.layout, check, plan=plan)
        return
    run_ranks(plan.layout, check, plan=plan)


class Divided:
    """A mean whose denominator is known at the end."""

    def share(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        known = targets > -1.0
        return ((outputs - targets).square() * known).sum(), known.sum()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        numerator, denominator = self.share(outputs, targets)
        return numerator / denominator


def test_a_backward_of_a_registered_operator_sees_no_gradients_before_they_are_divided() -> None:
    x, y = torch.randn(8, 5).double(), torch.randn(8, 5).double()

    def check(mesh: Mesh) -> None:
        model = parallelize(made(unit), mesh, example=x, loss=Divided())
        with pytest.raises(UsageError, match="would see gradients that are not divided yet"):
            model.step(*model.shard(x, y))

    run_ranks(Layout(pipe=2), check)


@pytest.mark.parametrize("lazily", [torch.conj, torch.Tensor._neg_view])
def test_views_that_are_conjugated_or_negated_later_cross_stages(
    lazily: Callable[[Tensor], Tensor],
) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(lazily(torch.fft.fft(self.first(x))).imag)

    torch.manual_seed(1)
    nets = [Lazy().double() for _ in range(3)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    x, y = torch.randn(6, 5).double(), torch.randn(6, 3).double()
    nn.MSELoss()(nets[2](x), y).backward()

    def check(mesh: Mesh) -> None:
        model = parallelize(nets[mesh.rank], mesh, example=x, loss=nn.MSELoss())
        model.step(*model.shard(x, y))
        wanted = dict(nets[2].named_parameters())
        for name, parameter in model.named_parameters():
            expect_close(parameter.grad, wanted[name].grad, name)

    run_ranks(Layout(pipe=2), check)


def test_gradients_of_a_zero_bubble_schedule_may_be_changed_in_place() -> None:
    net = made(lambda x: x)

    def check(mesh: Mesh) -> None:
        own = made(lambda x: x)
        own.load_state_dict(net.state_dict())
        x = torch.ones(8, 5).double()
        model = parallelize(own, mesh, example=x, loss=nn.MSELoss())
        model.step(*model.shard(x, x * 0.5))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.1 * parameter

    plan = Plan(layout=Layout(pipe=2)).replace({"pipeline.schedule": "zero-bubble"}, USER)
    run_ranks(plan.layout, check, plan=plan)
