"""Batch norm over the whole global batch.

Forward, per channel, with n values on this rank and N on all of them (Chan, Golub, LeVeque 1983):

    mean = sum(n mean_r) / N        M2 = sum(M2_r + n (mean_r - mean)^2)        var = M2 / N

Backward, with y = w xhat + b and xhat = (x - mean) / sqrt(var + eps):

    dx = w / sqrt(var + eps) * (dy - [sum dy] / N - xhat [sum dy xhat] / N)

The bracketed sums run over all ranks. One gather forward and one reduction backward per layer; ranks add in
the same order, so all of them get the same bits. torch's SyncBatchNorm does this on GPUs only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold import comm
from fivefold.parallel.asked import Processes, TurnGroup
from fivefold.parallel.graph.tape import Node
from fivefold.torch_private import AnyBatchNorm
from fivefold.trace import Tag

__all__ = [
    "batch_norm_names",
    "global_batch_norm",
    "global_instance_norm",
    "laid_out",
    "uses_batch",
]

_TORCH_BATCH_NORM = (
    "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps",
    "cudnn_enabled",
)  # fmt: skip
_BATCH_NORM = (
    "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
)  # fmt: skip


def laid_out(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`norm(x)`, with tensors and gradients whose memory torch's kernels for CPUs take for what it is.

    Where a dim has one element, its stride may be anything. The kernels then take channels-last memory for
    contiguous, or the reverse, and give other gradients (torch 2.13).
    """
    if not (torch.is_grad_enabled() and _misleads(x)):
        return norm(x)
    made = norm(x.contiguous())
    if made.requires_grad:  # for scale and shift, where not for `x`
        made.register_hook(Tensor.contiguous)
    return made


