"""Operations without a rule that treat every sample by itself: found out by trying.

An operation of torch's is called once on some samples of random numbers, and once on each of them alone.
Where that gives the same results and gradients, replicas may compute their own samples; anything else is
gathered. Functions of the user's are not tried: they may do more than compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.parallel.graph.names import is_own, is_users, plain
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Local, Operation, call, everything, want_of
from fivefold.parallel.program.spread import Spread
from fivefold.torch_private import pytree, without_modes

__all__ = ["RowWise"]

_ROWS = 3
_MOST = 1 << 22
"""elements of an operand that is tried"""


class RowWise:
    """For nodes that no rule knows, whose operands are divided along their first dim only."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """By samples, as the operands are."""
        cuts = {spread.cuts[0] for spread in op.given if not spread.is_whole}
        if len(cuts) != 1 or any(spread.cut_dims not in {(), (0,)} for spread in op.given):
            return None
        (cut,) = cuts
        rows = next(s.shape[0] for s in op.given if not s.is_whole)
        divided = tuple(not spread.is_whole for spread in op.given)
        fits = all(shape[:1] == (rows,) for shape in op.node.output_shapes)
        if not fits or not op.node.outputs or not _by_rows(op.node, divided):
            return None
        return [Spread.whole(shape).with_cut(0, cut) for shape in op.node.output_shapes]

    def lower(self, op: Operation) -> Local:
        """The same call on the samples that are here."""
        made = op.made[0]
        wants = tuple(
            everything(s.shape) if s.is_whole
            else (want_of(s.shape[0], made.cuts[0]), *map(Want.all_of, s.shape[1:]))
            for s in op.given
        )  # fmt: skip
        return Local(wants, call(op.node))


def _by_rows(node: Node, divided: tuple[bool, ...]) -> bool:
    """Whether a function of torch's gives for some samples what it gives for each of them."""
    function = node.function
    module = str(getattr(function, "__module__", "") or type(function).__module__)
    torchs = module.startswith("torch") or type(function).__module__ == "builtins"
    small = all(
        torch.Size(shape).numel() <= _MOST * max(shape[0] if shape else 1, 1)
        for shape in node.shapes
    )
    if is_own(function) or isinstance(function, torch.nn.Module) or not torchs or not small:
        return False
    if is_users(function) and node.grad:  # its backward may join samples, if they are many, say
        return False
    try:
        return _tried(node, divided)
    except Exception:  # noqa: BLE001 - whatever it objects to: it is gathered then
        return False


def _tried(node: Node, divided: Sequence[bool]) -> bool:
    generator = torch.Generator().manual_seed(0)
    with without_modes():
        for dtype in (torch.float64, torch.int64):  # indices, where it takes no other numbers
            try:
                given = [
                    _numbers(
                        (_ROWS, *shape[1:]) if cut else shape,
                        dtype if cut else torch.float64,
                        generator,
                    )
                    for shape, cut in zip(node.shapes, divided, strict=True)
                ]
                whole = _Call(node, given)
            except (RuntimeError, TypeError, IndexError):
                continue
            return _each_by_itself(whole, node, given, divided)
    return False


def _numbers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.int64:
        return torch.randint(0, 2, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), dtype=dtype, generator=generator)


class _Call:
    """One call of a node's function: its results, and the gradients of what it was given."""

    def __init__(self, node: Node, given: Sequence[Tensor]) -> None:
        self._given = [g.clone().requires_grad_(g.is_floating_point()) for g in given]
        with torch.set_grad_enabled(node.grad):
            # Copies, so that it may change them in place.
            args, kwargs = node.arguments([g.clone() for g in self._given])
            made = pytree.tree_leaves(plain(node.function)(*args, **kwargs))
        self.results = [leaf for leaf in made if isinstance(leaf, Tensor)]

    def gradients(self, of_results: Sequence[Tensor]) -> list[Tensor]:
        """By operand; zeros where there is none."""
        trained = [g for g in self._given if g.requires_grad]
        ends = [(r, g) for r, g in zip(self.results, of_results, strict=True) if r.requires_grad]
        if not (trained and ends):
            return [torch.zeros_like(g) for g in self._given]
        results, gradients = zip(*ends, strict=True)
        found = iter(torch.autograd.grad(results, trained, gradients, allow_unused=True))
        every = [next(found) if g.requires_grad else None for g in self._given]
        pairs = zip(every, self._given, strict=True)
        return [torch.zeros_like(g) if one is None else one.to_dense() for one, g in pairs]


def _each_by_itself(
    whole: _Call, node: Node, given: Sequence[Tensor], divided: Sequence[bool]
) -> bool:
    """Whether every sample alone has the results and gradients that it has among others."""
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(r.shape, dtype=torch.float64, generator=generator) for r in whole.results]
    weights = [draw.to(r.dtype) for draw, r in zip(draws, whole.results, strict=True)]
    expected = whole.gradients(weights)
    sums = [torch.zeros_like(g) for g in expected]
    for row in range(_ROWS):
        own = slice(row, row + 1)
        pairs = list(zip(given, divided, strict=True))
        alone = _Call(node, [g[own] if cut else g for g, cut in pairs])
        if not _alike(alone.results, [many[own] for many in whole.results], whole.results):
            return False
        for total, part, (_, cut) in zip(
            sums, alone.gradients([w[own] for w in weights]), pairs, strict=True
        ):
            (total[own] if cut else total).add_(part)
    return _alike(sums, expected)


def _alike(some: Sequence[Tensor], others: Sequence[Tensor], whole: Sequence[Tensor] = ()) -> bool:
    return (
        len(some) == len(others)
        and all(len(many) == _ROWS for many in whole)
        and all(
            one.shape == other.shape
            and torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)
            for one, other in zip(some, others, strict=True)
        )
    )
