"""Validation over the whole mesh: counts, not averages, cross the ranks, so the result is exact."""

from __future__ import annotations

import torch

from fivefold import comm
from fivefold.data import Loader
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel
from fivefold.trace import Phase, Tag, recording, span
from fivefold.train.precision import Arithmetic
from fivefold.train.task import CLASSES, Task

__all__ = ["validate"]


@torch.no_grad()
def validate(
    model: ParallelModel,
    test: Loader,
    mesh: Mesh,
    arithmetic: Arithmetic,
    task: Task = CLASSES,
) -> tuple[float, float]:
    """Mean loss and metric of a task, of a classifier by default, over one epoch of `test`. Collective."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    # The inner recorder keeps these forward passes out of the time of training.
    with span(Phase.VALIDATE), recording():
        for images, targets in test:
            with arithmetic.autocast():
                outputs = model(arithmetic.images(images))
            sums += task.sums(outputs, targets)
        comm.all_reduce(sums, mesh.group("data"), Tag.LOSS)
    loss, scored, count = sums.tolist()
    return loss / count, task.score(scored / count)