def _misleads(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dim() >= 4 and 1 in (x.shape[0], *x.shape[2:])


def global_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    momentum: float,
    eps: float,
    group: dist.ProcessGroup,
    counted: bool = True,
    owned: tuple[slice, ...] | None = None,
) -> Tensor:
    """`torch.nn.functional.batch_norm` in training mode, with the statistics of all ranks of `group`.

    `x` is (rows, channels, ...); ranks may hold different numbers of rows. Running buffers are updated in
    place with the unbiased variance, as torch does. With `counted=False` the rows of this rank are
    stand-ins: they are normalised, but take no part in the statistics. `owned` is where those of `x` lie that
    count, all by default: what a tile computes of its neighbours' pixels is theirs to count.

    Raises `ValueError`, as torch does, when all ranks together hold a single value per channel.
    """
    own = x if owned is None else x[owned]
    count = own.numel() // max(x.shape[1], 1) if counted else 0
    if isinstance(group, TurnGroup):
        mean, var, total = _statistics_of_turns(own, count, group)
    else:
        mean, var, total = _statistics(own.detach(), count, group)
    if count <= 1 and total.item() <= 1:  # the first test spares a GPU the wait
        raise ValueError(
            "Expected more than 1 value per channel when training, but all ranks together have one; "
            f"this rank's input size is {list(x.shape)}"
        )
    # By .data, as torch's own kernel does: another micro-batch may have saved them, which uses no numbers of
    # theirs in its backward, but would find them changed.
    if running_mean is not None:
        running_mean.data.lerp_(mean.detach().to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = var.detach() * (total / (total - 1.0))
        running_var.data.lerp_(unbiased.to(running_var.dtype), momentum)
    stats_dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    if isinstance(group, TurnGroup):
        mean, var = mean.to(stats_dtype), var.to(stats_dtype)
        return cast(Tensor, _Normalised.apply(x, weight, bias, mean, var, eps, counted))
    return cast(
        Tensor,
        _BatchNorm.apply(
            x,
            weight,
            bias,
            mean.to(stats_dtype),
            var.to(stats_dtype),
            total,
            eps,
            group,
            counted,
            owned,
        ),
    )


def _statistics(x: Tensor, count: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel, and the number of values per channel, of all ranks: float64.

    `count` of the values per channel are this rank's to give.
    """
    every = comm.all_gather(_own_statistics(x, count), group, Tag.BATCH_NORM)
    total, mean, m2 = _merged(every)
    return mean, m2 / total, total


def _own_statistics(x: Tensor, count: int) -> Tensor:
    """[n, mean, M2] (1 + 2 channels,), float64; `count` of the values per channel are this rank's to give."""
    channels = x.shape[1]
    local = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if count:
        # The buffers only tell the kernel to accumulate half precision in float32.
        dtype = x.dtype if x.dtype == torch.float64 else torch.float32
        unused = torch.zeros(2, channels, dtype=dtype, device=x.device)
        mean, var = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
        local[0] = count
        local[1 : channels + 1] = mean
        local[channels + 1 :] = var * count
    return local


def _taken_apart(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """N (), mean and M2 (channels,) of [n, mean, M2]; with a dim for each of several, if they have one."""
    channels = statistics.shape[-1] // 2
    first = statistics[..., :1] if statistics.dim() > 1 else statistics[0]
    return first, statistics[..., 1 : channels + 1], statistics[..., channels + 1 :]


def _merged(every: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """N (), mean and M2 (channels,) of all, from [n, mean, M2] of each, (parts, 1 + 2 channels)."""
    counts, means, m2s = _taken_apart(every)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    return total, mean, m2


def _local_gradients(  # noqa: PLR0917 - as torch has them
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    *,
    needs_dx: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`w dy / sqrt(var + eps)` if it is needed, sum(dy xhat) and sum(dy), per channel: by the kernel that
    is meant for inference.
    """
    # None would do on CPUs alone: for saved statistics, and for a weight whose gradient is asked for.
    unsaved = mean.new_empty(0)
    factor = mean.new_ones(x.shape[1]) if weight is None and not x.is_cpu else weight
    return torch.ops.aten.native_batch_norm_backward(
        dy, x, factor, mean, var, unsaved, unsaved, False, eps, [needs_dx, True, True]
    )


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take positions only
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        total: Tensor,
        eps: float,
        group: dist.ProcessGroup,
        counted: bool,
        owned: tuple[slice, ...] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, total)
        ctx.eps, ctx.group = eps, group
        ctx.counted, ctx.shifted, ctx.owned = counted, bias is not None, owned
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, mean, var, total = ctx.saved_tensors
        if _misleads(x):
            x, dy = x.contiguous(), dy.contiguous()
        half = x.dtype in (torch.bfloat16, torch.float16)
        dx, dweight, dbias = _local_gradients(dy, x, weight, mean, var, ctx.eps, needs_dx=half)
        # Even where `x` needs no gradient: a net that takes another way on another rank may need one there.
        sums = torch.stack([dbias, dweight]).to(torch.float64)
        if not ctx.counted:  # a stand-in adds nothing, even where it gave NaN
            sums.zero_()
        comm.all_reduce(sums, ctx.group, Tag.BATCH_NORM)
        # The statistics do not depend on stand-ins, so those get no share of the correction.
        sums = sums * (-1.0 / total) if ctx.counted else torch.zeros_like(sums)
        scale = torch.rsqrt(var + ctx.eps)
        scale = scale if weight is None else scale * weight
        offset, slope = sums.to(mean.dtype) * scale
        correction = torch.batch_norm(x, slope, offset, mean, var, False, 0.0, ctx.eps, False)
        if ctx.owned is not None:
            # The sums are over all that was computed, overlaps included; the statistics depend on what
            # is owned, and so does their share of the gradient.
            theirs = torch.ones_like(correction, dtype=torch.bool)
            theirs[ctx.owned] = False
            correction = correction.masked_fill_(theirs, 0.0)
        # One pass less, but the factor would be rounded to half precision.
        per_channel = (1, -1, *(1,) * (x.dim() - 2))
        dx = dx.add_(correction) if half else correction.addcmul_(dy, scale.view(per_channel))
        own = (dx, None if weight is None else dweight, dbias if ctx.shifted else None)
        return (*own, *(None,) * 7)


# ---- Over tiles that one process computes by turns
#
# What turns deposit are n, mean and M2 of their own, what they are answered those of all; both take part in
# autograd. To normalise gives the answer's gradient, and a deposit's is that of the formula above:
#
#     dmean_r = n (dmean / N + 2 dM2 (mean_r - mean))        dM2_r = dM2


class _Merge:
    """The question what the statistics of all are; see `Question`."""

    def __init__(self) -> None:
        self.own = self.all = torch.empty(0)

    def meet(
        self, everyone: Sequence[_Merge], deposits: Sequence[Tensor], processes: Processes
    ) -> Sequence[Tensor]:
        """See `Question`."""
        own = torch.stack([deposit.detach() for deposit in deposits])
        every = own
        if processes.group is not None:
            every = comm.all_gather(own, processes.group, Tag.BATCH_NORM).flatten(0, 1)
        total, mean, m2 = _merged(every)
        found = torch.cat([total.reshape(1), mean, m2])
        for one, deposit in zip(everyone, own, strict=True):
            one.own, one.all = deposit, found
        return [found] * len(deposits)

    def back(
        self,
        everyone: Sequence[_Merge],
        grads: Sequence[Tensor],
        processes: Processes,
    ) -> Sequence[Tensor]:
        """See `Question`."""
        total = torch.stack([*grads]).sum(0)
        if processes.group is not None:
            comm.all_reduce(total, processes.group, Tag.BATCH_NORM)
        return [one.given_back(total) for one in everyone]

    def given_back(self, grad: Tensor) -> Tensor:
        """The gradient of what it deposited."""
        count, own, _ = _taken_apart(self.own)
        total, mean, _ = _taken_apart(self.all)
        _, dmean, dm2 = _taken_apart(grad)
        return torch.cat([
            torch.zeros_like(grad[:1]), count * (dmean / total + 2 * dm2 * (own - mean)), dm2
        ])  # fmt: skip


def _statistics_of_turns(x: Tensor, count: int, group: TurnGroup) -> tuple[Tensor, Tensor, Tensor]:
    """As `_statistics`, but differentiable."""
    found = group.ask(
        _Merge(), lambda: cast(Tensor, _Deposited.apply(x, count)), trains=x.requires_grad
    )
    total, mean, m2 = _taken_apart(found)
    return mean, m2 / total.detach(), total.detach()


class _Deposited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        found = _own_statistics(x, count)
        ctx.save_for_backward(x, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, found = ctx.saved_tensors
        count, mean, _ = _taken_apart(found)
        if not count:
            return torch.zeros_like(x), None
        dtype = x.dtype if x.dtype == torch.float64 else torch.float32
        _, dmean, dm2 = _taken_apart(grads[0])
        # (x - mean) 2 dM2 + dmean / n, in one pass
        offset, slope, mean = ((dmean / count).to(dtype), (2 * dm2).to(dtype), mean.to(dtype))
        one = torch.ones_like(mean)
        return torch.batch_norm(x, slope, offset, mean, one, False, 0.0, 0.0, False), None


class _Normalised(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps) * weight + bias`, with gradients for mean and variance too."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take positions only
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        counted: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.counted, ctx.shifted = eps, counted, bias is not None
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, mean, var = ctx.saved_tensors
        if _misleads(x):
            x, dy = x.contiguous(), dy.contiguous()
        dx, dweight, dbias = _local_gradients(dy, x, weight, mean, var, ctx.eps, needs_dx=True)
        inverse = torch.rsqrt(var + ctx.eps)
        scale = inverse if weight is None else inverse * weight
        own = (dx, None if weight is None else dweight, dbias if ctx.shifted else None)
        if not ctx.counted:  # a stand-in adds nothing, even where it gave NaN
            return (*own, torch.zeros_like(mean), torch.zeros_like(var), None, None)
        return (*own, -scale * dbias, -0.5 * scale * inverse * dweight, None, None)


def global_instance_norm(
    arguments: dict[str, Any], rows: int, total: int, group: dist.ProcessGroup
) -> Tensor:
    """`torch.nn.functional.instance_norm` whose running buffers average over the samples of all ranks.

    The normalisation itself never leaves a sample; only the buffers mix samples.
    """
    buffers = [arguments.get("running_mean"), arguments.get("running_var")]
    held = [buffer for buffer in buffers if buffer is not None]
    before = [buffer.clone() for buffer in held]
    others = {name: value for name, value in arguments.items() if name != "input"}
    instance_norm = functools.partial(torch.nn.functional.instance_norm, **others)
    result = laid_out(instance_norm, arguments["input"])
    for buffer, old in zip(held, before, strict=True):
        change = (buffer - old) * (rows / total) if rows else torch.zeros_like(old)
        buffer.data.copy_(old + comm.all_reduce(change, group, Tag.BATCH_NORM))
    return result


def uses_batch(node: Node) -> bool:
    """Whether a node is a batch norm that uses the statistics of its input."""
    if isinstance(node.function, AnyBatchNorm):
        module = node.function
        return module.training or (module.running_mean is None and module.running_var is None)
    return node.name == "batch_norm" and bool(
        node.bound(batch_norm_names(node)).get("training", False)
    )


def batch_norm_names(function: Any) -> tuple[str, ...]:
    """The parameters of `torch.batch_norm` or `F.batch_norm`, in order."""
    return _TORCH_BATCH_NORM if function is torch.batch_norm else _BATCH_NORM
