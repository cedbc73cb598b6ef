"""Nets in tiles against the same nets in one process, below `parallelize`: outputs, gradients and buffers.

expect_tiles(nn.Conv2d(3, 4, 3), (2, 3, 9, 7), Layout(height=2, width=2))
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fivefold.mesh import Mesh, owned
from fivefold.parallel import parallelize
from fivefold.parallel.graph.record import record
from fivefold.parallel.graph.refs import Value
from fivefold.parallel.intercept import Share, exact, watched_modules
from fivefold.parallel.program.costs import Costs, Fuse, Options
from fivefold.parallel.program.exchange import Lines
from fivefold.parallel.program.program import Program, planned
from fivefold.parallel.program.rule import Here, Moment, Piece
from fivefold.parallel.program.run import execute
from fivefold.parallel.program.spread import Division, Grid, Spread
from fivefold.parallel.randomness import key_of
from fivefold.parallel.trees import call_with, leaves
from fivefold.plan import Layout, Numerics, Plan, Tiles
from ranks import run_ranks

__all__ = ["expect_tiles", "grid_of", "spread_of"]

_SEED, _STEP = 7, 5
_DIMS = {"depth": -3, "height": -2, "width": -1}


def grid_of(layout: Layout) -> Grid:
    """The tile axes of a layout that are larger than one."""
    axes = tuple(axis for axis in _DIMS if getattr(layout, axis) > 1)
    return Grid(axes, tuple(getattr(layout, axis) for axis in axes))


def spread_of(shape: Sequence[int], grid: Grid) -> Spread:
    """How an input image lies: cut along its last dims, by the rule of ownership."""
    spread = Spread.whole(shape)
    for index, axis in enumerate(grid.axes):
        dim = len(shape) + _DIMS[axis]
        n, parts = shape[dim], grid.sizes[index]
        bounds = [owned(n, parts, part).start for part in range(parts)]
        spread = spread.with_cut(dim, Division.at((index,), (*bounds, n)))
    return spread


def expect_tiles(
    net: nn.Module,
    shape: Sequence[int],
    layout: Layout,
    *,
    strict: bool = True,
    fuse: Fuse = "never",
    costs: Costs | None = None,
    recompute: int = 0,
    tolerance: float = 1e-11,
    check: Callable[[Program], None] | None = None,
) -> None:
    """Run `net` in float64 on one image batch of `shape`, in one process and in tiles, and compare.

    With `strict`, nothing may be gathered because its operation is not known. `check` looks at every
    rank's plan.
    """
    torch.manual_seed(3)
    net = net.double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    image = torch.randn(*shape, dtype=torch.float64)
    case = _Case(net, image, Options(fuse, strict, costs or Costs()), recompute, check)
    plain, x = copy.deepcopy(net), image.clone().requires_grad_()
    share = Share(len(x), 0, len(x), _SEED, _STEP, group=None)
    with exact(watched_modules(plain), share) as mode, mode:  # whose masks tiles are to draw
        outputs = leaves(plain(x))
    weights = [torch.randn_like(y) if y.is_floating_point() else y for y in outputs]
    loss = _weighted(outputs, weights, [1] * len(outputs))
    if loss.requires_grad:
        loss.backward()
    ranks = run_ranks(layout, _one_rank, case, weights, timeout_s=40)
    for rank, found in enumerate(ranks):
        for number, (box, part) in enumerate(found["outputs"]):
            _close(part, outputs[number][box], tolerance, f"output {number} of rank {rank}")
        for name, buffer in plain.named_buffers():
            _close(found["buffers"][name], buffer, tolerance, f"buffer {name} of rank {rank}")
        if x.grad is not None:
            _close(
                found["dx"],
                x.grad[found["box"]],
                tolerance,
                f"gradient of the input of rank {rank}",
            )
    if not recompute:
        _expect_turns(
            case, plain, x.grad, outputs, weights=weights, layout=layout, tolerance=tolerance
        )
    for name, parameter in plain.named_parameters():
        have = [found["gradients"][name] for found in ranks]
        have = [part for part in have if part is not None]
        assert (parameter.grad is not None) == bool(have), name
        if parameter.grad is not None:
            _close(sum(have, torch.zeros(())), parameter.grad, tolerance, f"gradient of {name}")


class _Weighted(nn.Module):
    """As `_weighted`."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, outputs: Any, _targets: Any) -> Tensor:
        return _weighted(leaves(outputs), self.weights, [1] * len(self.weights))


