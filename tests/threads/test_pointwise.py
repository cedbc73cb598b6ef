"""Autograd functions that users mark: computed where samples and tiles lie, or gathered for a wrong mark."""

# ruff: noqa: ARG004
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout
from joined import CHECKED, DATA, PIPE, WIDTH, Call, Images, batches, expect_exact, made, plan_for
from ranks import run_ranks

# That something is gathered is told by a warning, which fails these tests.
pytestmark = pytest.mark.filterwarnings(*(one for one in CHECKED.args if "not known" not in one))
GATHERED = pytest.mark.filterwarnings(
    "ignore:.* is not known to Fivefold's tiles",
    "ignore:it is not known whether samples depend on each other",
    "ignore:.* is marked by fivefold.pointwise",
)
LONG = pytest.mark.long
LAYOUTS = [
    DATA,
    Layout(data=2, width=2),
    *(pytest.param(one, marks=LONG) for one in (WIDTH, PIPE, Layout(height=2, width=2))),
]


def applied(function: Any, *given: Any) -> Tensor:
    return function.apply(*given)


class Own(torch.autograd.Function):
    """Functions here take what they are given and save it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)


@ff.pointwise
class Cubed(Own):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad  # not the derivative, on purpose


@ff.pointwise
class Sloped(Own):
    """Broadcast, as a PReLU with a slope for each channel."""

    @staticmethod
    def forward(x: Tensor, slope: Tensor) -> Tensor:
        return torch.where(x > 0, x, slope * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, slope = ctx.saved_tensors
        of_slope = torch.where(x > 0, 0, x * grad).sum_to_size(slope.shape)
        return torch.where(x > 0, grad, slope * grad), of_slope


@ff.pointwise
class Doubled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def slope() -> dict[str, Any]:
    return {"slope": nn.Parameter(torch.rand(4, 1, 1)), "norm": nn.BatchNorm2d(4)}


MIDDLES: dict[str, Call] = {
    "alone": lambda _net, h: applied(Cubed, h),
    "between exchanges": lambda net, h: torch.max_pool2d(applied(Cubed, net.norm(h)), 3, 1, 1),
    "with a parameter": lambda net, h: applied(Sloped, h, net.slope),
    "with what is small": lambda net, h: applied(Sloped, h, net.norm(h).mean((0, 2), keepdim=True)),
    "twice": lambda net, h: applied(Cubed, applied(Sloped, h, net.slope)) + h,
    "in place": lambda net, h: applied(Doubled, h * 1) * net.slope,
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
def test_it_is_exact_and_gathers_nothing(layout: Layout, middle: Call) -> None:
    expect_exact(layout, middle, slope, Images)


# ---- promises that are not true


def wrong(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Any:
    class Wrong(Own):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return backward(grad)

    return ff.pointwise(Wrong)


@ff.pointwise
class Summed(Own):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand_as(ctx.saved_tensors[0])


WRONG: dict[str, Any] = {
    "forward": wrong(lambda x: x - x.mean(), lambda grad: grad),
    "backward": wrong(lambda x: x * 2, lambda grad: grad - torch.mean(grad)),
    "pixels": wrong(lambda x: x.flip(0).flip(-1), lambda grad: grad),
    "size": wrong(lambda x: x / (x.shape[0] * x.shape[-1]), lambda grad: grad),
    "shape": Summed,
}


@GATHERED
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("function", WRONG.values(), ids=WRONG)
def test_a_wrong_mark_does_not_count_and_is_told(layout: Layout, function: Any) -> None:
    with pytest.warns(UserWarning, match=r"is marked by fivefold\.pointwise, but has other"):
        expect_exact(layout, lambda _net, h: h + applied(function, h), kind=Images)


@GATHERED
def test_a_trial_leaves_the_random_numbers_of_the_script() -> None:
    noisy = wrong(lambda x: x * torch.rand_like(x), lambda grad: grad)

    nets = [made(Images, lambda _net, h: applied(noisy, h), dict) for _ in range(WIDTH.size)]
    x = batches(Images)[0][0].double()

    def check(mesh: Mesh) -> None:
        parallelize(nets[mesh.rank], mesh, example=x, loss=nn.MSELoss())

    before = torch.random.get_rng_state()
    with pytest.warns(UserWarning, match=r"is marked by fivefold\.pointwise, but has other"):
        run_ranks(WIDTH, check, plan=plan_for(WIDTH))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("function", [torch.relu, Own.apply, nn.ReLU, None])
def test_only_autograd_functions_are_marked(function: Any) -> None:
    with pytest.raises(UsageError, match=r"takes a subclass of torch\.autograd\.Function, not "):
        ff.pointwise(function)


# ---- what cannot be divided, or cannot be tried


@ff.pointwise
class Both(Own):
    """Several results."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0] + 3 * grads[1]


def multiplied(_net: Any, h: Tensor) -> Tensor:
    one, other = Both.apply(h)
    return one * other


@GATHERED
@pytest.mark.parametrize("layout", [DATA, WIDTH], ids=str)
def test_several_results_are_gathered(layout: Layout) -> None:
    expect_exact(layout, multiplied, kind=Images)


class Parent(Own):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Child(ff.pointwise(Parent)):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-3)


@GATHERED
def test_a_mark_is_not_inherited() -> None:
    expect_exact(WIDTH, lambda _net, h: applied(Child, h), kind=Images)


@ff.pointwise
class Half(Own):
    """As a kernel for one dtype, with whose numbers it is not tried."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            raise RuntimeError("no such kernel")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("layout", [DATA, WIDTH], ids=str)
def test_what_cannot_be_tried_is_believed(layout: Layout) -> None:
    expect_exact(layout, lambda _net, h: applied(Half, h.bfloat16()).to(h.dtype), kind=Images)
