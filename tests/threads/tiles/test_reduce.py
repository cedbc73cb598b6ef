"""Reductions over dims that are cut: the same numbers and gradients as over the whole image."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.parallel.program.program import Program
from fivefold.parallel.program.sums import all_extreme, all_sum
from fivefold.plan import Layout
from ranks import run_ranks
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3), Layout(width=2)]


class Several(nn.Module):
    """Many reductions at once: starting ranks costs more than they do."""

    def __init__(self, functions: dict[str, Callable[[Tensor], Any]]) -> None:
        super().__init__()
        self._functions = functions

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {name: function(x) for name, function in self._functions.items()}


class Relative(nn.Module):
    """Uses global results on every tile, so that their gradients come from all of them."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self._functions = functions
        self.body = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.body(x)
        return [x * function(x) for function in self._functions]


REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "mean of the image": lambda x: x.mean((2, 3)),
    "mean kept": lambda x: torch.mean(x, dim=[-1, -2], keepdim=True),
    "mean of rows": lambda x: x.mean(2),
    "mean of columns": lambda x: x.mean(-1, True),
    "mean of everything": torch.mean,
    "mean of channels": lambda x: x.mean(1, keepdim=True),
    "numpy's words": lambda x: x.mean(axis=(2, 3), keepdims=True),
    "sum": lambda x: x.sum((1, 3)),
    "sum in float32": lambda x: x.sum(3, dtype=torch.float32).double() * 1e-7,
    "sum of what is true": lambda x: (x > 0).sum((2, 3)),
    "var": lambda x: x.var((2, 3)),
    "var, biased": lambda x: torch.var(x, (2,), False, True),
    "var of everything": lambda x: x.var(unbiased=False),
    "var, corrected": lambda x: x.var((1, 2, 3), correction=2, keepdim=True),
    "std": lambda x: torch.std(x, dim=3),
    "std of what is constant": lambda x: (x * 0 + 1).std((2, 3)),
    "var_mean": lambda x: torch.var_mean(x, dim=(2, 3), correction=0),
    "std_mean": lambda x: torch.std_mean(x, (0, 3), keepdim=True),
    "amax": lambda x: x.amax((2, 3)),
    "amin of ties": lambda x: torch.amin(x.round(), (2, 3), keepdim=True),
    "max of everything": lambda x: x.round().max(),
    "min of everything": lambda x: x.min(),
    "max of channels": lambda x: x.max(1),
    "max of rows": lambda x: x.max(2)[0],
    "max of two": lambda x: torch.max(x, x.mean((2, 3), keepdim=True)),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.norm(x, dim=(2, 3), p=2),
    "norm of zeros": lambda x: torch.linalg.vector_norm(x.clamp(max=0).round(), dim=(2, 3)),
    "norm of kind 1": lambda x: torch.linalg.vector_norm(x, 1, dim=(2, 3)),
    "logsumexp": lambda x: x.logsumexp((2, 3)),
    "prod": lambda x: x.prod(3),
    "argmax of channels": lambda x: x.argmax(1),
    "argmax": lambda x: x.argmax(),
    "any": lambda x: (x > 2).any(3),
}


RELATIVE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.mean((2, 3), keepdim=True),
    lambda x: x.mean((2, 3), keepdim=True).sigmoid(),
    lambda x: x.std(2, keepdim=True),
    lambda x: x.amax((2, 3), keepdim=True),
    lambda x: torch.linalg.vector_norm(x, dim=(1, 2, 3), keepdim=True),
    lambda x: x.logsumexp(3, keepdim=True),
    lambda x: 1 / x.sum(),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reduction_over_tiles_is_one_over_the_image(layout: Layout) -> None:
    expect_tiles(Several(REDUCTIONS), (2, 3, 11, 7), layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_of_a_result_come_from_all_tiles(layout: Layout) -> None:
    expect_tiles(Relative(RELATIVE), (2, 3, 11, 7), layout)


def test_reductions_of_volumes() -> None:
    names = ("mean of the image", "var", "amax", "mean of columns", "norm")
    functions = {name: REDUCTIONS[name] for name in names}
    expect_tiles(Several(functions), (2, 3, 5, 7, 4), Layout(depth=2, height=2))


def test_sums_have_their_adjoint() -> None:
    torch.manual_seed(1)
    xs, ys = torch.randn(2, 3, 4, 5, dtype=torch.complex128)

    def check(mesh: Mesh) -> tuple[complex, complex]:
        x, y = xs[mesh.rank].clone().requires_grad_(), ys[mesh.rank]
        fx = all_sum(x, mesh.group("data"))
        (adjoint,) = torch.autograd.grad(fx, x, y)
        return torch.vdot(fx.flatten(), y.flatten()).item(), torch.vdot(
            x.flatten(), adjoint.flatten()
        ).item()

    results = run_ranks(3, check)
    left, right = (sum(r[side] for r in results) for side in (0, 1))
    assert left == pytest.approx(right, rel=1e-12)
    for rank, y in enumerate(run_ranks(3, lambda mesh: all_sum(xs[mesh.rank], mesh.group("data")))):
        assert torch.allclose(y, xs.sum(0)), rank


def test_ties_share_the_gradient_wherever_they_lie() -> None:
    xs = torch.tensor([[1.0, 3.0], [3.0, 3.0], [0.0, 2.0]])

    def check(mesh: Mesh) -> Tensor:
        x = xs[mesh.rank].clone().requires_grad_()
        found = all_extreme(x, (0,), True, mesh.group("data"))
        return torch.autograd.grad(found.sum(), x)[0]

    whole = xs.flatten().requires_grad_()
    (wanted,) = torch.autograd.grad(3 * whole.amax(), whole)
    assert torch.allclose(torch.cat(run_ranks(3, check)), wanted)


class Between(Relative):
    """Convolutions in front of reductions and behind them."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__(functions)
        self.last = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return [self.last(y) for y in super().forward(x)]


def _has_margins(program: Program) -> None:
    assert any(spread != spread.tight() for spread in program.spreads.values())


def test_margins_count_once() -> None:
    layout = Layout(height=2, width=2)
    expect_tiles(Between(RELATIVE[2:6]), (2, 3, 7, 5), layout, fuse=4, check=_has_margins)


def test_half_precision_adds_in_float32() -> None:
    """Sums of squares would overflow, and a thousand summands would lose their last digits."""
    functions: dict[str, Callable[[Tensor], Any]] = {
        name: (lambda x, function=function: function((x * 300).half()).double())
        for name, function in {
            "norm": lambda x: x.norm(dim=(2, 3)),
            "std": lambda x: x.std((2, 3)),
            "mean": lambda x: x.mean((2, 3)),
            "softmax": lambda x: x.softmax(2),
        }.items()
    }
    # one unit in the last place of half precision, and gradients that half precision has rounded
    expect_tiles(Several(functions), (2, 3, 11, 7), Layout(height=2, width=2), tolerance=2e-3)
