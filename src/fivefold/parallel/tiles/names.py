"""Names of torch's functions, without the marks of their variants: `x += y`, `x.add_(y)` and `torch.add`."""

from __future__ import annotations

from typing import Any

from torch.overrides import resolve_name

__all__ = ["base_name", "is_in_place"]


def _own_name(function: Any) -> str:
    name = getattr(function, "__name__", None) or str(function)
    if name == "__get__":  # a property: torch.Tensor.T.__get__
        return (resolve_name(function) or name).split(".")[-2]
    return name


def is_in_place(function: Any) -> bool:
    """Whether a function of torch changes its first argument."""
    name = _own_name(function)
    if name.startswith("__"):
        return name.startswith("__i") and name not in {"__invert__", "__index__", "__int__"}
    return name.endswith("_") and not name.endswith("__")


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
