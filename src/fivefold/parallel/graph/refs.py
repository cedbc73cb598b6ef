"""What a recording calls the tensors of a net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

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
    flat, _ = tree_flatten(tree, is_leaf=lambda leaf: isinstance(leaf, (Value, State, Constant)))
    return [leaf for leaf in flat if isinstance(leaf, (Value, State, Constant))]


def map_refs(new: Callable[[Ref], Ref], tree: Any) -> Any:
    """A tree with other refs in the place of those it has."""
    return tree_map(
        lambda leaf: new(leaf) if isinstance(leaf, (Value, State, Constant)) else leaf, tree
    )
