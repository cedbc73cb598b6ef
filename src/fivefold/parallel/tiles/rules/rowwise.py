"""Operations without a rule that treat every sample by itself: found out by trying.

An operation of torch's is called once on some samples of random numbers, and once on each of them alone.
Where that gives the same, replicas may compute their own samples; anything else is gathered. Functions of
the user's are not tried: they may do more than compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves

from fivefold.parallel.graph.names import is_own, plain
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.tiles.exchange import Want
from fivefold.parallel.tiles.rule import Local, Operation, call, everything, want_of
from fivefold.parallel.tiles.spread import Spread

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
    try:
        return _tried(node, divided)
    except Exception:  # noqa: BLE001 - whatever it objects to: it is gathered then
        return False


def _tried(node: Node, divided: Sequence[bool]) -> bool:
    generator = torch.Generator().manual_seed(0)
    with _disable_current_modes(), torch.no_grad():
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
                whole = _results(node, given)
            except (RuntimeError, TypeError, IndexError):
                continue
            return all(
                _alike(
                    whole,
                    node,
                    [g[row : row + 1] if cut else g for g, cut in zip(given, divided, strict=True)],
                    row,
                )
                for row in range(_ROWS)
            )
    return False


def _numbers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.int64:
        return torch.randint(0, 2, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), dtype=dtype, generator=generator)


def _results(node: Node, given: Sequence[Tensor]) -> list[Tensor]:
    args, kwargs = node.arguments(given)
    return [
        leaf
        for leaf in tree_leaves(plain(node.function)(*args, **kwargs))
        if isinstance(leaf, Tensor)
    ]


def _alike(whole: Sequence[Tensor], node: Node, given: Sequence[Tensor], row: int) -> bool:
    alone = _results(node, given)
    return len(alone) == len(whole) and all(
        len(many) == _ROWS and one.shape == many[row : row + 1].shape
        and torch.allclose(one, many[row : row + 1], rtol=1e-9, atol=1e-12, equal_nan=True)
        for one, many in zip(alone, whole, strict=True)
    )  # fmt: skip
