"""Tensors that have a shape and no memory, and the bytes that they would take.

with weightless() as fake:                       tensors made here are stand-ins (torch's FakeTensorMode)
    with counting([...], device, 2) as count:    what exists already
        ...                                      any forward and backward, exchanges included
        count.now()                              bytes that are alive
    count.most()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.torch_private import (
    LOCAL_SCALAR,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    memory_tracker,
)

__all__ = ["Count", "counting", "weightless"]

_one_at_a_time = threading.Lock()
"""what is lent to torch here, it has once per process"""


@contextmanager
def weightless(mode: FakeTensorMode | None = None) -> Generator[FakeTensorMode]:
    """Within the block, tensors have no memory and operations compute nothing; `mode` made some before.

    Raises `UsageError` where shapes depend on numbers, unless `counting` has an answer.
    """
    # In this thread, where the modes are: backward would else begin threads for devices.
    alone = torch.autograd.set_multithreading_enabled(False)
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True) if mode is None else mode
        with _one_at_a_time, alone, fake:
            yield fake
    except (DataDependentOutputException, DynamicOutputShapeException) as problem:
        raise UsageError(
            f"how much memory a step needs depends on the numbers that it computes ({problem.func}), so it "
            "cannot be told beforehand: run a step and measure"
        ) from problem


@dataclass(frozen=True)
class Count:
    """Bytes of tensors on one kind of device."""

    tracker: Any
    """torch's MemTracker"""
    device: str

    def now(self) -> int:
        """Bytes that are alive."""
        return self._total("current")

    def most(self) -> int:
        """The most that were alive within the block."""
        return self._total("peak")

    def _total(self, when: str) -> int:
        snapshot = self.tracker.get_tracker_snapshot(when)
        return sum(told["Total"] for device, told in snapshot.items() if device.type == self.device)


@contextmanager
def counting(existing: Sequence[Tensor], device: torch.device, rows: int) -> Generator[Count]:
    """Within the block of `weightless`, count bytes: those of `existing`, and of what is made.

    Who asks for numbers is answered: masks are true throughout, so that no memory is forgotten; whole numbers
    are `rows`, as if all ranks had as many samples; others are 2.
    """
    tracker = memory_tracker()
    tracker.track_external(*existing)
    with tracker, _Answers(rows):
        yield Count(tracker, device.type)


class _Answers(TorchDispatchMode):
    """What depends on numbers; see `counting`."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.index.Tensor and _is_mask(args[1]):
            x, (mask,) = args
            return x.new_empty((mask.numel(), *x.shape[mask.dim() :]))
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not LOCAL_SCALAR:
                raise
            return self._number(args[0].dtype)

    def _number(self, dtype: torch.dtype) -> complex | float | int | bool:
        if dtype is torch.bool:
            return True
        whole = not (dtype.is_floating_point or dtype.is_complex)
        return self._rows if whole else 2.0


def _is_mask(indices: Sequence[Tensor | None]) -> bool:
    first = indices[0]
    return len(indices) == 1 and first is not None and first.dtype is torch.bool
