"""What a step on a GPU takes beside its tensors: workspaces of kernels, and what libraries keep.

    node       most while it is computed - the larger of what is there before and after it
    workspace  this in a step, less this in a rehearsal of the step, where kernels take none

On CPUs nobody counts them: the system tells what is resident, which is more than what is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fivefold.parallel.memory.budget import Budgeted
from fivefold.parallel.memory.choice import Choice
from fivefold.parallel.memory.saving import Watch
from fivefold.parallel.memory.spill import Pool
from fivefold.parallel.program.memory import Predicted, Rehearse
from fivefold.parallel.program.weightless import current_count

__all__ = [
    "Counts", "DeviceCount", "NodePeaks", "Slot", "Workspace", "device_count", "rehearsed_peaks",
    "with_workspaces",
]  # fmt: skip

Slot = tuple[int, bool]
"""a node, and whether it is its backward"""
_UNSEEN = 1 / 8
"""of the budget: what workspaces are taken to be until they are measured"""


class Counts(Protocol):
    """Counts bytes."""

    def now(self) -> int:
        """Those that are alive."""
        ...

    def lately(self) -> int:
        """The most that were alive since the last call."""
        ...


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


class NodePeaks(Watch):
    """What nodes of a step take for as long as they are computed, and their backward.

    forward     f1    f2    f3    loss
    backward              b3          b1          of node 2, which saves nothing, nobody tells: it counts as 3

    What is computed again is so in the backward of the node that follows it.

    Args:
        count: of what there is, asked for at the first node, whose thread may not be that of backward.
        more: what nodes are known to take beside what is counted.
    """

    def __init__(
        self, count: Callable[[], Counts | None], more: Mapping[Slot, int] | None = None
    ) -> None:
        self.bytes: dict[Slot, int] = {}
        self.most_bytes = self.most_with_more_bytes = 0
        """while any of them was computed"""
        self._counts, self._more = count, more or {}
        self._count: Counts | None = None
        self._slot: Slot | None = None
        """what is under way"""
        self._before = 0
        """bytes as it began"""

    def computes(self, node: int) -> None:
        """See `Watch`."""
        self._next((node, False))

    def needs(self, node: int) -> None:
        """See `Watch`."""
        if self._slot != (node, True):
            self._next((node, True))

    def _next(self, slot: Slot) -> None:
        self.close(slot[0] if slot[1] else -1)
        self._count = self._count or self._counts()
        assert self._count is not None
        self._count.lately()
        self._slot, self._before = slot, self._count.now()

    def close(self, before: int = -1) -> None:
        """What was under way has ended, in backward with all that comes after the node `before`."""
        if self._count is None or self._slot is None:
            return
        (node, backward), most = self._slot, self._count.lately()
        took = most - max(self._before, self._count.now())
        self.bytes[self._slot] = max(self.bytes.get(self._slot, 0), took)
        also = range(before + 1, node) if backward else ()
        slots = (self._slot, *((n, what) for n in also for what in (False, True)))
        with_more = most + max(self._more.get(slot, 0) for slot in slots)
        self.most_bytes = max(self.most_bytes, most)
        self.most_with_more_bytes = max(self.most_with_more_bytes, with_more)
        self._slot = None


def rehearsed_peaks(
    rehearse: Rehearse, choice: Choice, pool: Pool, more: Mapping[Slot, int]
) -> tuple[NodePeaks, Predicted]:
    """Of nodes, in a rehearsal under a choice; and what such a step needs."""
    peaks = NodePeaks(current_count, more)
    told = rehearse(lambda _: Budgeted(choice, pool, watch=peaks))
    peaks.close()
    return peaks, told


def with_workspaces(
    rehearse: Rehearse, choice: Choice, pool: Pool, workspaces: Mapping[Slot, int]
) -> Predicted:
    """What a step needs under a choice, with bytes that nodes take beside their tensors."""
    if not workspaces:
        return rehearse(lambda _: Budgeted(choice, pool))
    peaks, told = rehearsed_peaks(rehearse, choice, pool, workspaces)
    more = peaks.most_with_more_bytes - peaks.most_bytes
    return replace(told, peak_bytes=told.peak_bytes + more)


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
