"""Adaptive pools: output j looks at inputs floor(j n / m) to ceil((j + 1) n / m), n inputs, m outputs.

Where m divides n these are pools without overlap. One output for the whole image is a mean over all tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Local, Moment, Operation, rule, want_of
from fivefold.parallel.program.spread import Spread
from fivefold.parallel.tiles.lines import lowered, placed
from fivefold.parallel.tiles.reduce import GlobalMean
from fivefold.parallel.tiles.resample import Averaged

__all__ = ["AdaptiveAveragePool", "AdaptiveMaxPool"]

_MEAN = GlobalMean()


def _dims(node: Node) -> int:
    """How many dims a pool runs over: the number in its name."""
    return int(next(c for c in node.name if c.isdigit()))


def _lines(op: Operation) -> dict[int, Averaged]:
    """The dims that a pool runs over and that are cut."""
    before, after = op.node.shapes[0], op.node.output_shapes[0]
    first = len(before) - _dims(op.node)
    return {
        dim: Averaged(before[dim], after[dim], before[dim] / max(after[dim], 1))
        for dim in op.given[0].cut_dims
        if dim >= first
    }


def _divides(op: Operation) -> bool:
    """Whether windows do not overlap along the dims that are cut."""
    return all(line.n > 0 and line.before % line.n == 0 for line in _lines(op).values())


def _pooled(op: Operation, pool: Callable[[Tensor, list[int]], Tensor]) -> Local:
    """`pool` on whole windows, told how many outputs it has here."""
    made, lines, shape = op.made[0], _lines(op), op.node.shapes[0]
    dims = _dims(op.node)
    size = list(made.local_shape(op.here.grid, op.here.rank)[-dims:])
    wants: list[Want] = []
    for dim, (n, cut) in enumerate(zip(shape, made.cuts, strict=True)):
        if cut is not None and dim in lines:
            rows = [line[0] for line in map(lines[dim].needs, cut.held)]
            wants.append(Want.ranges(cut.axes, rows))
        else:
            wants.append(Want.all_of(n) if dim in lines else want_of(n, cut))

    def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
        return pool(operands[0], size)

    return Local((tuple(wants),), run)


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
class AdaptiveAveragePool:
    """Means over windows of unequal sizes."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Every output belongs where its centre is; a mean of everything is everybody's."""
        shape = op.node.output_shapes[0]
        if _is_global(op):
            return _MEAN.place(op)
        return [placed(op.given[0], shape, _lines(op))]

    def lower(self, op: Operation) -> Local:
        """The same pool on whole windows where they do not overlap, else weighted sums of rows."""
        if _is_global(op):
            return _MEAN.lower(op)
        dims = _dims(op.node)
        pool: Callable[[Tensor, list[int]], Tensor] = getattr(F, f"adaptive_avg_pool{dims}d")
        if _divides(op):
            return _pooled(op, pool)
        lines, after = _lines(op), op.node.output_shapes[0]

        def rest(x: Tensor) -> Tensor:
            size = [
                x.shape[dim] if dim in lines else after[dim]
                for dim in range(x.dim() - dims, x.dim())
            ]
            return x if tuple(size) == tuple(x.shape[-dims:]) else pool(x, size)

        return lowered(op, lines, rest)


def _is_global(op: Operation) -> bool:
    """Whether there is one output for the whole image, and some dim of that is cut."""
    return set(op.node.output_shapes[0][-_dims(op.node) :]) == {1} and bool(_lines(op))


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
class AdaptiveMaxPool:
    """The largest of every window; overlapping windows are gathered, for ties have a winner in torch."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Every output belongs where its centre is."""
        if len(op.node.outputs) != 1 or not _divides(op):
            return None
        made = placed(op.given[0], op.node.output_shapes[0], _lines(op))
        return [made]

    def lower(self, op: Operation) -> Local:
        """The same pool on whole windows."""
        return _pooled(op, getattr(F, f"adaptive_max_pool{_dims(op.node)}d"))


@rule(*(f"adaptive_max_pool{dims}d_with_indices" for dims in (1, 2, 3)))
class _WithIndices:
    """Indices count pixels of the whole image, so that is gathered."""

    def place(self, op: Operation) -> Sequence[Spread] | None:  # noqa: ARG002 - see `Rule`
        """Never in parts."""
        return None

    def lower(self, op: Operation) -> Local:
        """Not reached."""
        raise AssertionError(op.node.where)
