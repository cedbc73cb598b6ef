"""The range exchange: everybody gets what it wanted, and the backward pass is the adjoint."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fivefold import comm
from fivefold.mesh import Mesh
from fivefold.parallel.program.exchange import Exchange, Lines, Want, exchange
from fivefold.parallel.program.spread import Division, Grid, Range, Spread
from fivefold.plan import Layout
from fivefold.trace import Tag
from ranks import run_ranks
from tiles import grid_of

LAYOUTS = [Layout(width=3), Layout(height=2, width=2), Layout(depth=2, height=3)]


def bounds(draw: random.Random, n: int, parts: int) -> list[int]:
    """Some parts may be empty."""
    return [0, *sorted(draw.randint(0, n) for _ in range(parts - 1)), n]


def any_spread(draw: random.Random, grid: Grid) -> Spread:
    spread = Spread.whole([draw.randint(1, 9) for _ in range(4)])
    dims = draw.sample(range(4), len(grid.axes))
    for index, dim in enumerate(dims):
        if draw.random() < 0.8:
            spread = spread.with_cut(
                dim, Division.at((index,), bounds(draw, spread.shape[dim], grid.sizes[index]))
            )
    return spread


def with_margins(draw: random.Random, spread: Spread) -> Spread:
    for dim in spread.cut_dims:
        cut, n = spread.cuts[dim], spread.shape[dim]
        assert cut is not None
        held = tuple(
            (max(a - draw.randint(0, 2), 0), min(b + draw.randint(0, 2), n)) for a, b in cut.owned
        )
        spread = spread.with_cut(dim, Division(cut.axes, cut.bounds, held))
    return spread


def any_wants(draw: random.Random, spread: Spread, grid: Grid) -> list[Want]:
    """Ranges, several of them, or everything; up to three elements outside of the tensor."""

    def segments(n: int) -> tuple[Range, ...]:
        found: list[Range] = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            start = draw.randint(-3, n)
            found.append((start, draw.randint(start, n + 3)))
        return tuple(found)

    axes = list(range(len(grid.axes)))
    wants: list[Want] = []
    for n in spread.shape:
        along = tuple(sorted(draw.sample(axes, draw.randint(0, 1))))
        parts = grid.sizes[along[0]] if along else 1
        wants.append(Want(along, tuple(segments(n) for _ in range(parts))))
    return wants


def expected(whole: Tensor, wants: list[Want], grid: Grid, rank: int, fill: float) -> Tensor:
    for dim, want in enumerate(wants):
        segments, n = want.segments[grid.part(rank, want.axes)], whole.shape[dim]
        columns = [index for a, b in segments for index in range(a, b)]
        inside = torch.tensor([min(max(i, 0), n - 1) for i in columns], dtype=torch.int64)
        whole = whole.index_select(dim, inside)
        for at, index in enumerate(columns):
            if not 0 <= index < n:
                whole.select(dim, at).fill_(fill)
    return whole


def check(mesh: Mesh) -> int:
    grid, moved = grid_of(mesh.layout), 0
    group = mesh.group(*grid.axes)
    rank = group.rank()
    for seed in range(40):
        draw = random.Random(seed)
        spread = with_margins(draw, any_spread(draw, grid))
        wants, fill = any_wants(draw, spread, grid), draw.choice((0.0, -2.5))
        torch_draw = torch.Generator().manual_seed(seed)
        whole = torch.randn(spread.shape, generator=torch_draw, dtype=torch.float64)
        plan = Exchange.of(spread, wants, grid, rank, fill)
        moved += plan.moves
        box = tuple(slice(*r) for r in spread.held(grid, rank))
        x = whole[box].clone().requires_grad_()
        y = exchange(x, plan, Lines(group, group))
        assert torch.equal(y, expected(whole.clone(), wants, grid, rank, fill)), seed
        # The adjoint: fill is no part of the linear map.
        z = torch.randn(y.shape, generator=torch_draw, dtype=torch.float64)
        linear = expected(whole.clone(), wants, grid, rank, 0.0)
        other = torch.randn(y.shape, generator=torch_draw, dtype=torch.float64) + z * rank
        (back,) = torch.autograd.grad(y, x, other) if y.requires_grad else (torch.zeros_like(x),)
        sides = torch.stack([(linear * other).sum(), (x.detach() * back).sum()])
        comm.all_reduce(sides, group, Tag.CONTROL)
        assert abs(sides[0] - sides[1]) < 1e-10 * max(1.0, abs(float(sides[0]))), seed
    return moved


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_everybody_gets_what_it_wants_and_gives_back_its_gradient(layout: Layout) -> None:
    assert run_ranks(layout, check)[0] >= 5
