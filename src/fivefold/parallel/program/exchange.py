"""The range exchange: every rank names the range that it wants of a tensor, and gets it.

Halos, crops, re-partitioning, gathering and tiles-to-batch are all this one operation:

    have    | owned by 0 | owned by 1 | owned by 2 |
    wanted       by 1: [______________]                 pieces of 0, 1 and 2; what lies outside the image
                                                        is filled (zero, or -inf for max-pool)

Each pair of ranks exchanges at most one message, and all of them travel at once, corners included. Backward
is the adjoint: what a rank was sent goes back, and its owner adds it, its own contribution first, then those
of the others in rank order. See `spread` for who owns what.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold import comm
from fivefold.parallel.asked import Processes, TurnGroup
from fivefold.parallel.program.spread import Box, Grid, Range, Spread
from fivefold.trace import Tag

__all__ = [
    "Exchange", "Kept", "Lines", "Pieces", "Segments", "Slices", "Want", "exchange", "split", "start",
    "start_packed", "unpack",
]  # fmt: skip

Segments = tuple[Range, ...]
"""ranges that are laid one after the other; they may lie outside [0, n), which means fill"""
Slices = tuple[slice, ...]
"""one slice for every dim"""
Pieces = tuple[tuple[int, tuple[Slices, ...]], ...]
"""by tile rank: which pieces of a tensor"""


@dataclass(frozen=True)
class Want:
    """What is wanted of one dim: `segments[part]`, parts counted along `axes` (none: all want the same)."""

    axes: tuple[int, ...]
    segments: tuple[Segments, ...]

    @classmethod
    def ranges(cls, axes: tuple[int, ...], ranges: Sequence[Range]) -> Want:
        """One range for every part."""
        return cls(axes, tuple((r,) for r in ranges))

    @classmethod
    def all_of(cls, n: int) -> Want:
        """The whole dim, for everybody."""
        return cls((), (((0, n),),))


@dataclass(frozen=True)
class Lines:
    """The groups in which ranks exchange, both in the order of the grid."""

    within: dist.ProcessGroup
    """the tile ranks of one replica"""
    across: dist.ProcessGroup
    """those of all replicas"""

    def of(self, plan: Exchange) -> dist.ProcessGroup:
        """The group whose ranks a plan counts."""
        return self.across if plan.crosses else self.within


@dataclass(frozen=True)
class Exchange:
    """Everything one rank does in an exchange; made once per plan by `Exchange.of`."""

    shape: tuple[int, ...]
    """of what this rank has"""
    result: tuple[int, ...]
    """of what it gets"""
    own: tuple[tuple[Slices, Slices], ...]
    """pieces it has already: where they lie, where they go"""
    sends: Pieces
    """of what this rank has"""
    receives: Pieces
    """of what this rank gets"""
    fill: float
    gaps: tuple[Slices, ...]
    """what of the result lies outside the tensor"""
    moves: bool
    """whether any rank sends anything"""
    crosses: bool = False
    """whether replicas exchange samples: peers are then counted over all of them"""

    @classmethod
    def of(
        cls, spread: Spread, wants: Sequence[Want], grid: Grid, rank: int, fill: float = 0.0
    ) -> Exchange:
        """The part of tile rank `rank` in giving everybody what `wants` says, one entry per dim."""
        return _made(spread, tuple(wants), grid, rank, fill)

    @property
    def is_identity(self) -> bool:
        """Whether this rank gets just what it has, and sends nothing."""
        everything = tuple(slice(0, n) for n in self.shape)
        return not self.moves and self.shape == self.result and self.own == ((everything,) * 2,)

    @property
    def is_crop(self) -> bool:
        """Whether this rank gets one piece of what it has, and sends nothing."""
        return not self.moves and len(self.own) == 1 and not self.gaps

    def messages(self) -> int:
        """Number of messages this rank sends."""
        return len(self.sends)

    def elements(self) -> int:
        """Number of elements this rank sends."""
        return sum(_size(piece) for _, pieces in self.sends for piece in pieces)


@functools.lru_cache(4096)  # the loss and the outputs ask in every step
def _made(spread: Spread, wants: tuple[Want, ...], grid: Grid, rank: int, fill: float) -> Exchange:
    wanted = functools.partial(_wanted, wants, grid)
    crosses = _crosses(spread, wants, grid)
    first = 0 if crosses else rank - rank % grid.tiles
    ranks = range(grid.size) if crosses else range(first, first + grid.tiles)
    moves = any(not _covers(spread, wanted(r), grid, r) for r in ranks)
    mine, held = wanted(rank), spread.held(grid, rank)
    sources = {r: spread.owned(grid, r) for r in ranks}
    peers = [r for r in ranks if r != rank and _same_line(spread.axes, grid, r, rank)]
    own = _pieces(mine, sources[rank] if moves else held)
    receives = {r: _pieces(mine, sources[r]) for r in peers} if moves else {}
    sends = {r: _pieces(wanted(r), sources[rank]) for r in peers} if moves else {}
    result = tuple(sum(stop - start for start, stop in segments) for segments in mine)
    return Exchange(
        shape=tuple(stop - start for start, stop in held),
        result=result,
        own=tuple((_shifted(source, held), to) for source, to in own),
        sends=tuple(
            (r - first, tuple(_shifted(source, held) for source, _ in pieces))
            for r, pieces in sends.items()
            if pieces
        ),
        receives=tuple(
            (r - first, tuple(to for _, to in pieces)) for r, pieces in receives.items() if pieces
        ),
        fill=fill,
        gaps=_gaps(mine, spread.shape, result),
        moves=moves,
        crosses=crosses,
    )


def _crosses(spread: Spread, wants: Sequence[Want], grid: Grid) -> bool:
    """Whether some rank wants samples that none of its replica has."""
    for cut, want, n in zip(spread.cuts, wants, spread.shape, strict=True):
        if grid.data is None or cut is None or grid.data not in cut.axes:
            continue
        each, parts = (len(cut.bounds) - 1) // grid.replicas, len(want.segments)
        for part, segments in enumerate(want.segments):
            # Parts are counted along the data axis first.
            mine = part * grid.replicas // parts if grid.data in want.axes else None
            for replica in range(grid.replicas) if mine is None else (mine,):
                low, high = cut.bounds[replica * each], cut.bounds[(replica + 1) * each]
                for a, b in segments:
                    inside = (max(a, 0), min(b, n))
                    if inside[0] < inside[1] and not (low <= inside[0] and inside[1] <= high):
                        return True
    return False


@dataclass
class Kept:
    """How to make what an exchange gave once more, without a message."""

    again: Callable[[], Tensor] | None = None


def exchange(
    x: Tensor,
    plan: Exchange,
    lines: Lines,
    kept: Kept | None = None,
    source: Kept | None = None,
) -> Tensor:
    """Carry out `plan` for this rank's part `x` of a tensor; differentiable, with the adjoint as backward.

    Collective unless `plan.moves` is False. `kept` is told how to make
    the result again from `x` and what was received, unless the result is just a view; how `x` itself is
    made again, if it is not kept either, is `source`.
    """
    if plan.is_identity:
        return x
    if plan.is_crop:
        return x[plan.own[0][0]]
    group, both = lines.of(plan), (kept or Kept(), source or Kept())
    if isinstance(group, TurnGroup):
        return _by_turns(x, plan, group)
    return cast(Tensor, _RangeExchange.apply(x, plan, group, both))


def _assemble(x: Tensor, plan: Exchange, received: Mapping[int, Tensor]) -> Tensor:
    out = _empty_like(x, plan.result)
    for gap in plan.gaps:
        out[gap] = plan.fill
    for source, to in plan.own:
        out[to] = x[source]
    for peer, pieces in plan.receives:
        unpack(received[peer], pieces, out, add=False)
    return out


def _assembled_again(
    x: Callable[[], Tensor], plan: Exchange, received: Mapping[int, Tensor]
) -> Tensor:
    return _assemble(x(), plan, received)


def _constant(x: Tensor) -> Callable[[], Tensor]:
    return lambda: x


def _empty_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uninitialised, in the memory order of `x`."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), dim))
    inverse = [order.index(dim) for dim in range(x.dim())]
    return x.new_empty([shape[dim] for dim in order]).permute(inverse)


class _RangeExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: Exchange, group: dist.ProcessGroup, kept: tuple[Kept, Kept]
    ) -> Tensor:
        ctx.plan, ctx.group = plan, group
        received = start(x, plan.sends, plan.receives, group).wait()
        into, source = kept
        origin = source.again or _constant(x.detach())
        into.again = functools.partial(_assembled_again, origin, plan, received)
        return _assemble(x, plan, received)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        plan: Exchange = ctx.plan
        pending = start(grad, plan.receives, plan.sends, ctx.group)
        dx = _own_gradient(grad, plan)
        received = pending.wait()
        for peer, pieces in plan.sends:
            unpack(received[peer], pieces, dx, add=True)
        return dx, None, None, None


# ---- Between turns of one process
#
# A turn deposits what others want of its part, each piece once, whoever wants it. It puts together what it
# has and what it is given when it goes on.


class Strips:
    """What one turn gives the others, and gets from them: the messages of an exchange."""

    def __init__(self, plan: Exchange, number: int) -> None:
        self.number, self.plan = number, plan
        self.distinct: list[tuple[Slices, ...]] = []
        self.which: dict[int, int] = {}
        """peer -> number of what it is given"""
        for peer, pieces in plan.sends:
            if pieces not in self.distinct:
                self.distinct.append(pieces)
            self.which[peer] = self.distinct.index(pieces)
        self.sizes = [sum(map(_size, pieces)) for pieces in self.distinct]
        self.expects = {peer: sum(map(_size, pieces)) for peer, pieces in plan.receives}

    def meet(
        self, everyone: Sequence[Strips], deposits: Sequence[Tensor], processes: Processes
    ) -> Sequence[Tensor]:
        """See `Question`."""
        parts = [d.detach().split(one.sizes) for one, d in zip(everyone, deposits, strict=True)]
        boxes = {
            (one.number, peer): of[which]
            for one, of in zip(everyone, parts, strict=True)
            for peer, which in one.which.items()
        }
        wanted = {
            (peer, one.number): size for one in everyone for peer, size in one.expects.items()
        }
        boxes |= processes.swap(boxes, wanted, deposits[0])
        return [one.received(boxes, deposits[0]) for one in everyone]

    def received(self, boxes: Mapping[tuple[int, int], Tensor], like: Tensor) -> Tensor:
        """What it gets, one after the other."""
        mine = [boxes[peer, self.number] for peer in self.expects]
        return torch.cat(mine) if mine else like.new_empty(0)

    def back(
        self, everyone: Sequence[Strips], grads: Sequence[Tensor], processes: Processes
    ) -> Sequence[Tensor]:
        """See `Question`."""
        boxes = {
            (one.number, peer): part
            for one, grad in zip(everyone, grads, strict=True)
            for peer, part in zip(one.expects, grad.split([*one.expects.values()]), strict=True)
        }
        wanted = {
            (peer, one.number): one.sizes[which]
            for one in everyone
            for peer, which in one.which.items()
        }
        boxes |= processes.swap(boxes, wanted, grads[0])
        return [one.given_back(boxes, grads[0]) for one in everyone]

    def given_back(self, boxes: Mapping[tuple[int, int], Tensor], like: Tensor) -> Tensor:
        """The gradient of what it deposited."""
        found = like.new_zeros(sum(self.sizes))
        parts = found.split(self.sizes)
        for peer, which in self.which.items():
            parts[which].add_(boxes[peer, self.number])
        return found


def _by_turns(x: Tensor, plan: Exchange, group: TurnGroup) -> Tensor:
    if not plan.moves:
        return cast(Tensor, _Laid.apply(x, x.new_empty(0), plan))
    strips = Strips(plan, group.number)
    received = group.ask(
        strips, lambda: cast(Tensor, _Cut.apply(x, strips.distinct)), trains=x.requires_grad
    )
    return cast(Tensor, _Laid.apply(x, received, plan))


class _Cut(torch.autograd.Function):
    """Pieces of a tensor, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, distinct: Sequence[tuple[Slices, ...]]) -> Tensor:
        ctx.pieces, ctx.shape = [p for pieces in distinct for p in pieces], x.shape
        return torch.cat([x[p].reshape(-1) for p in ctx.pieces]) if distinct else x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        dx = grads[0].new_zeros(ctx.shape)
        unpack(grads[0], ctx.pieces, dx, add=True)
        return dx, None


