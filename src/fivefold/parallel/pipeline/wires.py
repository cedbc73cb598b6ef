"""Tensors that travel from stage to stage, one message for everything that crosses a bound.

Every chain has a group for activations and one for their gradients, so that messages between two ranks are
matched by their order, which `check` has proven for the schedule. Shapes are known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import comm
from fivefold.parallel.pipeline.stages import Crossing
from fivefold.trace import Tag

__all__ = ["Arriving", "Wire"]


@dataclass
class Arriving:
    """A message that is expected."""

    values: Sequence[Crossing]
    messages: comm.Messages
    peer: int
    channels_last: bool
    gaps: bool = False

    def wait(self) -> list[Tensor]:
        """Block until it is here; what it brought, in the order of `values`."""
        return [tensor for tensor in self.with_gaps() if tensor is not None]

    def with_gaps(self) -> list[Tensor | None]:
        """The same, with None where that was sent."""
        flat, at = self.messages.wait()[self.peer], 0
        found: list[Tensor] = []
        for value in _packed(self.values):
            size = _bytes(value)
            part = flat[at : at + size].view(value.dtype)
            found.append(_unrolled(part, value.shape, self.channels_last))
            at += size
        by_index = dict(zip((v.index for v in _packed(self.values)), found, strict=True))
        tensors = [by_index[value.index] for value in self.values]
        there = flat[at:].tolist() if self.gaps else [1] * len(tensors)
        return [t if is_there else None for t, is_there in zip(tensors, there, strict=True)]


@dataclass
class Wire:
    """Messages of one chain in one direction; `group` holds the ranks of the pipe axis."""

    group: dist.ProcessGroup
    device: torch.device
    channels_last: bool

    def send(
        self,
        values: Sequence[Crossing],
        tensors: Sequence[Tensor | None],
        peer: int,
        *,
        gaps: bool = False,
    ) -> comm.Messages:
        """Begin to send one tensor for each of `values`. None is sent as zeros, unless there may be `gaps`:
        then it is None that arrives.
        """
        by_index = {value.index: t for value, t in zip(values, tensors, strict=True)}
        rolled: list[Tensor] = []
        for value in _packed(values):
            own = by_index[value.index]
            if own is None:
                own = torch.zeros(value.shape, dtype=value.dtype, device=self.device)
            tensor = own.detach()
            assert tuple(tensor.shape) == value.shape, (value, tensor.shape)
            rolled.append(_rolled(tensor.to(value.dtype), self.channels_last).view(torch.uint8))
        if gaps:
            there = [t is not None for t in tensors]
            rolled.append(torch.tensor(there, dtype=torch.uint8, device=self.device))
        flat = rolled[0] if len(rolled) == 1 else torch.cat(rolled)
        return comm.start_messages({peer: flat}, {}, self.group, Tag.PIPELINE)

    def expect(self, values: Sequence[Crossing], peer: int, *, gaps: bool = False) -> Arriving:
        """Begin to receive one tensor for each of `values`."""
        size = sum(map(_bytes, values)) + gaps * len(values)
        flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        messages = comm.start_messages({}, {peer: flat}, self.group, Tag.PIPELINE)
        return Arriving(values, messages, peer, self.channels_last, gaps)


def _packed(values: Sequence[Crossing]) -> list[Crossing]:
    """The order in a message: large elements first, so that all of them are aligned."""
    return sorted(values, key=lambda value: -value.dtype.itemsize)


def _bytes(value: Crossing) -> int:
    return torch.Size(value.shape).numel() * value.dtype.itemsize


def _rolled(tensor: Tensor, channels_last: bool) -> Tensor:
    """The numbers of a tensor in a row, in the order in which they lie in memory."""
    if channels_last and tensor.dim() in (4, 5):
        tensor = tensor.movedim(1, -1)
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    # One number may lie with any stride, which cannot be viewed as bytes.
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def _unrolled(part: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    if channels_last and len(shape) in (4, 5):
        n, channels, *pixels = shape
        return part.view(n, *pixels, channels).movedim(-1, 1)
    return part.view(shape)
