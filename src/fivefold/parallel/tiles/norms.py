"""Batch norm in tiles: statistics of the pixels that ranks own, of all tiles and all replicas."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.norms import batch_norm_names, global_batch_norm, laid_out, uses_batch
from fivefold.parallel.program.rule import Local, Moment, Operation, Statistics, as_held, rule
from fivefold.parallel.program.spread import Spread
from fivefold.torch_private import AnyBatchNorm

__all__ = ["BatchNorm", "BatchNormModule", "owned_slices"]


def owned_slices(op: Operation) -> tuple[slice, ...] | None:
    """Where in this rank's part of the result lies what it owns; None if that is all of it."""
    spread, here = op.made[0], op.here
    owned, held = spread.owned(here.grid, here.rank), spread.held(here.grid, here.rank)
    if owned == held:
        return None
    return tuple(
        slice(start - offset, stop - offset)
        for (start, stop), (offset, _) in zip(owned, held, strict=True)
    )


def _tracked(  # noqa: PLR0917 - bound in the order of `Local`
    moment: Moment,
    x: Tensor,
    spread: Spread,
    slices: tuple[slice, ...] | None,
    batches: Tensor | None,
    again: bool,
    **options: Any,
) -> Tensor:
    """Normalise, and update running statistics, or note what is due to them: twice if `again`."""
    running_mean, running_var = options["running_mean"], options["running_var"]
    if not moment.updates and running_mean is not None:
        # Computed again: as before, so that as much is saved, but the statistics have been counted.
        copies = {"running_mean": running_mean.clone(), "running_var": running_var.clone()}
        return _normalised(moment, x, spread, slices, **{**options, **copies, "momentum": 0.0})
    if running_mean is None or (moment.note is None and not again):
        momentum = options["momentum"]
        if batches is not None:
            batches.add_(1)
            momentum = 1.0 / float(batches) if momentum is None else momentum
        return _normalised(moment, x, spread, slices, **{**options, "momentum": momentum or 0.0})
    own = {
        "running_mean": torch.zeros_like(running_mean),
        "running_var": torch.zeros_like(running_var),
    }
    y = _normalised(moment, x, spread, slices, **{**options, **own, "momentum": 1.0})
    due = Statistics(running_mean, running_var, batches, options["momentum"], *own.values())
    for _ in range(1 + again):
        due.apply() if moment.note is None else moment.note(due)
    return y


def _normalised(
    moment: Moment, x: Tensor, spread: Spread, slices: tuple[slice, ...] | None, **options: Any
) -> Tensor:
    if _alone(moment, spread, slices):
        return laid_out(functools.partial(F.batch_norm, training=True, **options), x)
    group = moment.statistics(spread.axes)
    samples = 0 in spread.cut_dims  # tiles-to-batch: what this rank has are its own samples
    return global_batch_norm(
        x, options["running_mean"], options["running_var"], options["weight"], options["bias"],
        momentum=options["momentum"], eps=options["eps"], group=group,
        counted=moment.rows > 0 and (not samples or x.shape[0] > 0), owned=slices,
    )  # fmt: skip


def _alone(moment: Moment, spread: Spread, slices: tuple[slice, ...] | None) -> bool:
    """Whether the statistics are those of what this rank holds."""
    whole = moment.rows > 0 and slices is None
    return whole and moment.statistics(spread.axes).size() == 1


class _Norm:
    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the input, its channels whole."""
        spread = op.given[0].tight()
        return [spread.with_cut(1, None) if len(spread.shape) > 1 else spread]

    def on_parts(self, op: Operation, run: Any, *, trains: bool) -> Local:
        """`run` on what ranks hold; `trains` if it uses the statistics of the batch."""
        joins = bool(op.made[0].axes)
        return Local(
            (as_held(op.made[0]), *op.whole(1)), run,
            collective="batch norm" if trains and joins else None,
            differs_apart=trains and not joins,  # replicas would join what all of them have
        )  # fmt: skip


@rule("batch_norm")
class BatchNorm(_Norm):
    """Statistics of the whole batch: of the pixels that ranks own, over all tiles and replicas."""

    def lower(self, op: Operation) -> Local:
        """Statistics over owned pixels, everything held normalised."""
        slices, spread = owned_slices(op), op.made[0]
        names = batch_norm_names(op.node.function)

        def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            args, kwargs = op.node.arguments(operands)
            a: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1}
            a |= {"eps": 1e-5, **dict(zip(names, args, strict=False)), **kwargs}
            a.pop("cudnn_enabled", None)
            x = a.pop("input")
            if not a.pop("training"):
                return laid_out(functools.partial(F.batch_norm, **a, training=False), x)
            return _tracked(moment, x, spread, slices, None, op.node.again, **a)

        return self.on_parts(op, run, trains=uses_batch(op.node))


@rule("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
class BatchNormModule(_Norm):
    """As `batch_norm`; it also counts its batches."""

    def lower(self, op: Operation) -> Local:
        """As torch's own forward, with the statistics of all tiles."""
        slices, spread = owned_slices(op), op.made[0]
        module: Any = op.node.function
        assert isinstance(module, AnyBatchNorm)

        def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            x = operands[0]
            if not uses_batch(op.node):  # even where the module tracks nothing any more
                return laid_out(module, x)
            keep = (
                module.training and module.track_running_stats and module.running_mean is not None
            )
            at_once = moment.updates and moment.note is None and not op.node.again
            if module.training and at_once and _alone(moment, spread, slices):
                return laid_out(module, x)
            return _tracked(
                moment, x, spread, slices, module.num_batches_tracked if keep else None, op.node.again,
                running_mean=module.running_mean if keep else None,
                running_var=module.running_var if keep else None,
                weight=module.weight, bias=module.bias, momentum=module.momentum, eps=module.eps,
            )  # fmt: skip

        return self.on_parts(op, run, trains=uses_batch(op.node))
