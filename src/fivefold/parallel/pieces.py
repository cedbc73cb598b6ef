"""Large parameters of which each rank updates a piece, where an optimiser treats elements one by one.

    parameter     ─────────────────────────────   as all ranks see it, flat
    of rank 0     ──────────────                  what its optimiser finds instead, with that part of the
    of rank 1                   ───────────────   gradient and of the state

What is kept for a parameter as a whole, such as a count of steps, each rank has for its piece; that of the
first rank is shared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BY_ELEMENT", "LEAST_BYTES", "Piece", "flat"]

BY_ELEMENT = frozenset({
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
})  # fmt: skip
"""optimisers of torch whose update of an element needs no other elements"""
LEAST_BYTES = 1 << 20
"""of a parameter that is worth it"""
UNIT = 1024
"""elements: no vector that torch computes with at a time is torn apart, so that results are the same bits"""


class Piece:
    """What a rank updates of a parameter; `shared` is that parameter in the memory of all."""

    def __init__(self, parameter: nn.Parameter, shared: Tensor, rank: int, ranks: int) -> None:
        count = parameter.numel()
        units = -(-count // UNIT)
        # Rounded up, so that the first rank always has something.
        begin, end = (min(count, -(-r * units // ranks) * UNIT) for r in (rank, rank + 1))
        self._whole, self._span = parameter, slice(begin, end)
        self._form = parameter.shape
        self.held = nn.Parameter(self.of(shared), parameter.requires_grad) if begin < end else None
        """what the optimiser finds; None if there is nothing for this rank"""

    def of(self, whole: Tensor) -> Tensor:
        """The piece of a tensor like the parameter."""
        return flat(whole)[self._span]

    def open(self, elements: dict[str, Tensor]) -> dict[str, Tensor]:
        """Get ready for a step: the gradient, and what is kept for the elements of the piece."""
        assert self.held is not None
        grad = self._whole.grad
        self.held.grad = None if grad is None else self.of(_like(grad, self._whole))
        return {key: self.of(_like(value, self._whole)) for key, value in elements.items()}

    def is_of_elements(self, value: Any) -> bool:
        """Whether something that is kept has an element for each of the parameter's."""
        return isinstance(value, Tensor) and value.shape == self._form

    def fits(self, value: Tensor, whole: Tensor) -> bool:
        """Whether what is kept for the piece has its place in what is kept for the whole."""
        assert self.held is not None
        like = self.held if self.is_of_elements(whole) else whole
        return (value.dtype, value.shape) == (whole.dtype, like.shape)

    def grown(self, value: Tensor) -> Tensor:
        """Something in the form of what is kept for the whole, given that for the piece."""
        if self.held is not None and value.shape == self.held.shape:
            return torch.empty_like(self._whole.detach(), dtype=value.dtype)
        return value

    def put(self, value: Tensor, shared: Tensor, *, first: bool) -> None:
        """Let all see what was kept for the piece, and if this is the first rank, what for the whole."""
        if not self.is_of_elements(shared):
            if first:
                shared.copy_(value)
            return
        there = self.of(shared)
        if value.data_ptr() != there.data_ptr():
            there.copy_(value)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in their order in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _like(tensor: Tensor, whole: Tensor) -> Tensor:
    """A tensor in the memory order of another one."""
    if tensor.stride() == whole.stride():
        return tensor
    return torch.empty_like(whole.detach(), dtype=tensor.dtype).copy_(tensor)
