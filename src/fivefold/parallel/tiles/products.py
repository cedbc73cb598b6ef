"""Matrix products, attention, embeddings: what they contract has to be whole; everything else may be cut.

linear      (samples, rows, columns, in)  x  weight          rows and columns may be cut
attention   (samples, heads, pixels, E)                      samples, heads and queries may be; keys and
                                                             values of all pixels are gathered
einsum      "nchw,cd->ndhw"                                  n, h, w and d may be
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.parallel.graph.refs import Slot
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import (
    Local,
    Operation,
    as_held,
    call,
    rule,
    want_of,
)
from fivefold.parallel.program.spread import Division, Spread
from fivefold.parallel.tiles.along import arguments, dims_of, reduced
from fivefold.parallel.tiles.pointwise import broadcast, broadcast_wants

__all__ = ["Einsum", "Embedding", "Gathered", "Linear", "PerChannel", "Products", "Similarity"]


@rule("linear")
class Linear:
    """The last dim against weights that all ranks have."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operand, unless its last dim is cut."""
        given = op.given[0]
        if given.cuts[-1] is not None or any(not spread.is_whole for spread in op.given[1:]):
            return None
        shape = op.node.output_shapes[0]
        if len(shape) != len(given.shape):  # a weight with one dim: a product of vectors
            return [reduced(given, (len(given.shape) - 1,), False, shape)]
        return [Spread(shape, given.cuts).tight()]

    def lower(self, op: Operation) -> Local:
        """The same call on the parts."""
        shape = op.node.shapes[0]
        cuts = (*op.made[0].cuts, None)
        lies = Spread(shape, cuts[: len(shape)])
        return Local((as_held(lies), *op.whole(1)), call(op.node))


@rule("matmul", "mm", "bmm", "baddbmm")
class Products:
    """Products of the matrices in the last two dims; those in front are batches."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Batches as the operands have them; the matrices whole. Or as `linear`, which may be written so.

        Rows of the first may be cut: pixels as they look for others. All of the others is gathered then.
        """
        if op.node.name in {"matmul", "mm"} and len(op.given[1].shape) == 2:
            return Linear().place(op)
        shape = op.node.output_shapes[0]
        if self._by_rows(op):
            each = [Spread(spread.shape[:-2], spread.cuts[:-2]) for spread in op.given]
            cuts = (*broadcast(each, shape[:-2]).cuts, op.given[0].cuts[-2], None)
            made = Spread(shape, cuts).tight()
        elif any(len(s.shape) < 2 or s.cuts[-1] or s.cuts[-2] for s in op.given):
            return None
        else:
            made = broadcast(op.given, shape)
        axes = [axis for cut in made.cuts if cut is not None for axis in cut.axes]
        return [made] if len(axes) == len(set(axes)) else None

    def lower(self, op: Operation) -> Local:
        """The same call on the parts of the batches, and of the rows; a mask of attention has those too."""
        if op.node.name in {"matmul", "mm"} and len(op.given[1].shape) == 2:
            return Linear().lower(op)
        made, wants = op.made[0], list[tuple[Want, ...]]()
        batches = Spread(made.shape[:-2], made.cuts[:-2])
        for number, (*batch, rows, columns) in enumerate(op.node.shapes):
            cut = None if number in {1, 2} or rows == 1 else made.cuts[-2]
            each = broadcast_wants(tuple(batch), batches)
            wants.append((*each, want_of(rows, cut), Want.all_of(columns)))
        return Local(tuple(wants), call(op.node))

    def _by_rows(self, op: Operation) -> bool:
        first, attends = op.given[0], op.node.name == "scaled_dot_product_attention"
        if not attends and op.node.name not in {"matmul", "bmm"}:
            return False
        matrices = min(len(spread.shape) for spread in op.given) > 1
        cut = first.cuts[-2] if matrices and first.cuts[-1] is None else None
        return cut is not None and not (attends and (cut.empty or not _by_query(op.node)))


