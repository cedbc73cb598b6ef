"""Torch's own losses, taken apart into a numerator and a denominator."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh.unread import pieces
from fivefold.torch_private import forward_hooks, gradient_hooks, legacy_reduction

__all__ = ["Loss", "split_loss"]

_ELEMENTWISE = (
    nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss,
    nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss,
    nn.MultiMarginLoss, nn.HingeEmbeddingLoss,
)  # fmt: skip
_WEIGHTED = (nn.CrossEntropyLoss, nn.NLLLoss)
_BY_SAMPLE = (
    nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss, nn.MultiMarginLoss, F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss, F.multi_margin_loss,
)  # fmt: skip
_FUNCTIONS: dict[Callable[..., Any], bool] = {
    F.l1_loss: False, F.mse_loss: False, F.smooth_l1_loss: False, F.huber_loss: False,
    F.binary_cross_entropy: False, F.binary_cross_entropy_with_logits: False, F.kl_div: False,
    F.poisson_nll_loss: False, F.soft_margin_loss: False, F.multilabel_margin_loss: False,
    F.multilabel_soft_margin_loss: False, F.multi_margin_loss: False, F.hinge_embedding_loss: False,
    F.cross_entropy: True, F.nll_loss: True,
}  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """A loss whose mean is over something countable.

    `each(outputs, targets)` is unreduced; `reduction` is torch's word for what follows. With `weighted`,
    targets that are class indices carry `weight` each and those equal to `ignore_index` count nothing.
    """

    each: Callable[[Any, Any], Tensor]
    reduction: str
    weighted: bool
    weight: Tensor | None = None
    ignore_index: int = -100
    pointwise: bool = True
    """whether every term looks at one element of outputs and targets"""
    scales: tuple[Tensor, ...] = ()
    """what terms are multiplied by, broadcast against the outputs"""

    def target_weight(self, targets: Any) -> Tensor | None:
        """Weight of this rank's targets (float64 scalar), or None if shapes alone tell the denominator."""
        indices = isinstance(targets, Tensor) and not targets.is_floating_point()
        if self.reduction != "mean" or not self.weighted or not indices:
            return None
        return torch.stack([self._weight_of(piece) for piece in pieces(targets)]).sum()

    def _weight_of(self, targets: Tensor) -> Tensor:
        counted = targets != self.ignore_index
        if self.weight is None:
            return counted.sum(dtype=torch.float64)
        weight = self.weight.to(device=targets.device, dtype=torch.float64)
        return weight[targets[counted]].sum()

    def share(
        self,
        outputs: Any,
        targets: Any,
        target_weight: Tensor | None,
        rows: int,
        total: int,
        *,
        per_sample: int | None = None,
        whole: bool = False,
    ) -> Tensor:
        """This rank's share, differentiable. `target_weight` is the sum over all ranks, if there is one;
        `rows` of the `total` samples are here, with `per_sample` terms each if some of them are elsewhere.
        With `whole`, everything is here.
        """
        if self.pointwise and not whole:
            self._check_apart(outputs, targets)
        each = self.each(outputs, targets)
        numerator = each.sum()
        if self.reduction == "sum":
            return numerator
        if target_weight is not None:
            return numerator / target_weight.to(numerator.dtype)
        if self.reduction == "batchmean":
            return numerator / total
        if not each.dim() or each.shape[0] != rows:
            raise UsageError(
                f"the loss has shape {tuple(each.shape)} before its mean, but its leading dim should be "
                f"the {rows} samples of this rank: outputs and targets must keep samples on dim 0"
            )
        terms = each.shape[1:].numel() if per_sample is None else per_sample
        return numerator / (terms * total)

    def _check_apart(self, outputs: Any, targets: Any) -> None:
        """Refuse what torch broadcasts such that samples meet, or that has numbers for other ranks' terms."""
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return
        shape, other = tuple(outputs.shape), tuple(targets.shape)
        if shape[:1] != other[:1]:
            raise UsageError(
                f"outputs of shape {shape} and targets of shape {other} have other leading dims: outputs and "
                "targets must keep samples on dim 0"
            )
        if outputs.dim() != targets.dim():
            raise UsageError(
                f"the loss broadcasts outputs of shape {shape} against targets of shape {other}, by which "
                "every sample may meet every other: give both the same shape, by outputs.squeeze(1) or "
                "targets.unsqueeze(1), say"
            )
        for scale in self.scales:
            aligned = scale.shape[-len(shape) :]
            here = shape[len(shape) - len(aligned) :]
            if scale.dim() >= len(shape) and aligned[0] != 1:
                raise UsageError(
                    f"the loss has a weight of shape {tuple(scale.shape)}, one for every sample, which "
                    "cannot be divided as samples are: weigh within a loss of your own, with "
                    "share(outputs, targets) -> (numerator, denominator), whose targets carry the weights"
                )
            if any(a not in {1, b} for a, b in zip(aligned, here, strict=True)):
                raise UsageError(
                    f"the loss has a weight of shape {tuple(scale.shape)}, one for every pixel, which cannot "
                    f"be cut as outputs are, {shape} here: weigh within a loss of your own, whose targets "
                    "carry the weights"
                )


def split_loss(loss: Callable[..., Any]) -> Loss | None:
    """Take a loss of torch's apart; None if it is another callable.

    Raises `UsageError` for `reduction="none"`, which leaves no scalar to differentiate.
    """
    if (type(loss) in _WEIGHTED or type(loss) in _ELEMENTWISE) and not _altered(loss):
        return _from_module(cast(nn.Module, loss))
    function, options = loss, {}
    while isinstance(function, functools.partial) and not function.args:
        function, options = function.func, {**function.keywords, **options}
    if function in _FUNCTIONS:
        old = [options.pop(word, None) for word in ("size_average", "reduce")]
        if old != [None, None]:  # overrule the new word
            options["reduction"] = legacy_reduction(*old)
        reduction = options.get("reduction", "mean")
        _check_reduction(reduction)
        return Loss(
            each=functools.partial(function, **{**options, "reduction": "none"}),
            reduction=reduction,
            weighted=_FUNCTIONS[function],
            weight=options.get("weight"),
            ignore_index=options.get("ignore_index", -100),
            pointwise=not _FUNCTIONS[function] and function not in _BY_SAMPLE,
            scales=_scales(options),
        )
    return None


def _altered(loss: Any) -> bool:
    """Whether hooks, or a method of its own, make a module compute something else than its class."""
    hooks = (*forward_hooks(loss), gradient_hooks(loss))
    return any(hooks) or not {"forward", "__call__"}.isdisjoint(vars(loss))


def _from_module(loss: Any) -> Loss:
    _check_reduction(loss.reduction)
    unreduced = copy.copy(loss)  # shares weights; only the word changes
    unreduced.reduction = "none"
    weighted = type(loss) in _WEIGHTED
    return Loss(
        each=unreduced,
        reduction=loss.reduction,
        weighted=weighted,
        weight=loss.weight if weighted else None,
        ignore_index=loss.ignore_index if weighted else -100,
        pointwise=not weighted and type(loss) not in _BY_SAMPLE,
        scales=_scales(dict(loss.named_buffers())),
    )


def _scales(options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    found = (options.get(name) for name in ("weight", "pos_weight"))
    return tuple(each for each in found if isinstance(each, Tensor))


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "batchmean"):
        raise UsageError(
            f"a loss with reduction={reduction!r} gives no single number to differentiate: "
            "use reduction='mean' or 'sum'"
        )
