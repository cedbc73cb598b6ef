"""Gradients of a stage, summed over the ranks that hold it: replicas, tiles, and the opposite chain.

A stage's buckets leave when its last micro-batch is done, and travel while other stages compute. What
earlier steps have left in `.grad` is set aside meanwhile: the ranks of a pair hold it alike, and it must not
be added twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.parallel.buckets import Bucket, packed

__all__ = ["StageGradients"]


class StageGradients:
    """The parameters of one stage on this rank; `group` holds all ranks that have them."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = list(parameters), group
        self._trained: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._before: list[Tensor | None] = []
        self._launched = False

    def begin(self) -> None:
        """Start a step: set aside what earlier ones left."""
        trained = [p for p in self._parameters if p.requires_grad]
        if [id(p) for p in trained] != [id(p) for p in self._trained]:
            self._trained, self._buckets = trained, packed(trained) if trained else []
        self._before = [p.grad for p in trained]
        for parameter in trained:
            parameter.grad = None
        self._launched = False

    def launch(self) -> None:
        """Start to sum; every rank of the group does so for its stages in the same order."""
        self._launched = True
        if self._group.size() == 1:
            return
        for bucket in self._buckets:
            bucket.missing = {n for n, p in enumerate(bucket.parameters) if p.grad is None}
            bucket.launch(self._group, average=False)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums, and add what was set aside."""
        assert self._launched, "the schedule has a sum for every stage"
        if self._group.size() > 1:
            for bucket in self._buckets:
                bucket.finish()
        for parameter, before in zip(self._trained, self._before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before = []