def _expect_turns(
    case: _Case,
    plain: nn.Module,
    dx: Tensor | None,
    outputs: Sequence[Tensor],
    *,
    weights: Sequence[Tensor],
    layout: Layout,
    tolerance: float,
) -> None:
    """One process that computes the same tiles by turns."""
    options = case.options
    turns = Tiles(fuse=str(options.fuse), strict=options.strict, turns=str(layout))
    plan = Plan(tiles=turns, numerics=Numerics(seed=_SEED))
    net, image = copy.deepcopy(case.net), case.image.clone().requires_grad_()
    seen: list[Tensor] = []

    def check(mesh: Mesh) -> None:
        model = parallelize(net, mesh, loss=_Weighted(weights))
        model.steps = _STEP
        model.on_outputs = lambda made: seen.extend(leaves(made))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.step(image, image.detach())

    run_ranks(1, check, plan=plan, timeout_s=40)
    for number, (part, whole) in enumerate(zip(seen, outputs, strict=True)):
        _close(part, whole, tolerance, f"output {number} by turns")
    for name, buffer in plain.named_buffers():
        _close(dict(net.named_buffers())[name], buffer, tolerance, f"buffer {name} by turns")
    if dx is not None:
        assert image.grad is not None
        _close(image.grad, dx, tolerance, "gradient of the input by turns")
    for name, parameter in plain.named_parameters():
        found = dict(net.named_parameters())[name].grad
        assert (parameter.grad is None) == (found is None), name
        if parameter.grad is not None and found is not None:
            _close(found, parameter.grad, tolerance, f"gradient of {name} by turns")


@dataclass
class _Case:
    net: nn.Module
    image: Tensor
    options: Options
    recompute: int
    check: Callable[[Program], None] | None


def _key(module: str, number: int) -> int:
    return key_of(_SEED, _STEP, module, number)


def _weighted(outputs: Sequence[Tensor], weights: Sequence[Tensor], alike: Sequence[int]) -> Tensor:
    """A loss that looks at every number; what `alike` ranks compute alike counts once."""
    loss = torch.zeros((), dtype=torch.float64)
    for output, weight, ranks in zip(outputs, weights, alike, strict=True):
        if output.requires_grad:
            loss = loss + (output * weight).sum() / ranks
    return loss


def _one_rank(mesh: Mesh, case: _Case, weights: Sequence[Tensor]) -> dict[str, Any]:
    net, image, grid = copy.deepcopy(case.net), case.image, grid_of(mesh.layout)
    group = mesh.group(*grid.axes)
    here = Here(grid, group.rank(), rows=image.shape[0], fewest=image.shape[0])
    both = Lines(group, group)
    lines = {
        (): mesh.group("data"),
        **{(index,): mesh.group(axis) for index, axis in enumerate(grid.axes)},
        tuple(range(len(grid.axes))): group,
    }
    spread = spread_of(image.shape, grid)
    tape = record(net, call_with, image, [image.shape])
    program = planned(tape, [spread], here, case.options)
    if case.check is not None:
        case.check(program)
    box = _slices(spread.owned(grid, here.rank))
    x = image[box].clone().requires_grad_()
    rows = image.shape[0]
    pieces = (Piece(0, rows, 0),)
    moment = Moment(
        lambda axes, _data: lines[axes],
        both,
        rows,
        rows,
        pieces,
        True,
        _key,
        case.recompute,
        here=here,
    )
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    made = execute(program, [x], state, moment)
    flat, _ = tree_flatten(tape.outputs, is_leaf=lambda leaf: isinstance(leaf, Value))
    indices = [leaf.index for leaf in flat if isinstance(leaf, Value)]
    spreads, parts = [program.spreads[i] for i in indices], [made[i] for i in indices]
    parts = [_cropped(part, lies, here) for part, lies in zip(parts, spreads, strict=True)]
    spreads = [lies.tight() for lies in spreads]
    for part, lies in zip(parts, spreads, strict=True):
        assert tuple(part.shape) == lies.local_shape(grid, here.rank), (part.shape, lies)
    where = [_slices(lies.owned(grid, here.rank)) for lies in spreads]
    alike = [grid.size // math.prod(grid.sizes[a] for a in lies.axes) for lies in spreads]
    loss = _weighted(parts, [w[box] for w, box in zip(weights, where, strict=True)], alike)
    if loss.requires_grad:
        loss.backward()
    return {
        "outputs": [(b, part.detach()) for b, part in zip(where, parts, strict=True)],
        "gradients": {name: p.grad for name, p in net.named_parameters()},
        "buffers": dict(net.named_buffers()),
        "box": box,
        "dx": torch.zeros_like(x) if x.grad is None else x.grad,
    }


def _cropped(part: Tensor, lies: Spread, here: Here) -> Tensor:
    """What a rank owns of what it has."""
    assert tuple(part.shape) == lies.local_shape(here.grid, here.rank), (part.shape, lies)
    held, owned = lies.held(here.grid, here.rank), lies.owned(here.grid, here.rank)
    return part[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(owned, held, strict=True))]


def _slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(*r) for r in box)


def _close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    if not wanted.is_floating_point():
        assert torch.equal(got, wanted), what
        return
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    error = (got - wanted).abs().max().item() if wanted.numel() else 0.0
    assert error <= tolerance * scale, f"{what}: error {error:.1e}"