class _Laid(torch.autograd.Function):
    """What a turn has, and what it received, put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: Tensor, plan: Exchange) -> Tensor:
        ctx.plan = plan
        sizes = [sum(map(_size, pieces)) for _, pieces in plan.receives]
        peers = [peer for peer, _ in plan.receives]
        return _assemble(x, plan, dict(zip(peers, received.split(sizes), strict=True)))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        plan: Exchange = ctx.plan
        pieces = [grad[p].reshape(-1) for _, pieces in plan.receives for p in pieces]
        given = torch.cat(pieces) if pieces else grad.new_empty(0)
        return _own_gradient(grad, plan), given, None


def _own_gradient(grad: Tensor, plan: Exchange) -> Tensor:
    """What this rank's own pieces give back."""
    dx = _empty_like(grad, plan.shape)
    everything = tuple(slice(0, n) for n in plan.shape)
    if len(plan.own) == 1 and plan.own[0][0] == everything:  # one pass instead of two
        return dx.copy_(grad[plan.own[0][1]])
    dx.zero_()
    for source, to in plan.own:
        dx[source] += grad[to]
    return dx


def start(x: Tensor, sends: Pieces, receives: Pieces, group: dist.ProcessGroup) -> comm.Messages:
    """Begin to send pieces of `x`, and to receive others of its dtype; one flat message for every rank."""
    sent = {peer: torch.cat([x[piece].reshape(-1) for piece in pieces]) for peer, pieces in sends}
    return start_packed(sent, x, receives, group)


