"""Convolution of a tile without putting it and its halo together.

Convolution is linear: what a rank owns and what it receives may be convolved apart, and the results added.

    own      |........|      messages under way while it is convolved, padded with zeros at its borders
    strip             |<     received; convolved with the few windows that reach it
    result   |.......+|      the strip's share is added to the border, in place

No tensor is copied to make room for a halo, forward or backward, nothing but the tile itself is saved, and in
both directions the messages travel while the interior is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold import comm
from fivefold.parallel.program.exchange import (
    Exchange,
    Lines,
    Slices,
    split,
    start,
    start_packed,
    unpack,
)
from fivefold.parallel.program.windows import Window

__all__ = ["Border", "Convolve", "border"]

Convolve = Callable[[Sequence[Tensor], tuple[int, ...], bool], Tensor]
"""from operands, padding per spatial dim, and whether the bias is added, to the result"""


@dataclass(frozen=True)
class _Strip:
    """What one received piece adds to the result."""

    pads: tuple[int, ...]
    """zeros around it, as `torch.nn.functional.pad` takes them, so that windows begin where they should"""
    where: Slices
    """what it adds to"""


@dataclass(frozen=True, eq=False)
class Border:
    """A convolution in two parts."""

    exchange: Exchange
    convolve: Convolve
    padding: tuple[int, ...]
    """of the interior, per spatial dim"""
    strip_padding: tuple[int, ...]
    strips: tuple[_Strip, ...]
    """in the order in which `exchange` receives their pieces"""

    def run(self, operands: Sequence[Tensor], lines: Lines) -> Tensor:
        """The convolution of the first operand with its neighbours' pixels. Collective as the exchange is."""
        if not self.exchange.moves:
            return self.convolve(operands, self.padding, True)
        x, *others = operands
        link = _Link(self.exchange, lines.of(self.exchange))
        own, token = cast("tuple[Tensor, Tensor]", _Own.apply(x, link))
        y = self.convolve([own, *others], self.padding, True)
        received = cast("tuple[Tensor, ...]", _Strips.apply(token, link))
        shares = [
            self.convolve([F.pad(piece, strip.pads), *others], self.strip_padding, False)
            for piece, strip in zip(received, self.strips, strict=True)
        ]
        if not shares:
            return y
        return cast(Tensor, _Added.apply(y, tuple(s.where for s in self.strips), *shares))


def border(
    exchange: Exchange,
    windows: Sequence[Window],
    explicit: Sequence[bool],
    outputs: Sequence[int],
    convolve: Convolve,
) -> Border | None:
    """How to convolve in two parts; None where the tile's own windows do not begin where it does.

    `explicit` says for each of the last dims whether `exchange` brings what is beyond the tile, padding
    included; `outputs` are the sizes of this rank's result along them.
    """
    first = len(exchange.result) - len(windows)
    if len(exchange.own) != 1 or not all(outputs):
        return None
    # Replicas that get whole samples compute what their owner does, and to the last bit as it does.
    if exchange.crosses:
        return None
    ((source, to),) = exchange.own
    everything = tuple(slice(0, n) for n in exchange.shape)
    # Where nothing moves, pixels that no window sees may as well stay: cutting them off is a copy.
    if source != everything and exchange.moves:
        return None
    if source[:first] != everything[:first] or to[:first] != everything[:first]:
        return None
    padding = tuple(
        to[dim].start - source[dim].start if cut else window.padding
        for dim, (window, cut) in enumerate(zip(windows, explicit, strict=True), first)
    )
    if min(padding) < 0:
        return None
    made = [
        (exchange.shape[dim] + 2 * pad - window.extent) // window.stride + 1
        for dim, (window, pad) in enumerate(zip(windows, padding, strict=True), first)
    ]
    if made != list(outputs):
        return None
    pieces = [piece for _, pieces in exchange.receives for piece in pieces]
    return Border(
        exchange,
        convolve,
        padding,
        tuple(0 if cut else w.padding for w, cut in zip(windows, explicit, strict=True)),
        tuple(_strip(piece, first, windows, explicit, outputs) for piece in pieces),
    )


def _strip(
    piece: Slices,
    first: int,
    windows: Sequence[Window],
    explicit: Sequence[bool],
    outputs: Sequence[int],
) -> _Strip:
    """Which windows see a piece of the input, and the zeros that complete what they see."""
    pads: list[int] = []
    where = [slice(None)] * first
    for window, cut, n, s in zip(windows, explicit, outputs, piece[first:], strict=True):
        if not cut:
            where.append(slice(0, n))
            pads[:0] = (0, 0)
            continue
        # Input 0 is where the first window begins.
        low = max(-((window.extent - 1 - s.start) // window.stride), 0)
        high = min((s.stop - 1) // window.stride, n - 1)
        assert low <= high, "nobody receives what no window sees"
        where.append(slice(low, high + 1))
        pads[:0] = (s.start - low * window.stride, high * window.stride + window.extent - s.stop)
    return _Strip(tuple(pads), tuple(where))


class _Link:
    """What the functions of one convolution share: the messages under way."""

    def __init__(self, plan: Exchange, group: dist.ProcessGroup) -> None:
        self.plan, self.group = plan, group
        self.pending: comm.Messages | None = None

    def wait(self) -> Mapping[int, Tensor]:
        """What was received."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending.wait()


class _Own(torch.autograd.Function):
    """A tile as it is; messages leave before it is convolved, and are added to its gradient afterwards.

    Autograd runs what was made last first, so strips go back before the interior's gradient is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: _Link) -> tuple[Tensor, Tensor]:
        ctx.link = link
        link.pending = start(x, link.plan.sends, link.plan.receives, link.group)
        return x.view_as(x), x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        dx, _token = grads
        link: _Link = ctx.link
        if not link.plan.receives:  # there are no strips whose gradients could have gone back
            link.pending = start_packed({}, dx, link.plan.sends, link.group)
        received = link.wait()
        # The convolution has just made this gradient, and nobody else has it.
        for peer, pieces in link.plan.sends:
            unpack(received[peer], pieces, dx, add=True)
        return dx, None


class _Strips(torch.autograd.Function):
    """What was received, piece by piece."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, link: _Link) -> tuple[Tensor, ...]:
        ctx.link, ctx.shape = link, token.shape
        received = link.wait()
        return tuple(
            piece for peer, pieces in link.plan.receives for piece in split(received[peer], pieces)
        )

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        link: _Link = ctx.link
        parts = iter(grads)
        sent = {
            peer: torch.cat([next(parts).reshape(-1) for _ in pieces])
            for peer, pieces in link.plan.receives
        }
        link.pending = start_packed(sent, grads[0], link.plan.sends, link.group)
        return grads[0].new_zeros(ctx.shape), None


class _Added(torch.autograd.Function):
    """Shares added to parts of a tensor in place: its gradient passes through untouched, in one piece."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, where: Sequence[Slices], *shares: Tensor) -> Tensor:
        ctx.where = where
        ctx.mark_dirty(y)
        for piece, share in zip(where, shares, strict=True):
            y[piece].add_(share)
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        return dy, None, *(dy[piece] for piece in ctx.where)
