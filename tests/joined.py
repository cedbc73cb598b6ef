"""Small nets with something between two layers, compared with one process over several steps."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout, Plan, Provenance
from ranks import run_ranks

__all__ = [
    "CHECKED", "DATA", "PIPE", "USER", "WIDTH", "Call", "Images", "Net", "batches", "expect_close",
    "expect_exact", "made", "plan_for", "refusal", "train",
]  # fmt: skip

CHECKED = pytest.mark.filterwarnings(
    "ignore:whether the samples of a batch depend on each other in the net was not checked",
    "ignore:it is not known whether samples depend on each other",
    "ignore:.* is not known to Fivefold's tiles",
    "ignore:the loss .* is not one that Fivefold can take apart",
    "ignore:the loss cannot be computed",
    "ignore:`torch.jit.script` is deprecated",
    "ignore:size_average and reduce args will be deprecated",
)
"""for tests that compare: what is told of a net makes no difference to them"""
DATA, WIDTH, PIPE = Layout(data=2), Layout(width=2), Layout(pipe=2)
USER = Provenance("user", "a test")
STEPS = 4
Call = Callable[[Any, Tensor], Tensor]
_DRAWING = threading.Lock()
"""ranks are threads, which share one generator"""


class Net(nn.Module):
    """Something between two layers."""

    def __init__(self, middle: Call, **held: Any) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(5, 6), nn.Linear(6, 3), middle
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x)))


class Images(Net):
    """The same for images."""

    def __init__(self, middle: Call, **held: Any) -> None:
        super().__init__(middle, **held)
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3)


def plan_for(layout: Layout) -> Plan:
    """Stages take the batch at once, so that one process does too."""
    plan = Plan(layout=layout)
    return plan.replace({"pipeline.schedule": "layer"}, USER) if layout.pipe > 1 else plan


def batches(kind: type[Net], rows: tuple[int, ...] = (5,) * STEPS) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(
        4
    )  # of its own: ranks are threads and may draw at one time
    draw = functools.partial(torch.randn, generator=dice)
    if kind is Images:
        return [(draw(3, 2, 7, 9), draw(3, 3, 5, 7)) for _ in range(STEPS)]
    return [(draw(n, 5), draw(n, 3)) for n in rows]


def made(kind: type[Net], middle: Call, held: Callable[[], dict[str, Any]]) -> Net:
    with _DRAWING:
        torch.manual_seed(2)
        return kind(middle, **held()).double()


def expect_exact(
    layout: Layout,
    middle: Call,
    held: Callable[[], dict[str, Any]] = dict,
    kind: type[Net] = Net,
    criterion: Callable[[], Any] = nn.MSELoss,
    *,
    rows: tuple[int, ...] = (5,) * STEPS,
) -> None:
    """Losses, gradients, buffers and the loss's buffers of every step are those of one process."""
    data = [(x.double(), y.double()) for x, y in batches(kind, rows)]

    def check(mesh: Mesh) -> None:
        net, loss = made(kind, middle, held), criterion()
        one, own = made(kind, middle, held), criterion()
        model = parallelize(net, mesh, example=data[0][0], loss=loss)
        for x, y in data:
            told = model.step(*model.shard(x, y))
            expected = own(one(x), y)
            expected.backward()
            assert told.dtype == expected.dtype
            torch.testing.assert_close(told, expected.detach(), rtol=1e-9, atol=1e-11)
            wanted = dict(one.named_parameters())
            for name, parameter in net.named_parameters():
                if not parameter.is_meta:
                    expect_close(parameter.grad, wanted[name].grad, name)
            for (name, buffer), other in zip(net.named_buffers(), one.buffers(), strict=True):
                if not buffer.is_meta:
                    expect_close(buffer, other, name)
            if isinstance(loss, nn.Module):
                for buffer, other in zip(loss.buffers(), own.buffers(), strict=True):
                    expect_close(buffer, other, "a buffer of the loss")
            model.zero_grad(set_to_none=True)
            one.zero_grad(set_to_none=True)

    run_ranks(layout, check, plan=plan_for(layout))


def train(net: nn.Module, mesh: Mesh, data: list[tuple[Tensor, Tensor]]) -> None:
    model = parallelize(net, mesh, example=data[0][0], loss=nn.MSELoss())
    for x, y in data:
        model.step(*model.shard(x, y))


def expect_close(got: Tensor | None, wanted: Tensor | None, what: str) -> None:
    assert (got is None) == (wanted is None), what
    if got is not None and wanted is not None:
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11, msg=lambda m: f"{what}: {m}")


def refusal(
    layout: Layout, middle: Call, held: Callable[[], dict[str, Any]] = dict, cut: str = ""
) -> str:
    """What a net is refused with, on the first step that it cannot take."""
    data = [(x.double(), y.double()) for x, y in batches(Net)]

    def check(mesh: Mesh) -> str:
        net = made(Net, middle, held)
        try:
            train(net, mesh, data)
        except UsageError as problem:
            return str(problem)
        return ""

    plan = plan_for(layout)
    plan = plan.replace({"pipeline.cut": cut}, USER) if cut else plan
    told = run_ranks(layout, check, plan=plan)
    assert len(set(told)) == 1, told
    return told[0]