def _by_query(node: Node) -> bool:
    """Whether a query may be looked at alone: by default it does not depend on how many are before it."""
    given = node.bound(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"))
    slots = [given.get(name) for name in ("query", "key", "value")]
    in_order = [one.index for one in slots if isinstance(one, Slot)] == [0, 1, 2]
    return in_order and given.get("is_causal", False) is False


@rule("einsum")
class Einsum:
    """Sums of products, by letters."""

    def _letters(self, node: Node) -> tuple[list[str], str] | None:
        """Those of the operands and of the result; None if the equation says too little."""
        equation = node.args[0] if node.args else None
        if not isinstance(equation, str) or "." in equation or "->" not in equation:
            return None
        operands, result = equation.replace(" ", "").split("->")
        found = operands.split(",")
        ranks = [len(letters) for letters in found] == [len(shape) for shape in node.shapes]
        diagonal = any(len(set(letters)) < len(letters) for letters in found)
        return (found, result) if ranks and not diagonal else None

    def _cuts(self, op: Operation) -> dict[str, Division] | None:
        """How each letter is cut; None if operands differ in that, or a letter is summed over."""
        letters, cuts = self._letters(op.node), dict[str, Division]()
        if letters is None:
            return None
        for names, spread in zip(letters[0], op.given, strict=True):
            for name, cut in zip(names, spread.cuts, strict=True):
                if cut is not None and name not in letters[1]:
                    return None
                if cut is not None:
                    cuts.setdefault(name, cut)
        axes = [axis for cut in cuts.values() for axis in cut.axes]
        return cuts if len(axes) == len(set(axes)) else None

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Every letter as in the first operand that has it cut."""
        letters, cuts = self._letters(op.node), self._cuts(op)
        if letters is None or cuts is None:
            return None
        made = Spread(op.node.output_shapes[0], tuple(map(cuts.get, letters[1])))
        return [made.tight()]

    def lower(self, op: Operation) -> Local:
        """The same call on the parts."""
        letters = self._letters(op.node)
        assert letters is not None
        held = dict(zip(letters[1], op.made[0].cuts, strict=True))
        wants = tuple(
            tuple(
                Want.all_of(n) if n == 1 else want_of(n, held.get(name))
                for name, n in zip(names, shape, strict=True)
            )
            for names, shape in zip(letters[0], op.node.shapes, strict=True)
        )
        return Local(wants, call(op.node))


_EMBEDDING = (
    "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse",
)  # fmt: skip


@rule("embedding", "one_hot")
class Embedding:
    """A vector for every index, behind the dims that the indices have."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the indices, unless all of them count: how often each is looked up, what is normalised."""
        a = op.node.bound(_EMBEDDING) if op.node.name == "embedding" else {}
        joined = a.get("max_norm") is not None or a.get("scale_grad_by_freq", False)
        if joined or any(not spread.is_whole for spread in op.given[1:]):
            return None
        return [Spread(op.node.output_shapes[0], (*op.given[0].cuts, None)).tight()]

    def lower(self, op: Operation) -> Local:
        """The same call on the parts."""
        lies = Spread(op.node.shapes[0], op.made[0].cuts[:-1])
        return Local((as_held(lies), *op.whole(1)), call(op.node))


@rule("prelu")
class PerChannel:
    """A weight for every channel, or one for all."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the input."""
        return [op.given[0].tight()] if op.given[1].is_whole else None

    def lower(self, op: Operation) -> Local:
        """The weights of the channels that are here."""
        made, (n, *_) = op.made[0], op.node.shapes[1] or (1,)
        weight = want_of(n, made.cuts[1]) if n > 1 and len(made.shape) > 1 else Want.all_of(n)
        wants = (weight,) if op.node.shapes[1] else ()
        return Local((as_held(made), wants), call(op.node))


@rule("cosine_similarity")
class Similarity:
    """The angle between vectors along a dim."""

    def _dim(self, node: Node) -> tuple[int, ...]:
        dim: Any = arguments(node, ("x1", "x2", "dim")).get("dim", 1)
        return dims_of(dim, max(map(len, node.shapes)))

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operands, without the dim, which must be whole."""
        (dim,), (before, after) = self._dim(op.node), _split(op)
        if any(spread.cuts[dim] is not None for spread in before):
            return None
        made = broadcast(before, after)
        axes = [axis for cut in made.cuts if cut is not None for axis in cut.axes]
        if len(axes) != len(set(axes)):
            return None
        return [reduced(made, (dim,), False, op.node.output_shapes[0])]

    def lower(self, op: Operation) -> Local:
        """The same call on the parts."""
        (dim,), (_, shape) = self._dim(op.node), _split(op)
        cuts = op.made[0].cuts
        lies = Spread(shape, (*cuts[:dim], None, *cuts[dim:]))
        return Local(tuple(broadcast_wants(s, lies) for s in op.node.shapes), call(op.node))


def _split(op: Operation) -> tuple[list[Spread], tuple[int, ...]]:
    """The operands, made equally long in dims, and the shape that they broadcast to."""
    rank = max(map(len, op.node.shapes))
    longer = [
        Spread((1,) * (rank - len(s.shape)) + s.shape, (None,) * (rank - len(s.shape)) + s.cuts)
        for s in op.given
    ]
    return longer, tuple(max(sizes) for sizes in zip(*(s.shape for s in longer), strict=True))


@rule(
    "addbmm", "addmm", "addmv", "addr", "bilinear", "cdist", "chain_matmul", "dot", "inner", "kron",
    "linalg_matmul", "linalg_multi_dot", "mv", "outer",
    "pairwise_distance", "tensordot", "vdot",
)  # fmt: skip
class Gathered:
    """Not followed into tiles: gathered."""

    def place(self, op: Operation) -> Sequence[Spread] | None:  # noqa: ARG002 - always the same
        """Whole."""
        return None

    def lower(self, op: Operation) -> Local:
        """Never asked for."""
        raise AssertionError(op.node.where)
