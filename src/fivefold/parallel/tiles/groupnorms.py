"""Norms whose statistics are those of one sample: group, instance, layer and RMS norm.

Seen as (1, groups, ...), every group of every sample is a channel of batch norm, so the statistics over tiles
are those of `fivefold.parallel.norms`: one gather forward, one reduction backward.

    group norm      (N, C, H, W)  ->  (1, N G, C/G, H, W)       G groups
    instance norm   (N, C, H, W)  ->  (1, N C, H, W)
    layer norm      (N, C, H, W)  ->  (1, N C, H, W)            normalised over H and W, say

All that a rank holds is normalised; only what it owns counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.parallel.asked import added
from fivefold.parallel.norms import global_batch_norm, laid_out
from fivefold.parallel.program.rule import Local, Moment, Operation, as_held, call, rule, want_of
from fivefold.parallel.program.spread import Spread
from fivefold.parallel.program.sums import all_sum
from fivefold.parallel.tiles.along import widened
from fivefold.parallel.tiles.norms import owned_slices
from fivefold.torch_private import AnyInstanceNorm

__all__ = ["GroupNorm", "InstanceNorm", "InstanceNormModule", "LayerNorm", "RmsNorm"]

_GROUP_NORM = ("input", "num_groups", "weight", "bias", "eps")
_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps")
_RMS_NORM = ("input", "normalized_shape", "weight", "eps")
_INSTANCE_NORM = (
    "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps",
)  # fmt: skip
_TORCH_INSTANCE_NORM = (
    "input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps",
    "cudnn_enabled",
)  # fmt: skip


def _axes(spread: Spread, first: int) -> tuple[int, ...]:
    """The axes of the grid along which the dims from `first` on are divided."""
    return Spread(spread.shape[first:], spread.cuts[first:]).axes


def _owned(op: Operation, first: int) -> tuple[slice, ...] | None:
    """Where what counts lies in the dims from `first` on; None if that is all of it."""
    slices = owned_slices(op)
    return None if slices is None else slices[first:]


def _normalised(
    x: Tensor,
    groups: int,
    shape: Sequence[int],
    owned: tuple[slice, ...] | None,
    group: dist.ProcessGroup,
    **options: Any,
) -> Tensor:
    """`x` seen as (1, groups, *shape), every group normalised over the last dims, of which `owned` counts."""
    seen = x.reshape(1, groups, *shape)
    if owned is not None:
        owned = (slice(None),) * (seen.dim() - len(owned)) + owned
    settings: dict[str, Any] = {
        "running_mean": None, "running_var": None, "weight": None, "bias": None, "momentum": 0.0, **options,
    }  # fmt: skip
    return global_batch_norm(seen, **settings, group=group, owned=owned).reshape(x.shape)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if weight is not None:
        x = x * weight if bias is None else torch.addcmul(bias.to(x.dtype), x, weight.to(x.dtype))
    elif bias is not None:
        x = x + bias
    return x.to(dtype)


@rule("group_norm")
class GroupNorm:
    """Statistics per sample and group of channels, over all tiles."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the input, unless its channels are cut."""
        return None if op.given[0].cuts[1] is not None else [op.given[0].tight()]

    def lower(self, op: Operation) -> Local:
        """The plain call if images are whole here, else with the statistics of all tiles."""
        axes, owned = _axes(op.made[0], 2), _owned(op, 2)
        wants = (as_held(op.made[0]), *op.whole(1))
        if not axes:
            return Local(wants, call(op.node))

        def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            args, kwargs = op.node.arguments(operands)
            a: dict[str, Any] = {"weight": None, "bias": None, "eps": 1e-5}
            a |= {**dict(zip(_GROUP_NORM, args, strict=False)), **kwargs}
            x, groups = widened(a["input"]), int(a["num_groups"])
            n, channels = x.shape[:2]
            shape, group = (channels // groups, *x.shape[2:]), moment.groups(axes, False)
            found = _normalised(x, n * groups, shape, owned, group, eps=a["eps"])
            per_channel = (-1, *(1,) * (x.dim() - 2))
            weight, bias = (
                None if t is None else t.view(per_channel) for t in (a["weight"], a["bias"])
            )
            return _affine(found, weight, bias, x.dtype)

        return Local(wants, run, collective="statistics")


class _LastDims:
    """Norms over the last dims; their parameters are divided as these are."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the input."""
        return [op.given[0].tight()]

    def first(self, op: Operation) -> int:
        """The first of the dims that are normalised over."""
        sizes = op.node.bound(_LAYER_NORM)["normalized_shape"]
        return len(op.given[0].shape) - (len(sizes) if isinstance(sizes, Sequence) else 1)

    def on_parts(self, op: Operation, run: Any) -> Local:
        """`run` on what ranks hold, or the plain call where nothing has to be combined."""
        made, first = op.made[0], self.first(op)
        last = tuple(map(want_of, made.shape[first:], made.cuts[first:]))
        wants = (as_held(made), *(last for _ in op.node.operands[1:]))
        if not _axes(made, first):
            return Local(wants, call(op.node))
        return Local(wants, run, collective="statistics")


@rule("layer_norm")
class LayerNorm(_LastDims):
    """Statistics over the last dims."""

    def lower(self, op: Operation) -> Local:
        """Parameters lie where the pixels are."""
        first = self.first(op)
        axes, owned = _axes(op.made[0], first), _owned(op, first)

        def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            args, kwargs = op.node.arguments(operands)
            a: dict[str, Any] = {"weight": None, "bias": None, "eps": 1e-5}
            a |= {**dict(zip(_LAYER_NORM, args, strict=False)), **kwargs}
            x = widened(a["input"])
            groups, last = math.prod(x.shape[:first]), x.shape[first:]
            found = _normalised(x, groups, last, owned, moment.groups(axes, False), eps=a["eps"])
            return _affine(found, a["weight"], a["bias"], x.dtype)

        return self.on_parts(op, run)


@rule("rms_norm")
class RmsNorm(_LastDims):
    """Root mean squares over the last dims."""

    def lower(self, op: Operation) -> Local:
        """Sums of squares; autograd gives those who own them their part."""
        first = self.first(op)
        axes, owned = _axes(op.made[0], first), _owned(op, first)
        dims = tuple(range(first, len(op.made[0].shape)))
        count = math.prod(op.made[0].shape[first:])

        def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            args, kwargs = op.node.arguments(operands)
            a: dict[str, Any] = {"weight": None, "eps": None}
            a |= {**dict(zip(_RMS_NORM, args, strict=False)), **kwargs}
            x = cast(Tensor, a["input"])
            wide = x if x.dtype == torch.float64 else x.float()
            own = wide if owned is None else wide[(slice(None),) * first + owned]
            total = all_sum(own.square().sum(dims, keepdim=True), moment.groups(axes, False))
            eps = torch.finfo(x.dtype).eps if a["eps"] is None else a["eps"]
            return _affine(wide * torch.rsqrt(total / count + eps), a["weight"], None, x.dtype)

        return self.on_parts(op, run)


def _instance_norm(moment: Moment, x: Tensor, op: Operation, a: dict[str, Any]) -> Tensor:
    """`F.instance_norm(**a)` of what a rank holds, statistics from the input; buffers of all samples."""
    lies, owned = op.made[0], _owned(op, 2)
    n, channels = x.shape[:2]
    means, variances = a.get("running_mean"), a.get("running_var")
    found = [None if t is None else t.new_zeros(n * channels) for t in (means, variances)]
    result = _normalised(
        x, n * channels, x.shape[2:], owned, moment.groups(_axes(lies, 2), False),
        running_mean=found[0], running_var=found[1], momentum=1.0, eps=a["eps"],
        weight=None if a["weight"] is None else a["weight"].repeat(n),
        bias=None if a["bias"] is None else a["bias"].repeat(n),
    )  # fmt: skip
    samples = moment.statistics(() if lies.cuts[0] is None else lies.cuts[0].axes)
    for buffer, new in zip((means, variances), found, strict=True):
        if buffer is not None and new is not None:
            for _ in range(1 + op.node.again):
                mean = _over_all(new.view(n, channels), samples, moment.rows > 0)
                if moment.updates:
                    buffer.data.lerp_(mean.to(buffer.dtype), a["momentum"])
    return result


def _over_all(new: Tensor, group: dist.ProcessGroup, counted: bool) -> Tensor:
    """The mean over all samples (channels); `new` are those of this rank. Collective.

    Also where something is computed again, and buffers stay: what was received then is taken in that order.
    """
    total = new.new_zeros(new.shape[1] + 1, dtype=torch.float64)
    if counted:
        total[0] = new.shape[0]
        total[1:] = new.detach().sum(0)
    total = added(total, group)
    return total[1:] / total[0]


class _Instance:
    def collective(self, op: Operation, *, given: bool, tracked: bool) -> str | None:
        """What ranks exchange: sums over images in parts, and running statistics unless they are `given`."""
        lies = op.made[0]
        if given:
            return None
        if _axes(lies, 2):
            return "statistics"
        return "running statistics" if tracked and lies.axes else None

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the input, its channels whole."""
        given = op.given[0]
        return None if len(given.shape) < 3 else [given.tight().with_cut(1, None)]


@rule("instance_norm")
class InstanceNorm(_Instance):
    """Statistics per sample and channel, over all tiles."""

    def lower(self, op: Operation) -> Local:
        """Statistics of all tiles, unless they are given."""
        lies, node = op.made[0], op.node
        names = _TORCH_INSTANCE_NORM if node.function is torch.instance_norm else _INSTANCE_NORM

        def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            args, kwargs = node.arguments(operands)
            a: dict[str, Any] = {"weight": None, "bias": None, "momentum": 0.1, "eps": 1e-5}
            a |= {**dict(zip(names, args, strict=False)), **kwargs}
            if not a.get("use_input_stats", True):
                x, _ = a.pop("input"), a.pop("cudnn_enabled", None)
                return laid_out(functools.partial(F.instance_norm, **a), x)
            return _instance_norm(moment, a["input"], op, a)

        bound = node.bound(names)
        tracked = bound.get("running_mean") is not None
        collective = self.collective(
            op, given=not bound.get("use_input_stats", True), tracked=tracked
        )
        return Local((as_held(lies), *op.whole(1)), run, collective=collective)


@rule("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")
class InstanceNormModule(_Instance):
    """As `instance_norm`."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the input; a single sample without its dim is gathered."""
        module, dims = cast(Any, op.node.function), int(op.node.name[-2])
        if len(op.given[0].shape) == dims + 2:
            return super().place(op)
        if module.training and module.track_running_stats:
            raise UsageError(
                f"{op.node.where} keeps running statistics of a sample without its dim, which tiles and "
                "stages would count wrongly: give it a batch of one (x.unsqueeze(0))"
            )
        return None

    def lower(self, op: Operation) -> Local:
        """As torch's own forward, with the statistics of all tiles."""
        lies = op.made[0]
        module: Any = op.node.function
        assert isinstance(module, AnyInstanceNorm)

        def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            x = operands[0]
            if not (module.training or not module.track_running_stats):
                return laid_out(module, x)
            a: dict[str, Any] = {
                "running_mean": module.running_mean, "running_var": module.running_var,
                "weight": module.weight, "bias": module.bias,
                "momentum": 0.0 if module.momentum is None else module.momentum, "eps": module.eps,
            }  # fmt: skip
            return _instance_norm(moment, x, op, a)

        given = not module.training and bool(module.track_running_stats)
        tracked = module.running_mean is not None
        return Local(
            (as_held(lies),), run, collective=self.collective(op, given=given, tracked=tracked)
        )
