"""Nested batches and results: any pytree, dataclasses included, of tensors with samples first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.torch_private import pytree

__all__ = [
    "Method", "Structure", "call_with", "flatten", "in_graph", "kinds", "leaves", "map_leaves",
    "map_tensors", "rows_of", "stand_in", "unflatten",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a tree is besides its leaves."""

    spec: pytree.TreeSpec
    opened: bool = False
    """whether there are dataclasses in it"""


class _Fields:
    """A dataclass taken apart, which torch's pytrees do not look into unless they are told."""

    def __init__(self, kind: type, values: dict[str, Any]) -> None:
        self.kind, self.values = kind, values


pytree.register_pytree_node(
    _Fields,
    lambda opened: (list(opened.values.values()), (opened.kind, tuple(opened.values))),
    lambda values, told: _Fields(told[0], dict(zip(told[1], values, strict=True))),
)


def _is_record(value: Any) -> bool:
    kind = type(value)
    own = kind in pytree.SUPPORTED_NODES or kind.__module__.startswith("fivefold.")
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not own


def _opened(tree: Any) -> Any:
    if not _is_record(tree):
        return tree
    values = {
        f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)
    }
    opened = {
        name: pytree.tree_map(_opened, value, is_leaf=_is_record) for name, value in values.items()
    }
    return _Fields(type(tree), opened)


def _closed(tree: Any) -> Any:
    if not isinstance(tree, _Fields):
        return tree
    made: Any = object.__new__(tree.kind)  # without what its __init__ may want
    for name, value in tree.values.items():
        object.__setattr__(made, name, pytree.tree_map(_closed, value, is_leaf=_is_fields))
    return made


def _is_fields(value: Any) -> bool:
    return isinstance(value, _Fields)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """The leaves of a tree in a fixed order, and what `unflatten` makes a tree from."""
    flat, spec = pytree.tree_flatten(tree, is_leaf)
    if not any(map(_is_record, flat)):
        return flat, Structure(spec)
    flat, spec = pytree.tree_flatten(pytree.tree_map(_opened, tree, is_leaf=_is_record), is_leaf)
    return flat, Structure(spec, opened=True)


def unflatten(flat: Iterable[Any], structure: Structure) -> Any:
    """A tree of the structure that `flatten` has found."""
    made = pytree.tree_unflatten(list(flat), structure.spec)
    return pytree.tree_map(_closed, made, is_leaf=_is_fields) if structure.opened else made


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with `function` applied to every leaf."""
    flat, structure = flatten(tree)
    return unflatten(map(function, flat), structure)


def leaves(tree: object) -> list[Tensor]:
    """The tensors of a tree, in a fixed order."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def kinds(*trees: object) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of every tensor of some trees: equal for batches that are alike."""
    return tuple((tuple(leaf.shape), leaf.dtype) for tree in trees for leaf in leaves(tree))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with `function` applied to every tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def rows_of(tree: object, what: str) -> int:
    """Number of samples: the leading dim, which all tensors of the tree must share.

    Raises `UsageError` where they do not.
    """
    counts = {leaf.shape[0] if leaf.dim() else None for leaf in leaves(tree)}
    if len(counts) == 1 and None not in counts:
        return int(counts.pop() or 0)
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves(tree)) or "no tensors"
    raise UsageError(
        f"{what} must be tensors that share their leading dim, the samples; got {shapes}"
    )


def call_with(function: Callable[..., Any], inputs: Any) -> Any:
    """Call `function`: a tuple gives positional arguments, a dict keyword arguments."""
    if isinstance(inputs, dict):
        return function(**inputs)
    if isinstance(inputs, tuple):
        return function(*inputs)
    return function(inputs)


@dataclasses.dataclass(frozen=True)
class Method:
    """Calls a method of a net as `call_with` does; `both`: with positional and keyword arguments at once."""

    name: str = ""
    """of the method; without one, the net itself is called"""
    both: bool = False

    def __call__(self, net: Any, inputs: Any) -> Any:
        """What it returns."""
        function = getattr(net, self.name) if self.name else net
        if not self.both:
            return call_with(function, inputs)
        args, kwargs = inputs
        return function(*args, **kwargs)


def in_graph(made: Tensor, tree: object) -> Tensor:
    """`made` with the tensors of `tree` in its graph, adding nothing: ranks wait for gradients of others."""
    for leaf in leaves(tree):
        if leaf.requires_grad:
            made = made + leaf.flatten()[:0].sum().to(made.dtype)
    return made


def stand_in(leaf: Tensor) -> Tensor:
    """One sample of zeros in place of none: models may not run on an empty batch (`view(0, -1)`).

    Of the same graph: another model that has made the leaf waits for gradients on all ranks.
    """
    made = torch.zeros((1, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
    return made + leaf.sum() * 0 if leaf.requires_grad else made
