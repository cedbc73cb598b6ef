"""What a node's function gives for parts, found out by trying: on random numbers, whole and part by part."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fivefold.parallel.graph.names import plain
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.spread import Spread
from fivefold.torch_private import pytree, without_modes

__all__ = ["MOST_TRIED", "Call", "each_by_itself", "keeps_promise", "numbers"]

MOST_TRIED = 1 << 22
"""elements of an operand that is tried"""
_PLACES = 4
"""of a dim, that are tried of functions that are marked pointwise"""
_TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {},
    torch.float32: {
        "rtol": 1e-4,
        "atol": 1e-5,
    },  # vectors round otherwise than what is left of them
}

_known: WeakKeyDictionary[Node, dict[frozenset[int], bool]] = WeakKeyDictionary()
"""by the dims that are cut, what was found: a node is placed several times, to find what is fastest"""
_ALONE = threading.Lock()
"""ranks may be threads, which share what random numbers are drawn from"""


def numbers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random ones; of integers, zeros and ones."""
    if dtype == torch.int64:
        return torch.randint(0, 2, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), dtype=dtype, generator=generator)


class Call:
    """One call of a node's function: its results, and the gradients of what it was given.

    Raises what the function raises.
    """

    def __init__(self, node: Node, given: Sequence[Tensor]) -> None:
        self.node = node
        self.given = [g.detach().clone().requires_grad_(g.is_floating_point()) for g in given]
        with torch.set_grad_enabled(node.grad):
            # Copies, so that it may change them in place.
            args, kwargs = node.arguments([g.clone() for g in self.given])
            made = pytree.tree_leaves(plain(node.function)(*args, **kwargs))
        self.results = [leaf for leaf in made if isinstance(leaf, Tensor)]

    def gradients(self, of_results: Sequence[Tensor]) -> list[Tensor]:
        """By operand; zeros where there is none."""
        trained = [g for g in self.given if g.requires_grad]
        ends = [(r, g) for r, g in zip(self.results, of_results, strict=True) if r.requires_grad]
        if not (trained and ends):
            return [torch.zeros_like(g) for g in self.given]
        results, gradients = zip(*ends, strict=True)
        found = iter(torch.autograd.grad(results, trained, gradients, allow_unused=True))
        every = [next(found) if g.requires_grad else None for g in self.given]
        pairs = zip(every, self.given, strict=True)
        return [torch.zeros_like(g) if one is None else one.to_dense() for one, g in pairs]


def each_by_itself(
    whole: Call,
    dims: Sequence[int | None],
    dim: int = 0,
    *,
    rtol: float = 1e-9,
    atol: float = 1e-12,
) -> bool:
    """Whether what lies at a place of a dim has the same results and gradients alone as among others.

    Args:
        whole: with all places.
        dims: that dim of each operand; None for those that all places share.
        dim: that of the results.
        rtol, atol: as for `torch.allclose`.

    Raises what the function raises.
    """
    size = next(g.shape[own] for g, own in zip(whole.given, dims, strict=True) if own is not None)
    if any(not result.dim() or result.shape[dim] != size for result in whole.results):
        return False

    def alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        return len(some) == len(others) and all(
            one.shape == other.shape
            and torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)
            for one, other in zip(some, others, strict=True)
        )

    def at(place: int, tensors: Sequence[Tensor], owns: Sequence[int | None]) -> list[Tensor]:
        pairs = zip(tensors, owns, strict=True)
        return [g if own is None else g.narrow(own, place, 1) for g, own in pairs]

    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(r.shape, dtype=torch.float64, generator=generator) for r in whole.results]
    weights = [draw.to(r.dtype) for draw, r in zip(draws, whole.results, strict=True)]
    expected, made = whole.gradients(weights), [dim] * len(weights)
    sums = [torch.zeros_like(g) for g in expected]
    for place in range(size):
        alone = Call(whole.node, at(place, whole.given, dims))
        if not alike(alone.results, at(place, whole.results, made)):
            return False
        parts = alone.gradients(at(place, weights, made))
        for total, part in zip(at(place, sums, dims), parts, strict=True):
            total.add_(part)
    return alike(sums, expected)


def keeps_promise(node: Node, given: Sequence[Spread]) -> bool:
    """Whether a function that is marked pointwise is, along the dims that are cut, as far as can be tried."""
    (shape,), shapes = node.output_shapes, node.shapes
    try:
        if tuple(torch.broadcast_shapes(*shapes)) != shape:
            return False
    except RuntimeError:
        return False
    cut = frozenset(len(shape) - len(lie.shape) + dim for lie in given for dim in lie.cut_dims)
    known = _known.setdefault(node, {})
    if cut not in known:
        # Whoever draws random numbers is found out, and leaves the script's as they are.
        with without_modes(), _ALONE, torch.random.fork_rng(devices=()):
            known[cut] = all(_pointwise_along(node, dim, cut) for dim in cut)
    return known[cut]


def _pointwise_along(node: Node, dim: int, cut: Collection[int]) -> bool:
    (shape,) = node.output_shapes
    dims = [
        own if own >= 0 and given[own] == shape[dim] else None
        for given in node.shapes
        for own in [dim - len(shape) + len(given)]
    ]
    for dtype, tolerances in _TOLERANCES.items():
        generator = torch.Generator().manual_seed(0)
        given = [
            numbers(_smaller(own, len(shape) - len(own), cut), dtype, generator)
            for own in node.shapes
        ]
        try:
            whole = Call(node, given)
        except Exception:  # noqa: BLE001, S112 - whatever it objects to: kernels for GPUs alone, say
            continue
        try:
            return each_by_itself(whole, dims, dim, **tolerances)
        except Exception:  # noqa: BLE001 - it cannot compute parts
            return False
    return True


def _smaller(shape: Sequence[int], shift: int, cut: Collection[int]) -> tuple[int, ...]:
    """A few places of the dims that are cut; of all, where that is much still."""
    made = tuple(min(n, _PLACES) if dim + shift in cut else n for dim, n in enumerate(shape))
    return made if math.prod(made) <= MOST_TRIED else tuple(min(n, _PLACES) for n in shape)
