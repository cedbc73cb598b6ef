"""Validation over the whole mesh: sums, not averages, cross the ranks, so the result is exact.

In tiles a rank has outputs for a window of each image, or for some samples where tiles were turned into
samples. Outputs that are not cut, such as logits of classes, are alike on all tiles: they count as often as
there are tiles, which may differ between batches, so every batch is scaled to the number of its targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
    *,
    between: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Mean loss and metric of a task, of a classifier by default, over one epoch of `test`. Collective.

    `between` is called after every batch.
    """
    model.eval()
    batches: list[Tensor] = []
    wanted: list[int] = []
    # The inner recorder keeps these forward passes out of the time of training.
    with span(Phase.VALIDATE), recording():
        for images, targets in test:
            with arithmetic.autocast():
                outputs = model(arithmetic.images(images))
            part = part_of(targets)
            assert part is not None, "the loader notes on every tensor which part it is"
            wanted.append(math.prod(part.shape))
            whole = model.whole(targets)
            batches.append(task.sums(outputs, _seen(whole, outputs, part.origin[0])))
            if between is not None:
                between()
        sums = torch.stack(batches)
        comm.all_reduce(sums, mesh.group(*_AXES), Tag.LOSS)
    scale = torch.tensor(wanted, dtype=torch.float64) / sums[:, 2].cpu()
    loss, scored, count = (sums.cpu() * scale[:, None]).sum(0).tolist()
    return loss / count, task.score(scored / count)


def _seen(targets: Tensor, outputs: Tensor, first: int) -> Tensor:
    """The samples, from number `first` on, and pixels of `targets` that `outputs` are for.

    Dims are counted from the last.
    """
    part = part_of(outputs)
    if part is None:
        return targets
    if len(targets) > len(outputs):
        targets = targets.narrow(0, part.origin[0] - first, len(outputs))
    for dim in range(-1, 1 - outputs.dim(), -1):
        if targets.shape[dim] == part.shape[dim]:
            targets = targets.narrow(dim, part.origin[dim], outputs.shape[dim])
    return targets
