"""Convolutions and pools: sliding windows along the last dims.

Along a dim that is cut, the input comes with its borders and with what the padding would be, so that the
operation itself pads nothing there; along the other dims it pads as it always does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.border import border
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Local, Moment, Operation, call, rule, want_of
from fivefold.parallel.program.spread import Division, Spread
from fivefold.parallel.program.windows import Window

__all__ = ["AveragePool", "Convolution", "MaxPool", "per_dim"]

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_MAX_POOL = (
    "input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices",
)  # fmt: skip
_AVERAGE_POOL = (
    "input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override",
)  # fmt: skip


def per_dim(value: Any, dims: int) -> tuple[int, ...]:
    """An option of torch's, one number for every spatial dim."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return tuple(map(int, values * dims if len(values) == 1 else values))


def placed(node: Node, given: Spread, windows: Sequence[Window]) -> list[Spread] | None:
    """How the result of windows along the last dims lies; None if the channels are cut."""
    shape, dims = node.output_shapes[0], len(windows)
    first = len(shape) - dims
    if len(given.shape) != len(shape) or (first >= 1 and given.cuts[first - 1] is not None):
        return None
    made = Spread(shape, given.cuts[:first] + (None,) * dims)
    for dim, window in enumerate(windows, first):
        cut = given.cuts[dim]
        if cut is not None:
            made = made.with_cut(dim, window.cut(cut, shape[dim]))
    return [made.tight()]


def wanted(
    shape: Sequence[int], made: Spread, windows: Sequence[Window], explicit: Sequence[bool]
) -> tuple[Want, ...]:
    """What is wanted of the input, padding included in the dims that are `explicit`."""
    first = len(shape) - len(windows)
    wants = [want_of(n, cut) for n, cut in zip(shape[:first], made.cuts[:first], strict=True)]
    for dim, (window, pads) in enumerate(zip(windows, explicit, strict=True), first):
        cut = made.cuts[dim]
        if cut is not None:
            wants.append(Want.ranges(cut.axes, [window.needs(r) for r in cut.held]))
        elif pads:
            wants.append(Want.ranges((), [window.needs((0, made.shape[dim]))]))
        else:
            wants.append(Want.all_of(shape[dim]))
    return tuple(wants)


