"""Tensors that have a shape and no memory, and the bytes that they would take.

with weightless() as fake:                       tensors made here are stand-ins (torch's FakeTensorMode)
    with counting([...], device, 2) as count:    what exists already
        ...                                      any forward and backward, exchanges included
        count.now()                              bytes that are alive
    count.most()
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fivefold.errors import UsageError
from fivefold.torch_private import (
    LOCAL_SCALAR,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    pytree,
)

__all__ = ["Count", "counting", "current_count", "weightless"]

_one_at_a_time = threading.Lock()
"""torch keeps some of what stand-ins need once per process"""
_CUDA_BLOCK = 512
"""bytes: what torch's allocator gives on GPUs are multiples"""


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


class Count(TorchDispatchMode):
    """Bytes of tensors on one kind of device.

    A memory counts once however many tensors view it, from the operation that makes it to its end.
    """

    def __init__(self, existing: Sequence[Tensor], device: str) -> None:
        super().__init__()
        self._device = device
        self._now = self._most = self._lately = 0
        self._known = WeakIdKeyDictionary()
        for tensor in existing:
            self._add(tensor)

    def now(self) -> int:
        """Bytes that are alive."""
        return self._now

    def most(self) -> int:
        """The most that were alive within the block."""
        return self._most

    def lately(self) -> int:
        """The most that were alive since the last call."""
        found, self._lately = self._lately, self._now
        return found

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != self._device or storage in self._known:
            return
        self._known[storage] = held = [0]
        weakref.finalize(storage, self._lose, held)
        self._hold(held, storage.nbytes())

    def _hold(self, held: list[int], size: int) -> None:
        if self._device == "cuda":
            size = -(-size // _CUDA_BLOCK) * _CUDA_BLOCK
        self._now += size - held[0]
        held[0] = size
        self._lately = max(self._lately, self._now)
        self._most = max(self._most, self._now)

    def _lose(self, held: list[int]) -> None:
        self._now -= held[0]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has become larger, or smaller."""
        if (held := self._known.get(storage)) is not None:
            self._hold(held, storage.nbytes())

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, which computes with its parts
        result = self.result(func, args, kwargs or {})
        for leaf in pytree.tree_iter(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def result(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Of an operation."""
        return func(*args, **kwargs)


class _Weightless(Count):
    """Answers those who ask for numbers, too; see `counting`."""

    def __init__(self, existing: Sequence[Tensor], device: str, rows: int) -> None:
        super().__init__(existing, device)
        self._rows = rows

    def result(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Count`."""
        if func is torch.ops.aten.index.Tensor and _is_mask(args[1]):
            x, (mask,) = args
            return x.new_empty((mask.numel(), *x.shape[mask.dim() :]))
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not LOCAL_SCALAR:
                raise
            return self._number(args[0].dtype)

    def _number(self, dtype: torch.dtype) -> complex | float | int | bool:
        if dtype is torch.bool:
            return True
        whole = not (dtype.is_floating_point or dtype.is_complex)
        return self._rows if whole else 2.0


@contextmanager
def counting(existing: Sequence[Tensor], device: torch.device, rows: int) -> Generator[Count]:
    """Within the block of `weightless`, count bytes: those of `existing`, and of what is made.

    Who asks for numbers is answered: masks are true throughout, so that no memory is forgotten; whole numbers
    are `rows`, as if all ranks had as many samples; others are 2.
    """
    with _Weightless(existing, device.type, rows) as count, _current.of(count):
        yield count


class _Current(threading.local):
    """Who counts in this thread."""

    count: Count | None = None

    @contextmanager
    def of(self, count: Count) -> Generator[None]:
        before, self.count = self.count, count
        try:
            yield
        finally:
            self.count = before


_current = _Current()


def current_count() -> Count | None:
    """The one of the innermost `counting`, in this thread."""
    return _current.count


def _is_mask(indices: Sequence[Tensor | None]) -> bool:
    first = indices[0]
    return len(indices) == 1 and first is not None and first.dtype is torch.bool
