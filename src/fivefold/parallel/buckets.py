"""Gradients summed over ranks bucket by bucket, while backward still runs.

    backward  ── conv20 ── conv19 ── ... ── conv9 ──┬── conv8 ── ... ── conv1 ──┐
    bucket 0  full: all_reduce ─────────────────────┼──────── done              │
    bucket 1                                        └ full: all_reduce ─────────┴─ wait, copy back

A bucket is one flat tensor: the gradients of its parameters, a flag per parameter that says whether any
rank used it, and in the last bucket the loss. Flags and loss thus cost no message of their own, and
parameters that the loss does not use need no look at the autograd graph: their gradients stay None, as in
one process.

What earlier steps have left in `.grad` is set aside in the meantime: all ranks hold it alike, and it must not
be added twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold import comm
from fivefold.torch_private import foreach_copy
from fivefold.trace import Tag

__all__ = ["Bucket", "packed", "put_back", "set_aside"]

FIRST_BYTES = 1 << 20
"""The first bucket is small, so that communication begins early"""
OTHER_BYTES = 25 << 20


@dataclass
class Bucket:
    """Parameters of one dtype and device whose gradients travel together."""

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None = None
    """whose ranks sum it, if that is known: the bucket then lies where they see it"""
    flat: Tensor = field(init=False)
    missing: set[int] = field(init=False)
    """numbers of the parameters whose gradient has not come in this step"""
    pending: comm.Pending | None = None

    def __post_init__(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0].detach()
        self.flat = comm.shared_zeros(sum(sizes) + len(sizes) + 1, first, self.group)
        *parts, self._used, self.loss = self.flat.split([*sizes, len(sizes), 1])
        self._views = [_like(part, p) for part, p in zip(parts, self.parameters, strict=True)]
        self.missing = set(range(len(sizes)))

    @torch.no_grad()
    def launch(
        self, group: dist.ProcessGroup, *, average: bool = False, counted: bool = True
    ) -> None:
        """Send what has come. Parameters that are still missing count as unused on this rank, and all of them
        do unless what it computed is `counted`.
        """
        grads = [parameter.grad for parameter in self.parameters]
        dense = [g for g in grads if g is not None and not g.is_sparse]
        if len(dense) == len(grads):
            foreach_copy(self._views, dense)
        else:
            for view, grad in zip(self._views, grads, strict=True):
                view.zero_() if grad is None else view.copy_(
                    grad.to_dense() if grad.is_sparse else grad
                )
        self.missing = self.missing if counted else set(range(len(self.parameters)))
        self._used.fill_(1)
        for number in self.missing:
            self._used[number] = 0
        if average:
            self.flat.div_(group.size())
        sent = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat
        self.pending = comm.start_all_reduce(sent, group, Tag.GRADIENTS)

    @torch.no_grad()
    def finish(self, *, keep: bool = False) -> None:
        """Wait for the sums and write them to the parameters that any rank used.

        Others are left without a gradient, unless they `keep` what they have.
        """
        assert self.pending is not None
        self.pending.wait()
        self.pending = None
        grads = [parameter.grad for parameter in self.parameters]
        dense = [g for g in grads if g is not None and not g.is_sparse]
        if not self.missing and len(dense) == len(grads):
            foreach_copy(dense, self._views)
        else:
            for parameter, view, used in zip(
                self.parameters, self._views, self._used.tolist(), strict=True
            ):
                if used or (keep and parameter.grad is not None):
                    _put(parameter, view)
                elif not keep:
                    parameter.grad = None
        self.missing = set(range(len(self.parameters)))


def set_aside(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The gradients that parameters have; they are left without."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return before


@torch.no_grad()
def put_back(parameters: Sequence[nn.Parameter], before: Sequence[Tensor | None]) -> None:
    """Add what was set aside to the gradients that parameters have now."""
    for parameter, old in zip(parameters, before, strict=True):
        new = parameter.grad
        if old is None:
            continue
        if new is None:
            parameter.grad = old
        else:
            parameter.grad = old + new if old.is_sparse else old.add_(new)


def packed(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
) -> list[Bucket]:
    """Buckets in the order in which gradients come: the last layers first."""
    groups: list[list[nn.Parameter]] = []
    room_bytes = 0
    for parameter in reversed(parameters):
        like = groups and (groups[-1][0].dtype, groups[-1][0].device)
        if like != (parameter.dtype, parameter.device) or room_bytes <= 0:
            room_bytes = OTHER_BYTES if groups else FIRST_BYTES
            groups.append([])
        groups[-1].append(parameter)
        room_bytes -= parameter.numel() * parameter.element_size()
    return [Bucket(members, group) for members in groups]


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """The piece of a flat tensor in the shape, and where it is dense the memory order, of a parameter."""
    if parameter.is_contiguous() or not _dense(parameter):
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride())


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size if size != 1 else 1
    return True


def _put(parameter: nn.Parameter, view: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = view.clone()
    elif parameter.grad.is_sparse:
        parameter.grad = view.to_sparse(parameter.grad.sparse_dim())
    else:
        parameter.grad.copy_(view)