@rule("conv1d", "conv2d", "conv3d")
class Convolution:
    """Convolution with zero padding; other padding modes are a `pad` before it."""

    def _windows(self, node: Node) -> tuple[list[Window], list[bool]]:
        """The window along each spatial dim, and whether its padding differs at both ends."""
        a = node.bound(_CONVOLUTION)
        kernel = node.shapes[1][2:]
        dims = len(kernel)
        dilation = per_dim(a.get("dilation", 1), dims)
        padding, uneven = a.get("padding", 0), [False] * dims
        if isinstance(padding, str):
            total = [
                d * (k - 1) if padding == "same" else 0
                for d, k in zip(dilation, kernel, strict=True)
            ]
            padding, uneven = [t // 2 for t in total], [t % 2 == 1 for t in total]
        options = (kernel, per_dim(a.get("stride", 1), dims), per_dim(padding, dims), dilation)
        return [Window(*o) for o in zip(*options, strict=True)], uneven

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Every output belongs where the centre of its window is."""
        windows, _ = self._windows(op.node)
        return (
            placed(op.node, op.given[0], windows)
            if len(op.given[0].shape) == len(windows) + 2
            else None
        )

    def lower(self, op: Operation) -> Local:
        """The same convolution, padding nothing along the dims that are cut."""
        windows, uneven = self._windows(op.node)
        cuts = op.made[0].cuts[2:]
        explicit = [c is not None or u for c, u in zip(cuts, uneven, strict=True)]
        padding = tuple(0 if e else w.padding for e, w in zip(explicit, windows, strict=True))
        wants = wanted(op.node.shapes[0], op.made[0], windows, explicit)
        outputs = op.made[0].local_shape(op.here.grid, op.here.rank)[2:]

        def convolve(
            operands: Sequence[Tensor], padding: tuple[int, ...], with_bias: bool
        ) -> Tensor:
            args, kwargs = op.node.arguments(operands)
            a = {**dict(zip(_CONVOLUTION, args, strict=False)), **kwargs, "padding": padding}
            return op.node.function(**(a if with_bias else {**a, "bias": None}))

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            return convolve(operands, padding, True)

        return Local(
            (wants, *op.whole(1)),
            run=run if any(explicit) else call(op.node),
            bordered=lambda plan: border(plan, windows, explicit, outputs, convolve),
        )


@rule("max_pool1d", "max_pool2d", "max_pool3d")
class MaxPool:
    """Max pooling: what lies outside the image is -inf."""

    def _windows(self, node: Node) -> list[Window]:
        a = node.bound(_MAX_POOL)
        dims = int(node.name[-2])
        kernel = per_dim(a["kernel_size"], dims)
        stride = per_dim(a.get("stride") or kernel, dims)
        options = (
            kernel, stride, per_dim(a.get("padding", 0), dims), per_dim(a.get("dilation", 1), dims),
        )  # fmt: skip
        return [Window(*o) for o in zip(*options, strict=True)]

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Every output belongs where the centre of its window is."""
        if len(op.node.outputs) != 1:
            return None
        return _placed_pool(op.node, op.given[0], self._windows(op.node))

    def lower(self, op: Operation) -> Local:
        """The same pool, padding nothing along the dims that are cut."""
        windows = self._windows(op.node)
        cuts = op.made[0].cuts[-len(windows) :]
        padding = tuple(0 if c else w.padding for c, w in zip(cuts, windows, strict=True))
        wants = wanted(op.node.shapes[0], op.made[0], windows, [c is not None for c in cuts])

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            args, kwargs = op.node.arguments(operands)
            a = {**dict(zip(_MAX_POOL, args, strict=False)), **kwargs, "padding": padding}
            return op.node.function(**a)

        whole = all(c is None for c in cuts)
        return Local((wants,), call(op.node) if whole else run, fills=(-math.inf,))


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
class AveragePool:
    """Average pooling. Where windows reach over the border, each output has a divisor of its own."""

    def _windows(self, node: Node) -> list[Window]:
        a = node.bound(_AVERAGE_POOL)
        dims = int(node.name[-2])
        kernel = per_dim(a["kernel_size"], dims)
        stride = per_dim(a.get("stride") or kernel, dims)
        padding = per_dim(a.get("padding", 0), dims)
        return [Window(*o) for o in zip(kernel, stride, padding, strict=True)]

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Every output belongs where the centre of its window is."""
        return _placed_pool(op.node, op.given[0], self._windows(op.node))

    def lower(self, op: Operation) -> Local:
        """Sums over windows, all padding explicit, times one over the divisors of the outputs held here."""
        windows, a = self._windows(op.node), op.node.bound(_AVERAGE_POOL)
        dims = len(windows)
        wants = wanted(op.node.shapes[0], op.made[0], windows, [True] * dims)
        sizes = op.node.shapes[0][-dims:]
        held = op.made[0].held(op.here.grid, op.here.rank)[-dims:]
        include, override = a.get("count_include_pad", True), a.get("divisor_override")
        counts = [
            [_counted(window, j, n, include) for j in range(*outputs)]
            for window, n, outputs in zip(windows, sizes, held, strict=True)
        ]
        kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
        uniform = override or _only(counts)

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            x = operands[0]
            if uniform is not None:
                return _sum_pool(x, kernel, stride, uniform)
            divisors = torch.ones((), dtype=x.dtype, device=x.device)
            for dim, numbers in enumerate(counts):
                along = torch.tensor(numbers, dtype=x.dtype, device=x.device)
                divisors = divisors * along.view(-1, *(1,) * (dims - 1 - dim))
            return _sum_pool(x, kernel, stride, 1) / divisors

        return Local((wants,), run)


def _placed_pool(node: Node, given: Spread, windows: Sequence[Window]) -> list[Spread] | None:
    """As `placed`, but channels may be cut."""
    shape, first = node.output_shapes[0], len(given.shape) - len(windows)
    made = Spread(shape, given.cuts[:first] + (None,) * len(windows))
    for dim, window in enumerate(windows, first):
        cut: Division | None = given.cuts[dim]
        if cut is not None:
            made = made.with_cut(dim, window.cut(cut, shape[dim]))
    return [made.tight()]


def _counted(window: Window, output: int, n: int, include_padding: bool) -> int:
    """What one output is divided by, along one dim of `n` inputs."""
    start = output * window.stride - window.padding
    stop = min(start + window.kernel, n + window.padding)
    return stop - start if include_padding else min(stop, n) - max(start, 0)


def _only(counts: Sequence[Sequence[int]]) -> int | None:
    """The one divisor of all outputs, if they share one."""
    if all(len(set(numbers)) == 1 for numbers in counts):
        return math.prod(numbers[0] for numbers in counts)
    return None


def _sum_pool(x: Tensor, kernel: list[int], stride: list[int], divisor: int) -> Tensor:
    """Sums over windows without padding, divided by one number."""
    if len(kernel) == 1:
        return F.avg_pool1d(x, kernel, stride) * (kernel[0] / divisor)
    pool: Callable[..., Tensor] = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
    return pool(x, kernel, stride, divisor_override=divisor)
