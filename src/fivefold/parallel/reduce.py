"""Completing gradients: the one interface behind which they are summed over ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.parallel.buckets import Bucket, packed, put_back, set_aside
from fivefold.torch_private import accumulate_hooks, after_backward
from fivefold.trace import Tag

__all__ = ["Alone", "Bucketed", "Reducer", "reducer_for", "without_effect"]


class Reducer(Protocol):
    """Sees to it that after `backward` every `.grad` is complete on every rank."""

    def begin(self) -> None:
        """Get ready for a forward pass of the net. Collective."""
        ...

    def forward(self, run: Callable[[], Any], *, step: bool) -> Any:
        """What `run` returns, a forward pass of the net: of a step, which `backward` ends, or of its own."""
        ...

    def backward(
        self, share: Tensor, scaled: Callable[[Tensor], Tensor], *, counted: bool = True
    ) -> Tensor:
        """Differentiate `scaled` of the sum of all ranks' shares; returns that sum, detached.

        Unless `counted`, the share is a stand-in's: it adds nothing, even where it gave NaN.
        """
        ...

    def rest(self) -> None:
        """Leave parameters as they are between steps. Not collective."""
        ...


class Alone:
    """One replica: its gradients are complete as they are."""

    def begin(self) -> None:
        """Nothing to do."""

    def forward(self, run: Callable[[], Any], *, step: bool) -> Any:  # noqa: ARG002 - both alike
        """What `run` returns."""
        return run()

    def backward(
        self,
        share: Tensor,
        scaled: Callable[[Tensor], Tensor],
        *,
        counted: bool = True,  # noqa: ARG002 - one replica has samples
    ) -> Tensor:
        """Differentiate `scaled` of the share, which is the sum."""
        scaled(share).backward()
        return share.detach().reshape(())

    def rest(self) -> None:
        """Nothing to do."""


class Bucketed:
    """Sums bucket by bucket while backward still runs; see `buckets`.

    Replicas are made equal to the first one at the start. `share_buffers`: send the first replica's buffers
    to the others before every forward pass, for buffers that would else drift apart.
    """

    def __init__(self, net: nn.Module, group: dist.ProcessGroup, share_buffers: bool) -> None:
        self._net, self._group, self._share_buffers = net, group, share_buffers
        own: weakref.ref[Bucketed] = weakref.ref(self)
        self._hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(functools.partial(_unused, own))
            for p in net.parameters()
            if p.requires_grad
        ]
        self._trained: list[nn.Parameter] = []
        self.buckets: list[Bucket] = []
        self._next = 0
        """number of the bucket to be sent next: all ranks send in this order"""
        self._steps = self._bare = False
        """whether a step's backward runs, or one outside of steps, whose gradients are averaged"""
        self._counted = True
        self._tell([*net.parameters(), *net.buffers()])

    def begin(self) -> None:
        """Take note of what is trained now, and share buffers."""
        self._follow()
        if self._share_buffers and torch.is_grad_enabled():
            self._tell(list(self._net.buffers()))

    def forward(self, run: Callable[[], Any], *, step: bool) -> Any:  # noqa: ARG002 - both alike
        """What `run` returns."""
        returned = run()
        if torch.is_grad_enabled():  # the forward may have thawed or made parameters
            self._follow()
        return returned

    def rest(self) -> None:
        """Nothing to do."""

    def backward(
        self, share: Tensor, scaled: Callable[[Tensor], Tensor], *, counted: bool = True
    ) -> Tensor:
        """Differentiate `scaled` of the share; the sum of shares travels with the last bucket."""
        value = share.detach() if counted else torch.zeros_like(share)
        last = self.buckets[-1].loss if self.buckets else value.new_empty(0)  # all may be frozen
        travels = last.numel() > 0 and (last.dtype, last.device) == (value.dtype, value.device)
        last.copy_(value) if travels else last.zero_()
        before = set_aside(self._trained)
        self._steps, self._counted = True, counted
        try:
            with without_effect(() if counted else self._trained):
                scaled(share).backward()
            self._finish()
        finally:
            self._steps = False
            put_back(self._trained, before)
        if travels:
            return last[0].clone()
        return comm.all_reduce(value.reshape(()).clone(), self._group, Tag.LOSS)

    @torch.no_grad()
    def _tell(self, tensors: Sequence[Tensor]) -> None:
        comm.broadcast_all(tensors, self._group, Tag.GRADIENTS)

    def _follow(self) -> None:
        """Pack buckets anew when parameters were frozen or thawed."""
        trained = [p for p in self._net.parameters() if p.requires_grad]
        if len(trained) == len(self._trained) and all(map(_same, trained, self._trained)):
            return
        for hook in self._hooks:
            hook.remove()
        self._trained, self.buckets = trained, packed(trained, self._group)
        # Weakly: no collector of garbage sees the hooks that autograd keeps, and the group would stay alive.
        own: weakref.ref[Bucketed] = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                functools.partial(_arrived, own, which, number)
            )
            for which, bucket in enumerate(self.buckets)
            for number, parameter in enumerate(bucket.parameters)
        ]

    def arrived(self, bucket: Bucket, number: int) -> None:
        """Take note of a gradient: parameter `number` of a bucket has its own."""
        if number not in bucket.missing:
            raise UsageError(
                "a parameter got its gradient twice in one backward pass: it is used in several parts that "
                "are checkpointed with use_reentrant=True; use_reentrant=False works"
            )
        if not (self._steps or self._bare):  # a bare loss.backward(), outside `step`
            self._bare = True
            after_backward(self._finish_bare)
        bucket.missing.remove(number)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.launch(self._group, average=self._bare, counted=self._counted or self._bare)

    def _finish(self) -> None:
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        for bucket in self.buckets:
            bucket.finish(keep=self._bare)
        self._next = 0

    def _finish_bare(self) -> None:
        self._finish()
        self._bare = False


def _unused(reducer: weakref.ref[Bucketed], parameter: Tensor) -> None:
    """Refuse the gradient of a net whose model was not called; not that of another model which was."""
    hooks = accumulate_hooks(parameter).values()
    if reducer() is None or any(getattr(hook, "func", None) is _arrived for hook in hooks):
        return
    raise UsageError(
        "the net that parallelize was given got gradients, and the model that it returned was not called: "
        "they would be those of this rank's samples alone. Call the model, model.step(x, y) or "
        "loss_fn(model(x), y).backward(); train the net alone before parallelize"
    )


def _arrived(reducer: weakref.ref[Bucketed], bucket: int, number: int, _parameter: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.arrived(alive.buckets[bucket], number)


def reducer_for(net: nn.Module, group: dist.ProcessGroup, share_buffers: bool) -> Reducer:
    """The reducer for a net whose replicas are the ranks of `group`; see `Bucketed`."""
    return Alone() if group.size() == 1 else Bucketed(net, group, share_buffers)


@contextmanager
def without_effect(parameters: Iterable[Tensor]) -> Generator[None]:
    """In the block, gradients of the parameters are zero, even where what is computed gives NaN."""
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other
