"""What a step takes on a GPU beside its tensors: workspaces of kernels, and what the allocator rounds up.

On CPUs nobody counts them: the system tells what is resident, which is more than what is in use.
"""

from __future__ import annotations

import torch

__all__ = ["Workspace"]


class Workspace:
    """Measured in one step; 0 before, and on CPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        self.bytes = 0
        """the most that was seen"""

    def began(self) -> None:
        """A step begins, from which on torch's statistics of the GPU's memory count anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def ended(self, tensors_bytes: int) -> None:
        """It has ended, and its tensors took at most so much."""
        if self._before is not None:
            most = torch.cuda.max_memory_allocated(self._device) - self._before
            self.bytes = max(self.bytes, most - tensors_bytes)
            self._before = None
