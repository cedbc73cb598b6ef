"""Reductions: every rank reduces the pixels that it owns, then the ranks combine what they have.

mean over height and width, 2 x 2 tiles

[sum][sum]   all_sum    the mean, whole on every rank that has the same samples
[sum][sum]  ────────►   (samples, channels and volumes that stay cut stay as they are)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.rule import Local, Moment, Operation, call, rule
from fivefold.parallel.program.spread import Spread
from fivefold.parallel.program.sums import all_extreme, all_sum
from fivefold.parallel.tiles.along import (
    arguments,
    dims_of,
    reduced,
    reduced_wants,
    widened,
)
from fivefold.parallel.tiles.pointwise import Pointwise

__all__ = ["Extreme", "GlobalMean", "Norm", "Reduction", "Sum", "Variance"]


@dataclass(frozen=True)
class Over:
    """What a reduction runs over."""

    dims: tuple[int, ...]
    keepdim: bool
    count: int
    """elements per result, of all ranks"""
    options: Mapping[str, Any]
    """the other arguments, by name"""


class Reduction(ABC):
    """A reduction, given the names of its arguments and how ranks combine what they have."""

    names: tuple[str, ...] = ("input", "dim", "keepdim")

    def over(self, node: Node) -> Over:
        """What a call reduces."""
        options = arguments(node, self.names)
        shape = node.shapes[0]
        dims = dims_of(options.get("dim"), len(shape))
        count = math.prod(shape[dim] for dim in dims)
        return Over(dims, bool(options.get("keepdim", False)), count, options)

    def combines(self, over: Over) -> bool:  # noqa: ARG002 - for those that depend on it
        """Whether this can be done in parts with these options."""
        return True

    @abstractmethod
    def combine(self, x: Tensor, over: Over, group: dist.ProcessGroup) -> Any:
        """The result, from this rank's own pixels `x`. Collective over `group`."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Whole along the dims that are reduced, otherwise as the operand."""
        over, given = self.over(op.node), op.given[0]
        if len(op.given) != 1 or (_axes(given, over) and not self.combines(over)):
            return None
        return [reduced(given, over.dims, over.keepdim, shape) for shape in op.node.output_shapes]

    def lower(self, op: Operation) -> Local:
        """Reduce what is owned, then combine; the plain call if all of it is here."""
        over, given = self.over(op.node), op.given[0]
        wants = (reduced_wants(given, over.dims, over.keepdim, op.made[0]),)
        axes = _axes(given, over)
        if not axes:
            return Local(wants, call(op.node))

        def run(moment: Moment, operands: Sequence[Tensor]) -> Any:
            return self.combine(operands[0], over, moment.groups(axes, False))

        return Local(wants, run, collective="sums")


def _axes(given: Spread, over: Over) -> tuple[int, ...]:
    """The axes of the grid along which a reduction has to combine."""
    found = [given.cuts[dim] for dim in over.dims]
    return tuple(sorted({axis for cut in found if cut is not None for axis in cut.axes}))


