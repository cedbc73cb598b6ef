"""Operations along some dims: where these are whole, the parts need nothing of each other.

sort over channels, image cut into rows:   each row of pixels by itself, as any pointwise operation
sort over rows, image cut into rows:       gathered
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import (
    Local,
    Operation,
    Wants,
    as_held,
    call,
    rule,
    want_of,
)
from fivefold.parallel.program.spread import Spread

__all__ = ["Along", "arguments", "dims_of", "reduced", "reduced_wants", "widened"]

_ALIASES = {"axis": "dim", "keepdims": "keepdim"}


def arguments(node: Node, names: Sequence[str]) -> Mapping[str, Any]:
    """The arguments of a call by name, numpy's names for dims translated."""
    return {_ALIASES.get(name, name): value for name, value in node.bound(names).items()}


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """A `dim=` option as non-negative dims of a tensor of `rank` dims; None and () mean all."""
    if value is None or value == ():
        return tuple(range(rank))
    dims = tuple(value) if isinstance(value, Sequence) else (value,)
    return tuple(sorted(int(dim) % max(rank, 1) for dim in dims)) or tuple(range(rank))


def widened(x: Tensor) -> Tensor:
    """`x` in the dtype in which autocast has sums, norms and softmax computed: float32 on a GPU."""
    half = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half and torch.is_autocast_enabled("cuda") else x


def _where(dims: tuple[int, ...], rank: int, keepdim: bool) -> list[int | None]:
    """Where every dim of an operand is in the result of a reduction; None for those reduced."""
    kept = [dim for dim in range(rank) if dim not in dims]
    return [None if dim in dims else (dim if keepdim else kept.index(dim)) for dim in range(rank)]


def reduced(given: Spread, dims: tuple[int, ...], keepdim: bool, shape: tuple[int, ...]) -> Spread:
    """How the result of a reduction over `dims` lies: whole along them, otherwise as its operand."""
    made = Spread.whole(shape)
    for dim, there in enumerate(_where(dims, len(given.shape), keepdim)):
        if there is not None:
            made = made.with_cut(there, given.cuts[dim])
    return made.tight()


def reduced_wants(given: Spread, dims: tuple[int, ...], keepdim: bool, made: Spread) -> Wants:
    """What a reduction wants of its operand: along `dims` what ranks own, so that nothing counts twice."""
    wants: list[Want] = []
    for dim, there in enumerate(_where(dims, len(given.shape), keepdim)):
        n, cut = given.shape[dim], given.cuts[dim]
        if there is not None:
            wants.append(want_of(n, made.cuts[there]))
        else:
            wants.append(Want.all_of(n) if cut is None else Want.ranges(cut.axes, cut.owned))
    return tuple(wants)


_LAST: Mapping[str, Any] = {"dim": -1}
_CHANNELS: Mapping[str, Any] = {"dim": 1}
# name -> names of its arguments, and the dim by default
_ALONG: dict[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    **dict.fromkeys(
        ("cummax", "cummin", "cumprod", "cumsum", "glu", "logcumsumexp"), (("input", "dim"), _LAST)
    ),
    "argsort": (("input", "dim"), _LAST),
    "sort": (("input", "dim"), _LAST),
    "topk": (("input", "k", "dim"), _LAST),
    "channel_shuffle": (("input",), _CHANNELS),
    "local_response_norm": (("input",), _CHANNELS),
}


@rule(*_ALONG)
class Along:
    """Every line along some dims by itself: gathered if these are cut."""

    def _dims(self, node: Node) -> tuple[int, ...]:
        names, default = _ALONG[node.name]
        rank = len(node.shapes[0])
        return dims_of({**default, **arguments(node, names)}["dim"], rank)

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operand."""
        given = op.given[0]
        if len(op.given) != 1 or any(given.cuts[dim] for dim in self._dims(op.node)):
            return None
        return [Spread(shape, given.cuts).tight() for shape in op.node.output_shapes]

    def lower(self, op: Operation) -> Local:
        """The same call on the parts, all of the lines."""
        made, shape = op.made[0], op.node.shapes[0]
        return Local((as_held(Spread(shape, made.cuts)),), call(op.node))
