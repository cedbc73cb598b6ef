"""Transposed convolutions: every input adds a window of numbers to the output.

input i adds to outputs   i s - p,  i s - p + d,  ...,  i s - p + d (k - 1)

k kernel size, s stride, p padding, d dilation; all in elements of one dim. Along a dim that is cut, the
operation pads nothing; it is given the inputs whose windows cover the outputs in question, zeros beyond the
image, and what reaches beyond these outputs is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Local, Moment, Operation, rule, want_of
from fivefold.parallel.program.spread import Range, Spread
from fivefold.parallel.program.windows import follow
from fivefold.parallel.tiles.windowed import per_dim

__all__ = ["Spray", "TransposedConvolution"]

_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


@dataclass(frozen=True)
class Spray:
    """A window that spreads one input over several outputs, along one dim."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """How far apart the first and the last output of an input are."""
        return self.dilation * (self.kernel - 1)

    def bound(self, bound: int) -> int:
        """The output in the middle of the window of input `bound`, unclamped."""
        return bound * self.stride - self.padding + self.reach // 2

    def needs(self, outputs: Range) -> Range:
        """The inputs that add to outputs [start, stop), and as many more as it takes for their windows to
        cover these, gaps included: may lie outside the image.
        """
        first, last = outputs[0] + self.padding, outputs[1] - 1 + self.padding
        start = min(-((self.reach - first) // self.stride), first // self.stride)
        stop = max(last // self.stride, -((self.reach - last) // self.stride))
        return (start, max(stop, start) + 1)

    def offset(self, outputs: Range) -> int:
        """Where outputs [start, stop) begin in what comes of the inputs that they need."""
        return outputs[0] + self.padding - self.needs(outputs)[0] * self.stride


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
class TransposedConvolution:
    """Every output belongs to whose inputs' windows are centred there."""

    def _sprays(self, node: Node) -> list[Spray]:
        """The window along each spatial dim."""
        a, kernel = node.bound(_NAMES), node.shapes[1][2:]
        options = (
            per_dim(a.get(name, default), len(kernel))
            for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        return [Spray(*o) for o in zip(kernel, *options, strict=True)]

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """None if the channels are cut."""
        sprays, given, shape = self._sprays(op.node), op.given[0], op.node.output_shapes[0]
        if len(given.shape) != len(sprays) + 2 or given.cuts[1] is not None:
            return None
        made = Spread(shape, given.cuts)
        for dim, spray in enumerate(sprays, 2):
            cut = given.cuts[dim]
            if cut is not None:
                made = made.with_cut(dim, follow(cut, shape[dim], spray.bound))
        return [made.tight()]

    def lower(self, op: Operation) -> Local:
        """The same operation, padding nothing along the dims that are cut, and a crop."""
        sprays, made, a = self._sprays(op.node), op.made[0], op.node.bound(_NAMES)
        held, shape = made.held(op.here.grid, op.here.rank), op.node.shapes[0]
        behind = per_dim(a.get("output_padding", 0), len(sprays))
        wants = [want_of(n, cut) for n, cut in zip(shape[:2], made.cuts[:2], strict=True)]
        crop = [slice(None)] * 2
        padding: list[int] = []
        output_padding: list[int] = []
        for dim, spray in enumerate(sprays, 2):
            cut = made.cuts[dim]
            if cut is None:
                wants.append(Want.all_of(shape[dim]))
                crop.append(slice(None))
            else:
                wants.append(Want.ranges(cut.axes, [spray.needs(r) for r in cut.held]))
                start = spray.offset(held[dim])
                crop.append(slice(start, start + held[dim][1] - held[dim][0]))
            padding.append(spray.padding if cut is None else 0)
            output_padding.append(behind[dim - 2] if cut is None else 0)

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            args, kwargs = op.node.arguments(operands)
            a = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
            a |= {"padding": tuple(padding), "output_padding": tuple(output_padding)}
            return op.node.function(**a)[tuple(crop)]

        return Local((tuple(wants), *op.whole(1)), run)
