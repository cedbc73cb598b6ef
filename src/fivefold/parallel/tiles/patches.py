"""Windows laid out side by side: `x.unfold(dim, size, step)` and `F.unfold`.

x.unfold(2, k, s)       (N, C, H, W) -> (N, C, windows, W, k)             cut along the windows
F.unfold(x, k)          (N, C, H, W) -> (N, C k k, rows of windows x windows in a row)
                                                                          cut along the rows, if only H is cut
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Local, Moment, Operation, call, rule, want_of
from fivefold.parallel.program.spread import Range, Spread
from fivefold.parallel.program.windows import Window, follow
from fivefold.parallel.tiles.windowed import per_dim

__all__ = ["Unfold"]

_COLUMNS = ("input", "kernel_size", "dilation", "padding", "stride")


def _along(node: Node) -> tuple[int, Window]:
    """The dim and the windows of the method."""
    a = node.bound(("input", "dimension", "size", "step"))
    return int(a["dimension"]) % len(node.shapes[0]), Window(int(a["size"]), int(a["step"]))


def _windows(node: Node) -> list[Window]:
    """Those of the function, down and across."""
    a = node.bound(_COLUMNS)
    kernel = per_dim(a["kernel_size"], 2)
    stride, padding = per_dim(a.get("stride", 1), 2), per_dim(a.get("padding", 0), 2)
    options = (kernel, stride, padding, per_dim(a.get("dilation", 1), 2))
    return [Window(*o) for o in zip(*options, strict=True)]


def _columns(op: Operation, windows: Sequence[Window]) -> int:
    """Windows in a row."""
    across, n = windows[1], op.node.shapes[0][3]
    return (n + 2 * across.padding - across.extent) // across.stride + 1


@rule("unfold")
class Unfold:
    """Every window belongs where its centre is. `F.unfold`: in tiles of the height only."""

    def _is_method(self, node: Node) -> bool:
        """The method and the function are told apart by how many dims they give."""
        return len(node.output_shapes[0]) == len(node.shapes[0]) + 1

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Every window belongs where its centre is."""
        given, shape = op.given[0], op.node.output_shapes[0]
        if self._is_method(op.node):
            dim, window = _along(op.node)
            cut = given.cuts[dim]
            made = Spread(shape, (*given.cuts, None))
            return [
                (made if cut is None else made.with_cut(dim, window.cut(cut, shape[dim]))).tight()
            ]
        if len(given.shape) != 4 or given.cuts[1] is not None or given.cuts[3] is not None:
            return None
        windows, cut = _windows(op.node), given.cuts[2]
        columns = _columns(op, windows)
        made = Spread(shape, (given.cuts[0], None, None))
        if cut is not None:
            bound = windows[0].owner_bound
            made = made.with_cut(2, follow(cut, shape[2], lambda b: bound(b) * columns))
        return [made.tight()]

    def lower(self, op: Operation) -> Local:
        """The same call, padding nothing along a dim that is cut."""
        return _lower_method(op) if self._is_method(op.node) else _lower_function(op)


def _lower_method(op: Operation) -> Local:
    dim, window = _along(op.node)
    made, shape = op.made[0], op.node.shapes[0]
    wants = [want_of(n, cut) for n, cut in zip(shape, made.cuts[:-1], strict=True)]
    cut = made.cuts[dim]
    wants[dim] = (
        Want.all_of(shape[dim])
        if cut is None
        else Want.ranges(cut.axes, [window.needs(r) for r in cut.held])
    )
    return Local((tuple(wants),), call(op.node))


def _lower_function(op: Operation) -> Local:
    windows, made, shape = _windows(op.node), op.made[0], op.node.shapes[0]
    down, across = windows
    cut, columns = made.cuts[2], _columns(op, windows)

    def rows(held: Range) -> Range:
        return (held[0] // columns, -(-held[1] // columns))

    along = Want.all_of(shape[2])
    crop = slice(None)
    if cut is not None:
        along = Want.ranges(cut.axes, [down.needs(rows(r)) for r in cut.held])
        start, stop = made.held(op.here.grid, op.here.rank)[2]
        offset = start // columns * columns
        crop = slice(start - offset, stop - offset)
    first = want_of(shape[0], made.cuts[0])
    wants = (first, Want.all_of(shape[1]), along, Want.all_of(shape[3]))
    padding = (down.padding if cut is None else 0, across.padding)
    kernel, stride = (down.kernel, across.kernel), (down.stride, across.stride)
    dilation = (down.dilation, across.dilation)

    def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
        return F.unfold(operands[0], kernel, dilation, padding, stride)[..., crop]

    return Local((wants,), run)