def _sum(x: Tensor, over: Over, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks; half precision adds in float32, as torch does."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    own = x.sum(over.dims, over.keepdim, dtype=torch.float32 if half else None)
    return all_sum(own, group)


def _cast(x: Tensor, over: Over) -> Tensor:
    dtype = over.options.get("dtype")
    return x if dtype is None else x.to(dtype)


def _accurate(x: Tensor) -> Tensor:
    """Half precision in float32: squares overflow, and differences lose digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _squares(x: Tensor) -> Tensor:
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()


def _root(x: Tensor) -> Tensor:
    """The square root, with the gradient zero at zero, as torch's norms and deviations have it."""
    zero = x == 0
    return x.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


@rule("sum", "mean")
class Sum(Reduction):
    """Sums and means."""

    names = ("input", "dim", "keepdim", "dtype")

    def over(self, node: Node) -> Over:
        """As `Reduction`, and whether to divide."""
        over = super().over(node)
        return Over(
            over.dims, over.keepdim, over.count, {**over.options, "mean": node.name != "sum"}
        )

    def combine(self, x: Tensor, over: Over, group: dist.ProcessGroup) -> Tensor:
        """Add, and divide by the number of pixels of all ranks."""
        x = _cast(x if over.options["mean"] else widened(x), over)
        total = _sum(x, over, group)
        if over.options["mean"]:
            total = total / over.count
        return total.to(x.dtype) if x.is_floating_point() else total


class GlobalMean(Sum):
    """`adaptive_avg_pool{1,2,3}d` to a single pixel: the mean over the last 1, 2 or 3 dims."""

    def over(self, node: Node) -> Over:
        """All spatial dims; they stay, with one pixel."""
        shape, dims = node.shapes[0], int(node.name[-2])
        last = tuple(range(len(shape) - dims, len(shape)))
        return Over(last, True, math.prod(shape[-dims:]), {"mean": True})


@rule("var", "std", "var_mean", "std_mean")
class Variance(Reduction):
    """Variances and deviations: the mean first, then the squares of what deviates from it."""

    names = ("input", "dim", "correction", "keepdim")

    def over(self, node: Node) -> Over:
        """Torch takes `unbiased` in the place of `dim`, or of what is called `correction` here."""
        options = dict(arguments(node, self.names))
        if isinstance(options.get("dim"), bool):
            options["correction"] = options.pop("dim")
        correction = options.get("correction", options.get("unbiased"))
        options |= {"name": node.name, "correction": 1 if correction is None else correction}
        shape = node.shapes[0]
        dims = dims_of(options.get("dim"), len(shape))
        count = math.prod(shape[dim] for dim in dims)
        return Over(dims, bool(options.get("keepdim", False)), count, options)

    def combine(self, x: Tensor, over: Over, group: dist.ProcessGroup) -> Any:
        """Two sums forward; the second one needs no gradient by way of the mean, for it is zero."""
        name, there = over.options["name"], Over(over.dims, True, over.count, over.options)
        wide = _accurate(x)
        mean = _sum(wide, there, group) / over.count
        squares = _squares(wide - mean.detach())
        var = _sum(squares, there, group) / max(0, over.count - over.options["correction"])
        spread = (_root(var) if name.startswith("std") else var).to(x.real.dtype)
        if not over.keepdim:
            mean, spread = _without(mean, over), _without(spread, over)
        return (spread, mean.to(x.dtype)) if name.endswith("mean") else spread


def _without(x: Tensor, over: Over) -> Tensor:
    return x.reshape([n for dim, n in enumerate(x.shape) if dim not in over.dims])


@rule("amax", "amin")
class Extreme(Reduction):
    """The largest or smallest number; ties share the gradient evenly."""

    def over(self, node: Node) -> Over:
        """As `Reduction`, and which of both."""
        over = super().over(node)
        largest = node.name in {"amax", "max"}
        return Over(over.dims, over.keepdim, over.count, {**over.options, "largest": largest})

    def combine(self, x: Tensor, over: Over, group: dist.ProcessGroup) -> Tensor:
        """The extreme of the ranks' extremes."""
        found = all_extreme(x, over.dims, over.options["largest"], group)
        return found if over.keepdim else _without(found, over)


@rule("max", "min")
class MaxMin(Extreme):
    """`x.max()`, `x.max(dim)` with its indices, and `torch.max(x, y)`."""

    def combines(self, over: Over) -> bool:
        """Indices are not followed over tiles."""
        return "dim" not in over.options

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As a reduction, or as any operation of two tensors."""
        return Pointwise().place(op) if len(op.given) == 2 else super().place(op)

    def lower(self, op: Operation) -> Local:
        """The same."""
        return Pointwise().lower(op) if len(op.given) == 2 else super().lower(op)


@rule("norm", "linalg_vector_norm", "linalg_norm")
class Norm(Reduction):
    """The Euclidean norm; others over whole dims only."""

    names = ("input", "ord", "dim", "keepdim", "dtype")

    def over(self, node: Node) -> Over:
        """`torch.norm` calls the kind `p`."""
        over = super().over(node)
        kind = over.options.get("p", over.options.get("ord"))
        if node.name == "linalg_norm":  # 2 means the spectral norm where there are two dims
            euclidean = kind is None
        else:
            euclidean = kind in {None, "fro", 2}  # codespell:ignore fro
        return Over(over.dims, over.keepdim, over.count, {**over.options, "euclidean": euclidean})

    def combines(self, over: Over) -> bool:
        """Only the Euclidean one."""
        return over.options["euclidean"]

    def combine(self, x: Tensor, over: Over, group: dist.ProcessGroup) -> Tensor:
        """The root of the sum of squares."""
        x = _cast(widened(x), over)
        return _root(_sum(_squares(_accurate(x)), over, group)).to(x.real.dtype)


@rule("logsumexp", "special_logsumexp")
class LogSumExp(Reduction):
    """log(sum(exp(x))), without overflow: relative to the largest."""

    def combine(self, x: Tensor, over: Over, group: dist.ProcessGroup) -> Tensor:
        """The largest of all ranks cancels, so it needs no gradient."""
        there = Over(over.dims, True, over.count, over.options)
        wide = _accurate(x)
        with torch.no_grad():
            largest = all_extreme(wide, over.dims, True, group)
            largest.masked_fill_(largest.isinf(), 0.0)
        found = (_sum((wide - largest).exp(), there, group).log() + largest).to(x.dtype)
        return found if over.keepdim else _without(found, over)


@rule(
    "all", "any", "argmax", "argmin", "count_nonzero", "median", "mode", "nanmean", "nanmedian",
    "nansum", "prod",
)  # fmt: skip
class GatheredReduction(Reduction):
    """Gathered where a dim is cut that they run over."""

    def combines(self, over: Over) -> bool:  # noqa: ARG002 - see `Reduction`
        """Never."""
        return False

    def combine(self, x: Tensor, over: Over, group: dist.ProcessGroup) -> Any:  # noqa: ARG002
        """Nobody asks for this, see `combines`."""
        raise AssertionError(over)
