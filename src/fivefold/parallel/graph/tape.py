"""A net as a list of calls, in the form of static single assignment: every call makes new values.

    v1 = conv2d(v0, body.weight, None, stride=(2, 2), ...)      in module body
    v2 = batch_norm(v1, ...)                                    in module norm
    v3 = relu(v2)                                               in module act

See `record` for how it is made.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fivefold.parallel.graph.containers import Found
from fivefold.parallel.graph.effects import Effects
from fivefold.parallel.graph.guards import Guards
from fivefold.parallel.graph.refs import Ref, Slot, StateRef, Value, filled, refs_of

__all__ = ["Autocast", "Node", "Tape", "depends"]

Autocast = tuple[bool, torch.dtype]
"""whether it is on, and the dtype that it casts to"""


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
    scope: str
    """name of the module that called"""
    call: int
    """how many nodes of this name and module came before"""
    draw: int
    """how many calls of this module that draw a mask came before: masks are a function of it"""
    grad: bool
    """whether it ran with gradients enabled"""
    autocast: Autocast | None = None
    """where the net itself has switched it; None: as around the net"""
    line: str = ""
    """of the user's code that called: `file.py:12`"""
    again: bool = False
    """whether the net checkpoints it: one process runs it twice, and counts its statistics twice"""
    stops: bool = False
    """whether a gradient may end here, as at `detach()`: that of an operand is None then, not zero"""

    def arguments(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call `function` with, given the operands."""
        if not self._direct:
            return filled((self.args, self.kwargs), operands)
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
        place = repr(self.scope) if self.scope else "the net"
        return f"{self.name} in {place} ({self.line})" if self.line else f"{self.name} in {place}"


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
    effects: Effects = field(default_factory=Effects)
    """what the net does besides"""
    statistics: set[str] = field(default_factory=set[str])
    """names of the buffers that norms update by themselves"""
    twice: set[str] = field(default_factory=set[str])
    """those of them that one process updates once more while it goes backward"""
    in_parts: frozenset[str] = frozenset()
    """names of parameters whose gradient one process finds in several backward passes"""
    guards: Guards | None = None
    """what the recording has seen; None for a tape that was not recorded"""
    places: Mapping[str, Found] = field(default_factory=dict[str, Found])
    """where a `StateRef` is looked up"""
    carried: list[Found] = field(default_factory=list[Found])
    """where the last inputs are found: what an earlier forward has left, in parts"""

    @property
    def given(self) -> tuple[int, ...]:
        """The inputs but for those that are carried."""
        return self.inputs[: len(self.inputs) - len(self.carried)]

    @property
    def left_before(self) -> list[tuple[int, Found]]:
        """The inputs that are carried, and where they are found."""
        return list(zip(self.inputs[len(self.given) :], self.carried, strict=True))

    @functools.cached_property
    def named(self) -> frozenset[str]:
        """Names of the tensors that nodes read."""
        return frozenset(
            ref.name for node in self.nodes for ref in node.operands if isinstance(ref, StateRef)
        )

    @functools.cached_property
    def trained(self) -> tuple[str, ...]:
        """What gets gradients and is no parameter of the net, in words."""
        wanted = {ref.index for ref in refs_of(self.outputs) if isinstance(ref, Value)}
        found = dict[str, None]()
        for node in reversed(self.nodes):
            if node.stops or not node.grad or not wanted.intersection(node.outputs):
                continue
            for ref in node.operands:
                if isinstance(ref, Value):
                    wanted.add(ref.index)
                    continue
                held = isinstance(ref, StateRef) and not ref.name.startswith(".")
                tensor = self.places[ref.name].now() if isinstance(ref, StateRef) else ref.tensor
                if tensor.requires_grad and not (held and isinstance(tensor, nn.Parameter)):
                    shape = f"a tensor of shape {tuple(tensor.shape)} that no module holds"
                    found[ref.name.lstrip(".") if isinstance(ref, StateRef) else shape] = None
        return tuple(found)

    @functools.cached_property
    def stops(self) -> bool:
        """Whether gradients may end anywhere within the net."""
        return any(node.stops for node in self.nodes)

    def element_bytes(self, ref: Ref) -> int:
        """Size of one element of a tensor."""
        return (
            self.dtypes[ref.index].itemsize
            if isinstance(ref, Value) and ref.index in self.dtypes
            else 4
        )


def depends(ref: Ref, on: Ref, nodes: Sequence[Node]) -> bool:
    """Whether a value is computed from another one."""
    found = {ref}
    for node in reversed(nodes):
        if any(Value(index) in found for index in node.outputs):
            found.update(node.operands)
    return on in found
