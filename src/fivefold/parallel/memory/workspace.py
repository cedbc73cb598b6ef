"""What a step takes on a GPU beside its tensors: workspaces of kernels, and what the allocator rounds up.

On CPUs nobody counts them: the system tells what is resident, which is more than what is in use.
"""

from __future__ import annotations

import torch

__all__ = ["Workspace"]

_UNSEEN = 1 / 8


class Workspace:
    """Measured in steps; taken to be a part of the budget before, and 0 on CPUs."""

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device = device
        self._before: int | None = None
        self._seen_bytes: int | None = None
        self._unseen_bytes = 0 if device.type == "cpu" else int(_UNSEEN * budget_bytes)

    @property
    def bytes(self) -> int:
        """The most that was seen."""
        return self._unseen_bytes if self._seen_bytes is None else self._seen_bytes

    def began(self) -> None:
        """A step begins, from which on torch's statistics of the GPU's memory count anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def ended(self, tensors_bytes: int) -> None:
        """It has ended, and its tensors took at most so much."""
        if self._before is not None:
            most = torch.cuda.max_memory_allocated(self._device) - self._before
            self._seen_bytes = max(self._seen_bytes or 0, most - tensors_bytes)
            self._before = None