def start_packed(
    sent: Mapping[int, Tensor], like: Tensor, receives: Pieces, group: dist.ProcessGroup
) -> comm.Messages:
    """Begin to send messages, and to receive `receives` of the dtype of `like`."""
    buffers = {peer: like.new_empty(sum(map(_size, pieces))) for peer, pieces in receives}
    return comm.start_messages(sent, buffers, group, Tag.HALO)


def unpack(buffer: Tensor, pieces: Sequence[Slices], into: Tensor, add: bool) -> None:
    """Write, or add, the pieces that a message brought to where they belong."""
    for part, piece in zip(split(buffer, pieces), pieces, strict=True):
        view = into[piece]
        view.add_(part) if add else view.copy_(part)


def split(buffer: Tensor, pieces: Sequence[Slices]) -> list[Tensor]:
    """The pieces that a message brought, as views of it."""
    parts = buffer.split([_size(piece) for piece in pieces])
    return [
        part.view([s.stop - s.start for s in piece])
        for part, piece in zip(parts, pieces, strict=True)
    ]


def _size(piece: Slices) -> int:
    return math.prod(s.stop - s.start for s in piece)


def _wanted(wants: Sequence[Want], grid: Grid, rank: int) -> tuple[Segments, ...]:
    return tuple(want.segments[grid.part(rank, want.axes)] for want in wants)


