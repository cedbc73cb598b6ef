"""What a model is trained for: the loss, and the figure by which people judge it.

A figure is computed from sums over the test data, which add up over batches and ranks, so it is exact
however the data are shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CLASSES", "PICTURES", "Task"]


@dataclass(frozen=True)
class Task:
    """A loss and a metric."""

    metric: Literal["accuracy", "psnr_db"]
    """the field of `EpochReport` that it is reported in"""
    loss: Callable[[], nn.Module]
    sums: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) to three sums, float64: of the loss, of what is scored, and how many these are"""
    score: Callable[[float], float]
    """the mean of what is scored to the metric"""

    def figures(self, sums: Sequence[float]) -> dict[str, float]:
        """The sums over all test data to the mean loss, `test_loss`, and the metric."""
        loss, scored, count = sums
        return {"test_loss": loss / count, self.metric: self.score(scored / count)}


def _classes(logits: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    correct = (logits.argmax(1) == labels).sum()
    return torch.stack([loss.double(), correct.double(), correct.new_tensor(labels.numel())])


def _pictures(outputs: Tensor, targets: Tensor) -> Tensor:
    error = outputs.double() - targets.double()
    return torch.stack([error.abs().sum(), error.square().sum(), error.new_tensor(error.numel())])


def _psnr_db(mean_square: float) -> float:
    """Peak signal to noise, of pictures whose values span 1."""
    return -10 * math.log10(mean_square) if mean_square else math.inf


CLASSES = Task("accuracy", nn.CrossEntropyLoss, _classes, score=float)
"""logits and class indices: cross-entropy, and the share of correct ones"""
PICTURES = Task("psnr_db", nn.L1Loss, _pictures, score=_psnr_db)
"""pictures whose values span 1: mean absolute error, and the peak signal-to-noise ratio of all pixels"""
