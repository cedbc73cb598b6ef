"""Validation over the whole mesh: counts, not averages, cross the ranks, so the result is exact."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fivefold import comm
from fivefold.data import Loader
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel
from fivefold.trace import Phase, Tag, recording, span
from fivefold.train.precision import Arithmetic

__all__ = ["validate"]


@torch.no_grad()
def validate(
    model: ParallelModel, test: Loader, mesh: Mesh, arithmetic: Arithmetic
) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of a classifier over one epoch of `test`. Collective."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # loss, correct, samples
    # The inner recorder keeps these forward passes out of the time of training.
    with span(Phase.VALIDATE), recording():
        for images, labels in test:
            with arithmetic.autocast():
                logits = model(arithmetic.images(images))
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            correct = (logits.argmax(1) == labels).sum()
            sums += torch.stack([loss.double(), correct.double(), correct.new_tensor(len(labels))])
        comm.all_reduce(sums, mesh.group("data"), Tag.LOSS)
    loss_sum, correct_sum, samples = sums.tolist()
    return loss_sum / samples, correct_sum / samples
