"""Channels to pixels and back: pixel_shuffle, pixel_unshuffle."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Local, Moment, Operation, call, rule, want_of
from fivefold.parallel.program.spread import Division, Spread
from fivefold.parallel.program.windows import follow
from fivefold.parallel.tiles.resample import centre_bound

__all__ = ["PixelShuffle", "PixelUnshuffle"]


def _placed(op: Operation) -> Sequence[Spread] | None:
    """By where pixels go, in the last two dims; None if channels are cut."""
    given, shape = op.given[0], op.node.output_shapes[0]
    if given.cuts[-3] is not None:
        return None
    cuts: list[Division | None] = list(given.cuts[:-2])
    for cut, before, n in zip(given.cuts[-2:], given.shape[-2:], shape[-2:], strict=True):
        cuts.append(
            None if cut is None else follow(cut, n, lambda b, m=before, n=n: centre_bound(b, m, n))
        )
    return [Spread(shape, tuple(cuts)).tight()]


@rule("pixel_shuffle", "native_pixel_shuffle")
class PixelShuffle:
    """Channels become pixels: every pixel a square of them."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Bounds times the factor."""
        return _placed(op)

    def lower(self, op: Operation) -> Local:
        """The pixels whose squares are held in part; what is too much is cut off."""
        made, shape = op.made[0], op.node.shapes[0]
        factor = made.shape[-1] // shape[-1]
        held = made.held(op.here.grid, op.here.rank)
        wants = [want_of(n, cut) for n, cut in zip(shape[:-2], made.cuts[:-2], strict=True)]
        crop: list[slice] = []
        for n, cut, (start, stop) in zip(shape[-2:], made.cuts[-2:], held[-2:], strict=True):
            if cut is None:
                wants.append(Want.all_of(n))
            else:
                rows = [(a // factor, -(-b // factor)) for a, b in cut.held]
                wants.append(Want.ranges(cut.axes, rows))
            offset = start // factor * factor
            crop.append(slice(start - offset, stop - offset))
        shuffle = call(op.node)

        def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            return shuffle(moment, operands)[..., *crop]

        return Local((tuple(wants),), run)


@rule("pixel_unshuffle")
class PixelUnshuffle:
    """Squares of pixels become channels."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Bounds over the factor: they move to whole squares."""
        return _placed(op)

    def lower(self, op: Operation) -> Local:
        """Whole squares."""
        made, shape = op.made[0], op.node.shapes[0]
        factor = shape[-1] // made.shape[-1]
        wants = [want_of(n, cut) for n, cut in zip(shape[:-2], made.cuts[:-2], strict=True)]
        for n, cut in zip(shape[-2:], made.cuts[-2:], strict=True):
            if cut is None:
                wants.append(Want.all_of(n))
            else:
                rows = [(a * factor, b * factor) for a, b in cut.held]
                wants.append(Want.ranges(cut.axes, rows))
        return Local((tuple(wants),), call(op.node))
