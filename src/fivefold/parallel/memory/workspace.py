"""What a step takes on a GPU beside its tensors: workspaces of kernels, and what the allocator rounds up.

On CPUs nobody counts them: the system tells what is resident, which is more than what is in use.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Workspace"]

_UNSEEN = 1 / 8
"""of the budget: what workspaces are taken to be until they are measured"""


class Workspace:
    """Measured in steps; taken to be a part of the budget before, and 0 on CPUs."""

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device, self._counts = device, device.type == "cuda"
        self._others_bytes: int | None = None
        """what was there before the first step, and is none of the model's"""
        self._seen_bytes: int | None = None
        self._unseen_bytes = int(_UNSEEN * budget_bytes) if self._counts else 0

    @property
    def bytes(self) -> int:
        """The most that was seen."""
        return self._unseen_bytes if self._seen_bytes is None else self._seen_bytes

    def before(self, own: Iterable[Tensor]) -> None:
        """The first step is about to begin; `own` is what is there of it and of the model."""
        if self._counts and self._others_bytes is None:
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage() for t in own if t.is_cuda
            }
            held = sum(storage.nbytes() for storage in storages.values())
            self._others_bytes = torch.cuda.memory_allocated(self._device) - held

    def began(self) -> None:
        """A step begins, from which on torch's statistics of the GPU's memory count anew."""
        if self._counts:
            torch.cuda.reset_peak_memory_stats(self._device)

    def ended(self, tensors_bytes: int) -> None:
        """It has ended, and its tensors, and those that were there before it, took at most so much."""
        if self._counts and self._others_bytes is not None:
            most = torch.cuda.max_memory_allocated(self._device) - self._others_bytes
            self._seen_bytes = max(self._seen_bytes or 0, most - tensors_bytes)
