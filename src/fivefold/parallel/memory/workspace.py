"""What a step on a GPU takes beside its tensors: workspaces of kernels, and what libraries keep.

    node       most while it is computed - the larger of what is there before and after it
    workspace  this in a step, less this in a rehearsal of the step, where kernels take none

On CPUs nobody counts them: the system tells what is resident, which is more than what is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fivefold.parallel.memory.budget import Budgeted
from fivefold.parallel.memory.choice import Choice
from fivefold.parallel.memory.slots import Counts, Slot, SlotWatch
from fivefold.parallel.memory.spill import Pool
from fivefold.parallel.program.memory import Predicted, Rehearse
from fivefold.parallel.program.weightless import current_count

__all__ = [
    "DeviceCount", "NodePeaks", "Workspace", "device_count", "rehearsed_peaks", "with_workspaces",
]  # fmt: skip

_UNSEEN = 1 / 8
"""of the budget: what workspaces are taken to be until they are measured"""


class DeviceCount:
    """Of a GPU, by torch's allocator, whose peak counts anew with each call of `lately`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        """See `Counts`."""
        return torch.cuda.memory_allocated(self._device)

    def lately(self) -> int:
        """See `Counts`."""
        found = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return found


def device_count(device: torch.device) -> Counts | None:
    """Of a device, where it tells."""
    return DeviceCount(device) if device.type == "cuda" else None


class NodePeaks(SlotWatch):
    """What nodes of a step take for as long as they are computed, and their backward."""

    def __init__(self, counts: Callable[[], Counts | None]) -> None:
        super().__init__(counts)
        self.bytes: dict[Slot, int] = {}
        self.most_bytes = 0
        """while any of them was computed"""
        self._before = 0
        self._peaks: list[tuple[list[Slot], int]] = []
        """what was under way, and the most that there was"""

    def began(self, slot: Slot, now: int) -> None:  # noqa: ARG002
        """See `SlotWatch`."""
        self._before = now

    def ended(self, slot: Slot, most: int, now: int, following: int) -> None:
        """See `SlotWatch`."""
        self.bytes[slot] = max(self.bytes.get(slot, 0), most - max(self._before, now))
        self.most_bytes = max(self.most_bytes, most)
        also = range(following + 1, slot[0]) if slot[1] else ()
        self._peaks.append(([slot, *((n, what) for n in also for what in (False, True))], most))

    def more_bytes(self, workspaces: Mapping[Slot, int]) -> int:
        """By how much more the most is with what nodes take beside what is counted."""
        peaks = (most + max(workspaces.get(one, 0) for one in own) for own, most in self._peaks)
        return max(peaks, default=0) - self.most_bytes


def rehearsed_peaks(rehearse: Rehearse, choice: Choice, pool: Pool) -> tuple[NodePeaks, Predicted]:
    """Of nodes, in a rehearsal under a choice; and what such a step needs."""
    peaks = NodePeaks(current_count)
    told = rehearse(lambda _: Budgeted(choice, pool, watch=peaks))
    peaks.close()
    return peaks, told


def with_workspaces(
    rehearse: Rehearse, choice: Choice, pool: Pool, workspaces: Mapping[Slot, int]
) -> Predicted:
    """What a step needs under a choice, with bytes that nodes take beside their tensors."""
    if not workspaces:
        return rehearse(lambda _: Budgeted(choice, pool))
    peaks, told = rehearsed_peaks(rehearse, choice, pool)
    return replace(told, peak_bytes=told.peak_bytes + peaks.more_bytes(workspaces))


class Workspace:
    """What no node is known to take: measured in steps, taken to be a part of the budget before.

    Args:
        device: of which it is.
        count: of the device; None where nobody counts, and nothing is taken.
        budget_bytes: of the model.
    """

    def __init__(self, device: torch.device, count: Counts | None, budget_bytes: int) -> None:
        self._device, self._count = device, count
        self._others_bytes: int | None = None
        """what was there before the first step, and is none of the model's"""
        self._seen_bytes: int | None = None
        self._unseen_bytes = int(_UNSEEN * budget_bytes) if count is not None else 0

    @property
    def bytes(self) -> int:
        """The most that was seen."""
        return self._unseen_bytes if self._seen_bytes is None else self._seen_bytes

    def before(self, own: Iterable[Tensor]) -> None:
        """The first step is about to begin; `own` is what is there of it and of the model."""
        if self._count is not None and self._others_bytes is None:
            here = (t.untyped_storage() for t in own if t.device.type == self._device.type)
            storages = {storage.data_ptr(): storage for storage in here}
            held = sum(storage.nbytes() for storage in storages.values())
            self._others_bytes = self._count.now() - held

    def began(self) -> None:
        """A step begins, from which on the most counts anew."""
        if self._count is not None:
            self._count.lately()

    def ended(self, known_bytes: int, most_bytes: int | None = None) -> None:
        """It has ended, and what is known of it, and of what was there before, takes at most so much.

        `most_bytes` is the most that there was, if somebody has asked for it.
        """
        if self._count is not None and self._others_bytes is not None:
            most = self._count.lately() if most_bytes is None else most_bytes
            self._seen_bytes = max(self._seen_bytes or 0, most - self._others_bytes - known_bytes)
