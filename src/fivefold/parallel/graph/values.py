"""Values that a forward reads: which are the same, and the tensors among them."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "ABSENT", "CLOSED", "holds_tensor", "is_plain", "is_scalar", "replaced", "stayed", "tensors_in",
    "untouched",
]  # fmt: skip


class _Absent:
    """In the place of what is not there."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()

_SCALARS = (
    int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice,
    torch.layout, torch.memory_format, np.generic,
)  # fmt: skip
CLOSED = (
    "torch.distributed", "torch.fx", "torch.jit", "torch.utils.data", "torch.optim", "torch.cuda", "torch._",
    "fivefold", "logging", "threading", "weakref", "concurrent", "asyncio", "multiprocessing", "_thread",
    "re", "pathlib", "_io",
)  # fmt: skip
"""packages into whose objects no walk goes"""
_DEEPEST = 6


def is_scalar(value: Any) -> bool:
    """Whether there is nothing to walk into."""
    return isinstance(value, (*_SCALARS, _Absent))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or the like: equal ones are the same."""
    return isinstance(value, _SCALARS)


def stayed(one: Any, other: Any) -> bool:
    """Whether a forward that looks at `other` sees what it saw of `one`; of tensors, numbers apart."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _described(one) == _described(other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(stayed, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, (*_SCALARS, frozenset)):
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124 - NaN
    return False


def untouched(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether a value is as it was put: the same, or one that is equal to the last bit of its content."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor) or depth > _DEEPEST:
        return False
    if isinstance(one, weakref.ReferenceType):
        return True  # a cache, which its owner checks
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(
            untouched(a, b, depth + 1) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, dict):
        same = list(one) == list(other)
        return same and all(untouched(one[key], other[key], depth + 1) for key in one)
    if stayed(one, other):
        return True
    inner = _members(one), _members(other)
    return None not in inner and untouched(*inner, depth + 1)


def _members(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object of the user's."""
    own = getattr(value, "__dict__", None)
    plain = not isinstance(value, (nn.Module, type)) and not callable(value)
    open_ = not type(value).__module__.startswith(CLOSED)
    return own if plain and open_ and isinstance(own, dict) else None


def _described(tensor: Tensor) -> tuple[Any, ...]:
    """Of a tensor what a forward can see without its numbers."""
    return (
        tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad,
        isinstance(tensor, nn.Parameter),
    )  # fmt: skip


def tensors_in(value: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """A value that is a tensor, and those of tuples; where they are in these."""
    if isinstance(value, Tensor):
        yield (), value
    elif isinstance(value, tuple):
        for number, item in enumerate(cast(tuple[Any, ...], value)):
            for inner, tensor in tensors_in(item):
                yield (number, *inner), tensor


def holds_tensor(value: Any) -> bool:
    """Whether `tensors_in` finds any."""
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(holds_tensor, value)))


def replaced(value: Any, stand_in: Callable[[Tensor], Tensor]) -> Any:
    """A value with other tensors."""
    if isinstance(value, Tensor):
        return stand_in(value)
    if isinstance(value, tuple) and holds_tensor(value):
        items = [replaced(item, stand_in) for item in value]
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)  # type: ignore[attr-defined]
    return value
