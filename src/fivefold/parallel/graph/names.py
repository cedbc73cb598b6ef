"""Names of torch's functions, without the marks of their variants: `x += y`, `x.add_(y)` and `torch.add`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

__all__ = ["asks_in_place", "base_name", "is_in_place", "is_own", "is_users", "plain", "with_flag"]


def _own_name(function: Any) -> str:
    name = getattr(function, "__name__", None) or str(function)
    if name in {"__get__", "__set__"}:  # a property: torch.Tensor.T.__get__
        return (resolve_name(function) or name).split(".")[-2]
    return name


def is_in_place(function: Any) -> bool:
    """Whether a function of torch changes its first argument."""
    name = _own_name(function)
    if name.startswith("__"):
        return name.startswith("__i") and name not in {"__invert__", "__index__", "__int__"}
    return name.endswith("_") and not name.endswith("__")


@functools.cache
def with_flag(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function that has a parameter `inplace`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return signature if "inplace" in signature.parameters else None


def asks_in_place(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call changes its first argument, by its name or because `inplace` is set."""
    if is_own(function):
        return False
    if is_in_place(function):
        return True
    signature = with_flag(function)
    return signature is not None and bool(
        signature.bind(*args, **kwargs).arguments.get("inplace", False)
    )


def base_name(function: Any) -> str:
    """`add` for `torch.add`, `Tensor.add_`, `Tensor.__iadd__` and `Tensor.__radd__`; `T` for the property."""
    name = _own_name(function)
    if name in {"__getitem__", "__setitem__"}:
        return name
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        name = _OPERATORS.get(name, name)
    return name.rstrip("_")


_OPERATORS = {
    "radd": "add", "iadd": "add", "isub": "sub", "rmul": "mul", "imul": "mul", "truediv": "div",
    "itruediv": "div", "rdiv": "rtruediv", "floordiv": "floor_divide", "ipow": "pow", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not",
}  # fmt: skip


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The variant of a function of torch that leaves its argument alone."""
    return function if is_own(function) else _plain(function)


def is_own(function: Callable[..., Any]) -> bool:
    """Whether a node's function is one of ours, which change none of their operands."""
    return type(function).__module__.startswith("fivefold.")


def is_users(function: Callable[..., Any]) -> bool:
    """Whether it is an autograd function or an operation of the user's, whose backward nobody knows."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return not owner.__module__.startswith("torch.")
    return getattr(function, "namespace", "aten") not in _KNOWN_OPERATIONS


_KNOWN_OPERATIONS = frozenset({"aten", "prims", "torchvision"})
"""packages whose operations are differentiated as their forward says"""


@functools.cache
def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    if not is_in_place(function):
        return _without_flag(function)
    name = base_name(function)
    for place in (Tensor, torch, F):
        found = getattr(place, name, None)
        if callable(found):
            return _of_the_same_type(found)
    return _on_a_copy(function)


def _of_the_same_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is changed in place keeps its dtype; a new tensor would get that of both operands."""

    def call_keeping(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = function(x, *args, **kwargs)
        return result.to(x.dtype) if isinstance(result, Tensor) else result

    return call_keeping


def _on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    def call_on_copy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(x.clone(), *args, **kwargs)

    return call_on_copy


def _without_flag(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = with_flag(function)
    if signature is None:
        return function

    def call_plain(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["inplace"] = False
        return function(*bound.args, **bound.kwargs)

    return call_plain
