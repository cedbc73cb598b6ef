"""Gradients of a stage, summed over the ranks that hold it: replicas, tiles, and the opposite chain.

A stage's buckets leave while its last micro-batch goes backward, as soon as they are full, and travel while
other stages compute. What earlier steps have left in `.grad` is set aside meanwhile: the ranks of a pair hold
it alike, and it must not be added twice.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.parallel.buckets import Bucket, packed, put_back, set_aside

__all__ = ["StageGradients", "scaled"]


class StageGradients:
    """The parameters of one stage on this rank, as they are now; `group` holds all ranks that have them."""

    def __init__(
        self, parameters: Callable[[], Sequence[nn.Parameter]], group: dist.ProcessGroup
    ) -> None:
        self._parameters, self._group = parameters, group
        self._trained: list[nn.Parameter] = []
        self.buckets: list[Bucket] = []
        """in which they travel, once a step has begun"""
        self._hooks: list[Any] = []
        self._before: list[Tensor | None] = []
        self._next = 0
        """number of the bucket to be sent next: all ranks send in this order"""
        self._complete = self._last = False

    def begin(self) -> None:
        """Start a step: set aside what earlier ones left."""
        trained = [p for p in self._parameters() if p.requires_grad]
        if [id(p) for p in trained] != [id(p) for p in self._trained]:
            self._follow(trained)
        self._before = set_aside(trained)
        self._next, self._complete = 0, False

    @contextmanager
    def last(self) -> Generator[None]:
        """In the block gradients are added for the last time: buckets leave as soon as they are full."""
        self._last = True
        try:
            yield
        finally:
            self._last = False

    def launch(self) -> None:
        """Send what has not left yet; every rank of the group does so for its stages in the same order."""
        self._complete = True
        for bucket in self.buckets[self._next :]:
            bucket.missing = {n for n, p in enumerate(bucket.parameters) if p.grad is None}
            bucket.launch(self._group)
        self._next = len(self.buckets)

    @torch.no_grad()
    def finish(self, scale: Tensor | None = None) -> None:
        """Wait for the sums, scale them, and add what was set aside."""
        assert self._complete, "the schedule has a sum for every stage"
        for bucket in self.buckets:
            bucket.finish()
        scaled(self._trained, scale)
        put_back(self._trained, self._before)
        self._before = []

    def _follow(self, trained: list[nn.Parameter]) -> None:
        """Pack buckets anew when parameters were frozen, thawed or assigned."""
        for hook in self._hooks:
            hook.remove()
        alone = self._group.size() == 1 or not trained
        self._trained, self.buckets = trained, [] if alone else packed(trained, self._group)
        # Weakly, without the bucket: no collector of garbage sees the hooks that autograd keeps, and the
        # parameters and the group would stay alive.
        own: weakref.ref[StageGradients] = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                functools.partial(_arrived, own, which, number)
            )
            for which, bucket in enumerate(self.buckets)
            for number, parameter in enumerate(bucket.parameters)
        ]

    def arrived(self, bucket: Bucket, number: int) -> None:
        """Take note of a gradient: parameter `number` of a bucket has its own."""
        if not self._last:
            return
        bucket.missing.discard(number)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.buckets[self._next].launch(self._group, average=False)
            self._next += 1


@torch.no_grad()
def scaled(parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
    """Multiply the gradients by a number, if there is one."""
    if scale is not None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)


def _arrived(
    stage: weakref.ref[StageGradients], bucket: int, number: int, _parameter: Tensor
) -> None:
    alive = stage()
    if alive is not None:
        alive.arrived(alive.buckets[bucket], number)
