"""Nets whose last results are held with margins: what a rank computes of its neighbours' pixels is exact too,
and what is done with it counts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.parallel.tiles.program import Program, _Lowering, _placed
from fivefold.parallel.tiles.rule import Here, Moment
from fivefold.parallel.tiles.run import execute
from fivefold.parallel.tiles.spread import Cut, Spread
from fivefold.parallel.tiles.tape import record
from fivefold.parallel.trees import call_with
from fivefold.plan import Layout
from ranks import run_ranks
from tiles import grid_of, spread_of

__all__ = ["expect_margins"]


def expect_margins(net: nn.Module, shape: Sequence[int], layout: Layout) -> None:
    """Run `net`, which returns one tensor, in float64; each rank looks at one pixel more than it owns."""
    torch.manual_seed(5)
    net = net.double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    image = torch.randn(*shape, dtype=torch.float64)
    plain, x = copy.deepcopy(net), image.clone().requires_grad_()
    y = plain(x)
    weights = torch.randn(layout.size, *y.shape, dtype=torch.float64)
    ranks = run_ranks(layout, _one_rank, net, image, weights, timeout_s=40)
    loss = torch.zeros((), dtype=torch.float64)
    for rank, found in enumerate(ranks):
        assert torch.allclose(found["y"], y[found["held"]], rtol=0, atol=1e-11), rank
        loss = loss + (y[found["held"]] * weights[rank][found["held"]]).sum()
    loss.backward()
    assert x.grad is not None
    for rank, found in enumerate(ranks):
        error = (found["dx"] - x.grad[found["box"]]).abs().max().item()
        assert error < 1e-11, (rank, error)
    for name, parameter in plain.named_parameters():
        total = sum((found["gradients"][name] for found in ranks), torch.zeros(()))
        assert parameter.grad is not None
        assert torch.allclose(total, parameter.grad, rtol=0, atol=1e-10), name


def _widened(spread: Spread) -> Spread:
    for dim in spread.cut_dims:
        cut, n = spread.cuts[dim], spread.shape[dim]
        assert isinstance(cut, Cut)
        held = tuple((max(a - 1, 0), min(b + 1, n)) for a, b in cut.held)
        spread = spread.with_cut(dim, replace(cut, held=held))
    return spread


def _one_rank(mesh: Mesh, net: nn.Module, image: Tensor, weights: Tensor) -> dict[str, Any]:
    net, grid = copy.deepcopy(net), grid_of(mesh.layout)
    group = mesh.group(*grid.axes)
    here = Here(grid, group.rank(), 1)
    tape = record(net, call_with, image, [image.shape])
    program, last, given = _planned(tape, image, here)
    lines = {(): mesh.group("data"), tuple(range(len(grid.axes))): group}
    lines |= {(index,): mesh.group(axis) for index, axis in enumerate(grid.axes)}
    rows = image.shape[0]
    moment = Moment(lambda axes, _data: lines[axes], rows, 0, rows, True, None)
    x = image[_slices(given.owned(grid, here.rank))].clone().requires_grad_()
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    y = execute(program, [x], state, moment, group)[last]
    lies = program.spreads[last]
    held = _slices(lies.held(grid, here.rank))
    assert y.shape == lies.local_shape(grid, here.rank)
    (y * weights[here.rank][held]).sum().backward()
    return {
        "y": y.detach(), "held": held, "dx": x.grad,
        "box": _slices(given.owned(grid, here.rank)),
        "gradients": {name: p.grad for name, p in net.named_parameters()},
    }  # fmt: skip


def _planned(tape: Any, image: Tensor, here: Here) -> tuple[Program, int, Spread]:
    """As `planned`, the net's result widened."""
    program, given = Program(tape), spread_of(image.shape, here.grid)
    program.spreads[tape.inputs[0]] = given
    rules = [_placed(program, node, here, True) for node in tape.nodes]
    last = tape.outputs.index
    program.spreads[last] = _widened(program.spreads[last])
    lowering = _Lowering(program, here)
    for node, chosen in zip(tape.nodes, rules, strict=True):
        lowering.add(node, chosen)
    lowering.finish()
    return program, last, given


def _slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(*r) for r in box)
