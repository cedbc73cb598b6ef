"""Autograd functions of the user's that are promised to look at one element at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from fivefold.errors import UsageError

__all__ = ["is_pointwise", "pointwise"]

_F = TypeVar("_F", bound=type[torch.autograd.Function])

_marked: WeakSet[type] = WeakSet()


def pointwise(function: _F) -> _F:
    """Promise that an autograd function looks at one element at a time, forward and backward.

        @ff.pointwise
        class Swish(torch.autograd.Function): ...

        ff.pointwise(library.Mish)

    Samples and tiles are then computed where they lie; without the promise all that it takes is gathered,
    since nobody knows what its backward joins. Operands may be broadcast. A function of several results is
    gathered still. Mark it before `parallelize`.

    Where its operands are divided it is tried first, on the CPU, with some random numbers. If parts have
    other results or gradients than the whole, the mark does not count, which is told. One that cannot run
    there is believed.

    Args:
        function: a subclass of `torch.autograd.Function`; its own subclasses are not meant.

    Returns the same class. Raises `UsageError` if it is none.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"fivefold.pointwise takes a subclass of torch.autograd.Function, not {function!r}"
        )
    _marked.add(function)
    return function


def is_pointwise(function: Callable[..., Any]) -> bool:
    """Whether it applies an autograd function that is marked."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and owner in _marked
