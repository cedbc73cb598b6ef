"""Nested batches: any pytree whose tensors have the samples on their leading dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fivefold.errors import UsageError

__all__ = ["call_with", "leaves", "map_tensors", "rows_of", "stand_in"]


def leaves(tree: object) -> list[Tensor]:
    """The tensors of a tree, in a fixed order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with `function` applied to every tensor."""
    return tree_map_only(Tensor, function, tree)


def rows_of(tree: object, what: str) -> int:
    """Number of samples: the leading dim, which all tensors of the tree must share."""
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


def stand_in(leaf: Tensor) -> Tensor:
    """One sample of zeros in place of none: models may not run on an empty batch (`view(0, -1)`)."""
    return torch.zeros((1, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
