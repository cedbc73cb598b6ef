"""From samples to a batch and back to nothing: stacking pytrees, and batches of no samples.

A sample is any pytree: an (image, label) tuple, a dict, a registered dataclass, a lone tensor. A batch has
the same structure; tensors, arrays and numbers gain a leading dim, strings and None become lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from fivefold.errors import UsageError
from fivefold.torch_private import pytree

__all__ = ["check_batch", "emptied", "is_column", "stack"]

_UNSTACKED = (str, bytes, type(None))
_LEAVES = {Tensor, np.ndarray, int, float, bool, *_UNSTACKED}


def stack(samples: Sequence[Any]) -> Any:
    """Samples, at least one, to a batch of the same structure.

    torch's `default_collate` at each leaf: tensors and arrays of one shape are stacked, Python's ints
    become int64, floats float64.

    Raises:
        UsageError: samples differ in structure or shape, or hold something that cannot be stacked.
    """
    kinds = set(map(type, samples))
    if kinds == {tuple} and len(set(map(len, samples))) == 1:
        # Nearly every data set: ten times faster than the general way below.
        return tuple(stack(column) for column in zip(*samples, strict=True))
    if len(kinds) == 1 and kinds <= _LEAVES:
        return _column(list(samples))
    return _stack_trees(samples)


def _stack_trees(samples: Sequence[Any]) -> Any:
    first, structure = pytree.tree_flatten(samples[0])
    columns = [[leaf] for leaf in first]
    for position, sample in enumerate(samples[1:], start=1):
        leaves, found = pytree.tree_flatten(sample)
        if found != structure:
            raise UsageError(
                f"samples differ in structure: the first of the batch is {_outline(samples[0])}, number "
                f"{position} is {_outline(sample)}; return the same structure from every sample"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    return pytree.tree_unflatten([_column(column) for column in columns], structure)


def _column(leaves: list[Any]) -> Any:
    if isinstance(leaves[0], _UNSTACKED):
        return leaves
    try:
        return default_collate(leaves)
    except (TypeError, RuntimeError) as error:
        shapes = {str(tuple(leaf.shape)) for leaf in leaves if hasattr(leaf, "shape")}
        if len(shapes) > 1:
            raise UsageError(
                f"samples differ in shape and cannot be stacked: {', '.join(sorted(shapes))}; crop, resize "
                "or pad them in the data set's transform, or pass collate= to the loader"
            ) from error
        raise UsageError(
            f"a sample holds {type(leaves[0]).__name__!r}, which cannot be stacked; return tensors, arrays, "
            "numbers or strings, or pass collate= to the loader"
        ) from error


def _outline(sample: Any) -> str:
    """What a sample looks like: `(Tensor, int)`."""
    return str(pytree.tree_map(_type_name, sample)).replace("'", "")


def _type_name(leaf: Any) -> str:
    return type(leaf).__name__


def check_batch(batch: Any, count: int) -> None:
    """Raise `UsageError` unless every tensor of a user's batch has `count` samples along its first dim."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != count):
            raise UsageError(
                f"collate made a tensor of shape {tuple(leaf.shape)} from {count} sample"
                f"{'' if count == 1 else 's'}; the first dim of every tensor counts samples"
            )


def emptied(batch: Any) -> Any:
    """The batch with no sample left: tensors keep their dtype and other dims, lists are empty."""
    return pytree.tree_map(_no_samples, batch, is_leaf=is_column)


def is_column(node: Any) -> bool:
    """Whether a node of a batch is one leaf of each sample: strings or None, in a list."""
    return isinstance(node, list) and all(isinstance(item, _UNSTACKED) for item in node)


def _no_samples(leaf: Any) -> Any:
    return leaf[:0] if isinstance(leaf, (Tensor, list)) else leaf
