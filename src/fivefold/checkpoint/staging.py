"""Copies of the state, taken while training goes on.

    save:  values, buffers ─ copied at once ─►
           parameters, optimiser state ─ copied in a thread (on a GPU: a stream) ──────► done
    train:      forward, backward (they change neither)        ─ waits here ─► optimiser's step

The copies lie in memory that is kept from save to save: memory that is asked for anew takes its time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fivefold.checkpoint.state import Captured
from fivefold.checkpoint.state_adapter import StateEntry
from fivefold.errors import CheckpointError
from fivefold.torch_private import dtensor, is_dtensor, version_of

__all__ = ["SMALL_BYTES", "Staging", "wait_before_steps", "wait_for_copies"]

SMALL_BYTES = 64 << 10
"""What is smaller is copied at once: 20 microseconds at the most"""


@dataclass
class _Later:
    """A tensor that is copied while training goes on."""

    source: Tensor
    target: Tensor
    name: str
    version: int
    """how often the source had been changed in place"""


_stagings: weakref.WeakSet[Staging] = weakref.WeakSet()
"""of this process, which may be copying"""


class Staging:
    """Copies one captured state at a time. `begin` and `wait` are for the thread that trains."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        """nobody would wait for us before changing parameters"""
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._later: list[_Later] = []
        self._copied = threading.Event()
        self._copied.set()
        self._stream: torch.cuda.Stream | None = None
        self._on_device: torch.cuda.Event | None = None
        self.bytes = 0
        """bytes of the tensors that were staged last"""

    def begin(self, captured: Captured) -> Captured:
        """Copy what may change soon, and note the rest for `copy`. Returns the copies, not all filled yet."""
        assert self._copied.is_set(), "one state at a time"
        self._later, self.bytes = [], 0
        parts = {
            name: [self._staged(name, entry) for entry in entries]
            for name, entries in captured.parts.items()
        }
        if self._later:
            self._copied.clear()
            _stagings.add(self)
            self._start_on_device()
        return replace(captured, parts=parts)

    def copy(self) -> None:
        """Fill what `begin` left. Called once, in another thread; training may wait for it."""
        try:
            for one in self._later:
                if not one.source.is_cuda:
                    one.target.copy_(one.source)
            if self._on_device is not None:
                self._on_device.synchronize()
            self._check()
        finally:
            self._later = []
            self._copied.set()

    def wait(self) -> None:
        """Return when parameters may change. What goes wrong is told by `copy`."""
        if self._on_device is not None and self._stream is not None:
            # The GPU waits, not we: its next kernels come after the copies.
            torch.cuda.current_stream(self._stream.device).wait_event(self._on_device)
            if all(one.source.is_cuda for one in self._later):
                return
        self._copied.wait()

    def abandon(self) -> None:
        """Nobody will call `copy`."""
        self._later = []
        self._copied.set()

    # ---- one tensor

    def _staged(self, name: str, entry: StateEntry) -> StateEntry:
        if not isinstance(entry.value, Tensor):
            return entry
        whole = entry.value
        source = whole.to_local() if is_dtensor(whole) else whole
        self.bytes += source.nbytes
        target = self._memory((name, *entry.path), source)
        later = entry.rests and not self._at_once and source.nbytes >= SMALL_BYTES
        if later:
            label = ".".join(map(str, (name, *entry.path)))
            self._later.append(_Later(source, target, label, version_of(source)))
        else:
            target.copy_(source)
        return replace(entry, value=_like(whole, target))

    def _memory(self, key: tuple[Any, ...], source: Tensor) -> Tensor:
        """Memory on the CPU for a copy of `source`, the same as the last time if it fits."""
        found = self._copies.get(key)
        if found is not None and _fits(found, source):
            return found
        made = torch.empty_like(
            source, device="cpu", pin_memory=source.is_cuda, requires_grad=False
        )
        self._copies[key] = made
        return made

    def _start_on_device(self) -> None:
        """Queue the copies of tensors on a GPU, in a stream of their own."""
        self._on_device = None
        here = [one for one in self._later if one.source.is_cuda]
        if not here:
            return
        device = here[0].source.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for one in here:
                one.target.copy_(one.source, non_blocking=True)
                one.source.record_stream(self._stream)
            self._on_device = torch.cuda.Event()
            self._on_device.record(self._stream)

    def _check(self) -> None:
        """Raise if a tensor was changed in place while it was copied."""
        changed = [one.name for one in self._later if version_of(one.source) != one.version]
        if changed and not self._waits_for_device():
            raise CheckpointError(
                f"{', '.join(changed[:3])} changed while being copied, by something else than a step of the "
                "optimisers that the Checkpointer was given: give it all optimisers, or change parameters "
                "right after an optimiser's step"
            )

    def _waits_for_device(self) -> bool:
        """On a GPU a later change, queued behind the copy, may already be noted."""
        return all(one.source.is_cuda for one in self._later)


def _like(whole: Tensor, local: Tensor) -> Tensor:
    """A copy of this rank's part as a part of the same whole."""
    if not is_dtensor(whole):
        return local
    return dtensor(local, whole)


def _fits(kept: Tensor, source: Tensor) -> bool:
    return (kept.size(), kept.dtype) == (source.size(), source.dtype) and (
        kept.stride() == source.stride() or not source.is_contiguous()
    )


def wait_for_copies() -> None:
    """Return when parameters may change: for whoever changes them outside steps of optimisers."""
    for staging in list(_stagings):
        staging.wait()


def wait_before_steps(
    optimizers: Mapping[str, Optimizer], wait: Callable[[], None]
) -> Callable[[], None]:
    """Call `wait` before every step of these optimisers; returns what ends that."""

    def before(*_: object) -> None:
        wait()

    hooks = [optimizer.register_step_pre_hook(before) for optimizer in optimizers.values()]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove
