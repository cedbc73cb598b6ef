"""A net as a list of calls, in the form of static single assignment: every call makes new values.

    v1 = conv2d(v0, body.weight, None, stride=(2, 2), ...)      in module body
    v2 = batch_norm(v1, ...)                                    in module norm
    v3 = relu(v2)                                               in module act

See `record` for how it is made.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["Constant", "Node", "Ref", "Slot", "State", "Tape", "Value"]


@dataclass(frozen=True)
class Value:
    """A tensor that the net computes, or one of its inputs."""

    index: int


@dataclass(frozen=True)
class State:
    """A parameter or buffer, by its name; looked up anew at every run."""

    name: str


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the net holds without having registered it."""

    tensor: Tensor


Ref = Value | State | Constant


@dataclass(frozen=True)
class Slot:
    """Where operand `index` of a node goes among its arguments."""

    index: int


@dataclass(frozen=True, eq=False)
class Node:
    """One call."""

    function: Callable[..., Any]
    """what was called: a function or method of torch, or a module that is taken as one operation"""
    name: str
    """its name, without the marks of methods, operators and in-place variants: `add` for `x += y`"""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """with a `Slot` for every tensor"""
    operands: tuple[Ref, ...]
    shapes: tuple[tuple[int, ...], ...]
    """of the operands"""
    outputs: tuple[int, ...]
    """values that it makes"""
    output_shapes: tuple[tuple[int, ...], ...]
    output_bytes: int
    """of one element of the first output"""
    returns: Any
    """tree spec of what it returns"""
    scope: str
    """name of the module that called"""
    call: int
    """how many nodes of this name and module came before"""
    draw: int
    """how many calls of this module that draw a mask came before: masks are a function of it"""
    grad: bool
    """whether it ran with gradients enabled"""

    def arguments(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call `function` with, given the operands."""
        if not self._direct:

            def put(leaf: Any) -> Any:
                return operands[leaf.index] if isinstance(leaf, Slot) else leaf

            return tree_map(put, (self.args, self.kwargs))
        args, kwargs = list(self.args), self.kwargs.copy()
        places, names = self._places
        for place, index in places:
            args[place] = operands[index]
        for name, index in names:
            kwargs[name] = operands[index]
        return tuple(args), kwargs

    @functools.cached_property
    def _places(self) -> tuple[list[tuple[int, int]], list[tuple[str, int]]]:
        """Which arguments are operands. Walking the trees anew would take longer than a small operation."""
        return (
            [(n, leaf.index) for n, leaf in enumerate(self.args) if isinstance(leaf, Slot)],
            [(name, leaf.index) for name, leaf in self.kwargs.items() if isinstance(leaf, Slot)],
        )

    @functools.cached_property
    def _direct(self) -> bool:
        """Whether no operand is within a list or the like."""
        return sum(map(len, self._places)) == len(self.operands)

    def bound(self, names: Sequence[str]) -> dict[str, Any]:
        """The arguments by name, given the names of the positional ones; tensors are `Slot`s."""
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def where(self) -> str:
        """How messages name this node."""
        return f"{self.name} in {self.scope!r}" if self.scope else f"{self.name} in the net"


@dataclass
class Tape:
    """A recorded net."""

    nodes: list[Node]
    inputs: tuple[int, ...]
    """values of the input tensors, in the order of `leaves`"""
    shapes: dict[int, tuple[int, ...]]
    dtypes: dict[int, torch.dtype]
    outputs: Any
    """tree of what the net returns, with a `Ref` for every tensor"""
    uses: Counter[int] = field(default_factory=Counter[int])
    """how many nodes and outputs read a value"""

    def element_bytes(self, ref: Ref) -> int:
        """Size of one element of a tensor."""
        return (
            self.dtypes[ref.index].itemsize
            if isinstance(ref, Value) and ref.index in self.dtypes
            else 4
        )
