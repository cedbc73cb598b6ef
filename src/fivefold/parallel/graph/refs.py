"""What a recording calls the tensors of a net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fivefold.parallel.trees import flatten, unflatten

__all__ = ["Constant", "Ref", "Slot", "State", "Value", "map_refs", "refs_of"]


@dataclass(frozen=True)
class Value:
    """A tensor that the net computes, or one of its inputs."""

    index: int


@dataclass(frozen=True)
class State:
    """A parameter or buffer by its name, or another tensor that the net holds by its path, which then begins
    with a dot; looked up anew at every run.
    """

    name: str


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the net uses without holding it: of a closure, say, or a global."""

    tensor: Tensor


Ref = Value | State | Constant


@dataclass(frozen=True)
class Slot:
    """Where operand `index` of a node goes among its arguments."""

    index: int


def refs_of(tree: Any) -> list[Ref]:
    """The refs in a tree."""
    return [leaf for leaf in flatten(tree, _is_ref)[0] if _is_ref(leaf)]


def _is_ref(leaf: Any) -> bool:
    return isinstance(leaf, (Value, State, Constant))


def map_refs(new: Callable[[Ref], Ref], tree: Any) -> Any:
    """A tree with other refs in the place of those it has."""
    flat, structure = flatten(tree, _is_ref)
    return unflatten((new(leaf) if _is_ref(leaf) else leaf for leaf in flat), structure)
