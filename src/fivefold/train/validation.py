"""Validation over the whole mesh: sums, not averages, cross the ranks, so the result is exact.

In tiles a rank has outputs for a window of each image. Outputs that are not cut, such as logits of classes,
are alike on all tiles: they count as often as there are tiles, and so does the number they are divided by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold import comm
from fivefold.data import Loader
from fivefold.mesh import Mesh, part_of
from fivefold.parallel import ParallelModel
from fivefold.trace import Phase, Tag, recording, span
from fivefold.train.precision import Arithmetic
from fivefold.train.task import CLASSES, Task

__all__ = ["validate"]

_AXES = ("data", "depth", "height", "width")


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
            sums += task.sums(outputs, _seen(targets, outputs))
        comm.all_reduce(sums, mesh.group(*_AXES), Tag.LOSS)
    loss, scored, count = sums.tolist()
    return loss / count, task.score(scored / count)


def _seen(targets: Tensor, outputs: Tensor) -> Tensor:
    """The pixels of `targets` that `outputs` are for; dims are counted from the last."""
    part = part_of(outputs)
    if part is None:
        return targets
    for dim in range(-1, 1 - outputs.dim(), -1):
        if targets.shape[dim] == part.shape[dim]:
            targets = targets.narrow(dim, part.origin[dim], outputs.shape[dim])
    return targets