def _covers(spread: Spread, wanted: tuple[Segments, ...], grid: Grid, rank: int) -> bool:
    """Whether rank `rank` has all it wants, but for what lies outside the tensor."""
    inside = [
        [(max(a, 0), min(b, n)) for a, b in segments if min(b, n) > max(a, 0)]
        for n, segments in zip(spread.shape, wanted, strict=True)
    ]
    if not all(inside):
        return True  # it wants nothing
    return all(
        start <= a and b <= stop
        for (start, stop), segments in zip(spread.held(grid, rank), inside, strict=True)
        for a, b in segments
    )


def _same_line(axes: tuple[int, ...], grid: Grid, one: int, other: int) -> bool:
    """Whether two ranks differ only along axes that the tensor is cut along: others hold the same."""
    a, b = grid.coordinates(one), grid.coordinates(other)
    return all(a[i] == b[i] for i in range(len(grid.axes)) if i not in axes)


def _pieces(wanted: tuple[Segments, ...], source: Box) -> tuple[tuple[Slices, Slices], ...]:
    """Where `source` holds what is wanted: slices in global coordinates, and in the result."""
    by_dim: list[list[tuple[slice, slice]]] = []
    for segments, (start, stop) in zip(wanted, source, strict=True):
        found, offset = list[tuple[slice, slice]](), 0
        for a, b in segments:
            low, high = max(a, start), min(b, stop)
            if low < high:
                found.append((slice(low, high), slice(offset + low - a, offset + high - a)))
            offset += b - a
        by_dim.append(found)
    return tuple(
        (tuple(source for source, _ in piece), tuple(to for _, to in piece))
        for piece in itertools.product(*by_dim)
    )


def _gaps(
    wanted: tuple[Segments, ...], shape: tuple[int, ...], result: tuple[int, ...]
) -> tuple[Slices, ...]:
    """Where in the result lies what is outside of the tensor along some dim."""
    gaps: list[Slices] = []
    for dim, (segments, n) in enumerate(zip(wanted, shape, strict=True)):
        offset = 0
        for a, b in segments:
            inside = (min(max(a, 0), b), max(min(b, n), a))
            outside = ((a, b),) if inside[0] >= inside[1] else ((a, inside[0]), (inside[1], b))
            for low, high in outside:
                if low < high:
                    where = [slice(0, size) for size in result]
                    where[dim] = slice(offset + low - a, offset + high - a)
                    gaps.append(tuple(where))
            offset += b - a
    return tuple(gaps)


def _shifted(piece: Slices, held: Box) -> Slices:
    return tuple(
        slice(s.start - start, s.stop - start) for s, (start, _) in zip(piece, held, strict=True)
    )
