"""The measure of exact: how far two computations of one training step are apart.

Every error is relative, because "1e-5" says nothing about a gradient of size 1e-6. What it is relative to
depends on what the number means:

    loss, outputs         its own norm
    gradient              max(its norm, 1e-6 x the norm of all gradients together)
    updated weight        max(its norm, 1e-6 x the norm of all weights together)
    running mean          the norm of the roots of the running variances beside it
    any other buffer      its own norm
    integers, booleans    equal (error 0) or not (error infinity)

The floor of 1e-6 is for gradients that are zero in exact arithmetic, such as that of a convolution's bias
before a batch norm: what is left of them is rounding, which differs from itself by 100 %. An updated weight
that started at zero inherits such a gradient. A running mean may be near zero for data that are centred,
while its error stays that of the data: their spread is the scale.

Norms are 2-norms over the whole tensor, in float64. A tensor that is missing on one side, has another
shape, or holds NaN or infinity has an infinite error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FLOOR", "QUANTITIES", "StepResult", "Values", "errors", "not_finite"]

FLOOR = 1e-6
"""share of the norm of all gradients below which a single gradient counts as rounding"""

Values = Mapping[str, Tensor | None]
"""named tensors; None where the computation gave none, as for the gradient of an unused parameter"""


@dataclass(frozen=True)
class StepResult:
    """What one training step computed, of the whole batch."""

    loss: Values
    """one entry, a scalar"""
    outputs: Values
    """every tensor that the net returned, (N, ...)"""
    gradients: Values
    buffers: Values
    """after the step"""
    weights: Mapping[str, Tensor]
    """after the optimiser"""


QUANTITIES = ("loss", "outputs", "gradients", "buffers", "weights")


def errors(got: StepResult, truth: StepResult) -> dict[str, dict[str, float]]:
    """The error of every tensor: quantity -> name -> error, by the measure of this module.

    Numbers are compared in float64 on the device where `truth` lives.
    """
    found: dict[str, dict[str, float]] = {}
    for quantity in QUANTITIES:
        ours: Values = getattr(got, quantity)
        theirs: Values = getattr(truth, quantity)
        scales = _scales(quantity, theirs)
        names = [*theirs, *(name for name in ours if name not in theirs)]
        found[quantity] = {
            name: _error(ours.get(name), theirs.get(name), scales.get(name, 0.0)) for name in names
        }
    return found


def not_finite(values: StepResult) -> Iterator[str]:
    """The tensors that hold NaN or infinity, in words."""
    for quantity in QUANTITIES:
        for name, value in getattr(values, quantity).items():
            if value is not None and not bool(torch.isfinite(value).all()):
                yield f"{name} ({quantity})"


def _error(got: Tensor | None, truth: Tensor | None, scale: float) -> float:
    if got is None or truth is None:
        return 0.0 if got is truth else math.inf
    if got.shape != truth.shape:
        return math.inf
    if not (truth.is_floating_point() or truth.is_complex()):
        return 0.0 if torch.equal(got.to(truth), truth) else math.inf
    apart = _norm(got.to(truth.device, _wide(got)) - truth.to(_wide(truth)))
    if not math.isfinite(apart) or not math.isfinite(scale):
        return math.inf
    return apart / scale if scale > 0.0 else apart


def _scales(quantity: str, truth: Values) -> dict[str, float]:
    norms = {name: 0.0 if value is None else _norm(value) for name, value in truth.items()}
    if quantity in ("gradients", "weights"):
        floor = FLOOR * math.sqrt(math.fsum(norm * norm for norm in norms.values()))
        return {name: max(norm, floor) for name, norm in norms.items()}
    if quantity == "buffers":
        return {name: _spread(name, truth) or norm for name, norm in norms.items()}
    return norms


def _spread(name: str, buffers: Values) -> float:
    """What the error of a running mean is relative to; 0 for other buffers."""
    prefix, dot, last = name.rpartition(".")
    variance = buffers.get(f"{prefix}{dot}running_var") if last == "running_mean" else None
    return 0.0 if variance is None else _norm(variance.clamp(min=0).sqrt())


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.detach().to(_wide(value))))


def _wide(value: Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64
