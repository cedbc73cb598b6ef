"""What a recording calls the tensors of a net."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fivefold.parallel.trees import flatten, unflatten
from fivefold.torch_private import pytree

__all__ = ["Constant", "Ref", "Slot", "StateRef", "Value", "filled", "map_refs", "refs_of"]


@dataclass(frozen=True)
class Value:
    """A tensor that the net computes, or one of its inputs."""

    index: int


@dataclass(frozen=True)
class StateRef:
    """A parameter or buffer by its name, or another tensor that the net holds by its path, which then begins
    with a dot; looked up anew at every run.
    """

    name: str


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the net uses without holding it: of a closure, say, or a global."""

    tensor: Tensor


Ref = Value | StateRef | Constant


@dataclass(frozen=True)
class Slot:
    """Where operand `index` of a node goes among its arguments."""

    index: int


def refs_of(tree: Any) -> list[Ref]:
    """The refs in a tree."""
    return [leaf for leaf in flatten(tree, _is_ref)[0] if _is_ref(leaf)]


def _is_ref(leaf: Any) -> bool:
    return isinstance(leaf, (Value, StateRef, Constant))


def filled(placed: Any, operands: Sequence[Any]) -> Any:
    """A tree with operands in the place of its slots."""

    def put(leaf: Any) -> Any:
        return operands[leaf.index] if isinstance(leaf, Slot) else leaf

    return pytree.tree_map(put, placed)


def map_refs(new: Callable[[Ref], Any], tree: Any) -> Any:
    """A tree with something else in the place of its refs."""
    flat, structure = flatten(tree, _is_ref)
    return unflatten((new(leaf) if _is_ref(leaf) else leaf for leaf in flat), structure)
