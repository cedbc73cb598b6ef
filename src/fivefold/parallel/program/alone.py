"""A window of what a net returns, computed from the window of its input that it depends on, and nothing else.

    input     ...|<<<|...............|>>>|...     read: the window, and what convolutions look at beyond it
    output        ...|...............|...         exact, also where the image ends

It is the plan of the tile in the middle, whose neighbours are the rest of the image, with all exchanges moved
to the input. Nets in which that cannot be, for statistics or attention over the image, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.graph.record import record
from fivefold.parallel.graph.refs import Ref, Value, map_refs, refs_of
from fivefold.parallel.graph.tape import Tape
from fivefold.parallel.intercept import draws_mask
from fivefold.parallel.program.costs import Options
from fivefold.parallel.program.exchange import Exchange, Lines, Segments, Want
from fivefold.parallel.program.program import Compute, Move, Program, planned
from fivefold.parallel.program.rule import Here, Moment, Piece, as_held
from fivefold.parallel.program.run import carry_out, returned
from fivefold.parallel.program.spread import Box, Division, Grid, Range, Spread
from fivefold.parallel.trees import call_with

__all__ = ["AloneNet", "AloneWindow"]

_ALL_LAYERS = 1 << 30
_ALONE = Grid((), ())
_AXES = tuple(TILE_DIMS)


class AloneNet:
    """A net for images of one shape (samples, channels, *size), as it is now.

    Raises `UsageError` for one that cannot be recorded, draws random numbers, or leaves something behind.
    """

    def __init__(self, net: nn.Module, image: Tensor, size: Sequence[int]) -> None:
        self.shape = (*image.shape[: -len(size)], *size)
        self._dims = len(size)
        self.tape: Tape = record(net, call_with, image, [torch.Size(self.shape)], image.device)
        nodes = self.tape.nodes
        drawn = next((n for n in nodes if draws_mask(n.function, n.args, n.kwargs)), None)
        if drawn is not None:
            raise UsageError(
                f"{drawn.where} draws random numbers, which windows would not: use eval()"
            )
        if self.tape.effects or self.tape.carried:
            raise UsageError(
                "the forward leaves something behind in attributes or buffers, or reads what an earlier one "
                "has left, so windows of an image would depend on each other"
            )
        refs = [*refs_of(self.tape.outputs)]
        self.returned = [ref for ref in refs if isinstance(ref, Value)]
        """the tensors that the net returns, in order"""
        if not refs or len(refs) > len(self.returned):
            raise UsageError("the net returns a tensor of its own, or none: infer writes images")

    def window(self, ranges: Sequence[range]) -> AloneWindow:
        """What is to be done for the window of the outputs that lies at these pixels of the input."""
        first, bounds, place = len(self.shape) - self._dims, list[tuple[int, ...]](), list[int]()
        axes, spread = list[str](), Spread.whole(self.shape)
        for dim, wanted in enumerate(ranges, start=first):
            found = tuple(sorted({0, wanted.start, wanted.stop, self.shape[dim]}))
            if len(found) > 2:
                spread = spread.with_cut(dim, Division.at((len(axes),), found))
                axes.append(_AXES[dim - len(self.shape)])
                bounds.append(found)
                place.append(found.index(wanted.start))
        grid = Grid(tuple(axes), tuple(len(found) - 1 for found in bounds))
        rank = [grid.coordinates(r) for r in range(grid.size)].index(tuple(place))
        here = Here(grid, rank, rows=self.shape[0], fewest=self.shape[0])
        options = Options(fuse=_ALL_LAYERS, strict=True, bordered=False)
        return AloneWindow.of(planned(self.tape, [spread], here, options, thinnest=1), here)

    def blank(self, shapes: Sequence[Sequence[int]]) -> Any:
        """What the net returns, with zeros of these shapes in place of its tensors."""
        left = {ref.index: shape for ref, shape in zip(self.returned, shapes, strict=True)}

        def made(ref: Ref) -> Tensor:
            assert isinstance(ref, Value)
            return torch.zeros([*left[ref.index]], dtype=self.tape.dtypes[ref.index])

        return map_refs(made, self.tape.outputs)


@dataclass(frozen=True)
class AloneWindow:
    """One window."""

    program: Program
    here: Here
    reads: Box
    """of the input, all dims"""
    source: int
    """the value that is what it reads"""

    @classmethod
    def of(cls, program: Program, here: Here) -> AloneWindow:
        """Of the plan of a tile. Raises `UsageError` where that needs more than its input."""
        (given,), grid = program.tape.inputs, here.grid
        reads = _reads(program, here, given)
        source = 1 + max(
            program.spreads | {s.target: None for s in program.steps if isinstance(s, Move)}
        )
        shapes = {i: spread.shape for i, spread in program.spreads.items()}
        boxes = {i: spread.held(grid, here.rank) for i, spread in program.spreads.items()}
        boxes[given], steps = reads, list[Move | Compute]()
        for number, step in enumerate(program.steps):
            if isinstance(step, Compute):
                if step.local.collective is not None:
                    _refuse(program, number)
                steps.append(step)
                continue
            ref, wanted = step.source, [_segments(want, here) for want in step.wants]
            if isinstance(ref, Value):
                shape, box = shapes[ref.index], boxes[ref.index]
            else:  # the net's own
                shape = step.exchange.shape
                box = tuple((0, n) for n in shape)
            if not all(map(_within, wanted, box, shape)):
                _refuse(program, number)
            shapes[step.target] = shape
            if all(len(segments) == 1 for segments in wanted):  # else nobody cuts it once more
                boxes[step.target] = tuple(segments[0] for segments in wanted)
            local = _cut(box, wanted, step.exchange.fill)
            steps.append(
                replace(step, source=Value(source), exchange=local)
                if isinstance(ref, Value) and ref.index == given
                else replace(step, exchange=local)
            )
        return cls(replace(program, steps=steps), here, reads, source)

    def outputs(self) -> list[tuple[tuple[int, ...], Box]]:
        """By tensor that the net returns: the shape of all of it, and which part this is."""
        refs = refs_of(self.program.tape.outputs)
        spreads = [self.program.spreads[ref.index] for ref in refs if isinstance(ref, Value)]
        return [(s.shape, s.owned(self.here.grid, self.here.rank)) for s in spreads]

    @torch.no_grad()
    def compute(self, image: Tensor) -> Any:
        """What the net returns of this window, given what it reads: a tree of tensors."""
        program, grid, rank = self.program, self.here.grid, self.here.rank
        tape, (given,) = program.tape, program.tape.inputs
        owned = program.spreads[given].owned(grid, rank)
        own = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(owned, self.reads, strict=True))
        rows = len(image)
        moment = Moment(
            groups=_nobody, lines=Lines(*cast(Any, (None, None))), rows=rows, total=rows,
            pieces=(Piece(0, rows, 0),), joint=False, key=None, here=self.here,
        )  # fmt: skip
        state = {name: cast(Tensor, tape.places[name].now()) for name in tape.named}
        before = _random_state(image.device)
        values, wanted = {given: image[own], self.source: image}, returned(program)
        steps = range(len(program.steps))
        made = carry_out(program, values, steps, wanted, state=state, moment=moment)
        if not torch.equal(_random_state(image.device), before):
            raise UsageError(
                "the net draws random numbers, which are others in every window: take them from its inputs, "
                "or call the model on whole images"
            )

        def part(ref: Ref) -> Tensor:
            assert isinstance(ref, Value)
            spread = program.spreads[ref.index]
            tight = [_segments(want, self.here) for want in as_held(spread.tight())]
            cut = _cut(spread.held(grid, rank), tight, 0.0)
            return made[ref.index] if cut.is_identity else made[ref.index][cut.own[0][0]]

        return map_refs(part, tape.outputs)


def _reads(program: Program, here: Here, given: int) -> Box:
    """All that is wanted of the input, within the image."""
    spread = program.spreads[given]
    found = [list(one) for one in spread.owned(here.grid, here.rank)]
    for number, step in enumerate(program.steps):
        if not isinstance(step, Move) or step.source != Value(given):
            continue
        for dim, want in enumerate(step.wants):
            segments = _segments(want, here)
            if len(segments) != 1:
                _refuse(program, number)
            ((start, stop),) = segments
            found[dim][0] = max(min(found[dim][0], start), 0)
            found[dim][1] = min(max(found[dim][1], stop), spread.shape[dim])
    return tuple((start, stop) for start, stop in found)


def _segments(want: Want, here: Here) -> Segments:
    return want.segments[here.grid.part(here.rank, want.axes)]


def _within(wanted: Segments, held: Range, n: int) -> bool:
    """Whether all that is wanted of a dim of `n`, and is there at all, is held."""
    inside = [(max(a, 0), min(b, n)) for a, b in wanted]
    return all(a >= b or (held[0] <= a and b <= held[1]) for a, b in inside)


def _cut(held: Box, wanted: Sequence[Segments], fill: float) -> Exchange:
    """To lay out what is held as it is wanted."""
    shape = tuple(stop - start for start, stop in held)
    wants = [
        Want((), (tuple((a - start, b - start) for a, b in segments),))
        for segments, (start, _) in zip(wanted, held, strict=True)
    ]
    return Exchange.of(Spread.whole(shape), wants, _ALONE, 0, fill)


def _refuse(program: Program, number: int) -> NoReturn:
    reader = next(s.node for s in program.steps[number:] if isinstance(s, Compute))
    raise UsageError(
        f"{reader.where} looks at more of the image than a window and its surroundings, or windows are "
        "smaller than what the net strides over: take larger ones (tile), or call the model on whole images, "
        "by turns (tiles.turns) if they are large"
    )


def _random_state(device: torch.device) -> Tensor:
    own = torch.get_rng_state()
    return own if device.type != "cuda" else torch.cat([own, torch.cuda.get_rng_state(device)])


def _nobody(_axes: tuple[int, ...], _joint: bool) -> Any:
    raise AssertionError("a window asks nobody")
