"""What relates every pixel to its line: softmax and normalisation to length one.

Where the line is cut, ranks combine one number of it, from what they own; all that they hold follows it.

    softmax   exp(x - log(sum(exp(x))))        normalize   x / max(sqrt(sum(x^2)), eps)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.rule import Local, Moment, Operation, as_held, call, rule
from fivefold.parallel.program.spread import Spread
from fivefold.parallel.tiles.along import arguments, dims_of, widened
from fivefold.parallel.tiles.norms import owned_slices
from fivefold.parallel.tiles.reduce import LogSumExp, Norm, Over

__all__ = ["Normalize", "Softmax"]

_Relate = Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]
"""from what is held and what is owned to the result"""


def _lowered(op: Operation, dims: tuple[int, ...], relate: _Relate) -> Local:
    """The plain call where lines are whole, else `relate`."""
    made, owned = op.made[0], owned_slices(op)
    wants = (as_held(made),)
    axes = tuple(
        sorted({axis for dim in dims if (cut := made.cuts[dim]) is not None for axis in cut.axes})
    )
    if not axes:
        return Local(wants, call(op.node))
    keep = tuple(
        slice(None) if owned is None or dim not in dims else owned[dim]
        for dim in range(len(made.shape))
    )

    def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
        x = widened(operands[0])
        return relate(x, x[keep], moment.groups(axes, False))

    return Local(wants, run, collective="sums")


@rule("softmax", "log_softmax", "softmin", "special_softmax", "special_log_softmax")
class Softmax:
    """Softmax and its logarithm along one dim."""

    def _dim(self, node: Node) -> tuple[int, ...]:
        rank, dim = len(node.shapes[0]), arguments(node, ("input", "dim")).get("dim")
        if dim is None:  # what torch then takes
            dim = 0 if rank in {0, 1, 3} else 1
        return dims_of(dim, rank)

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operand."""
        return [op.given[0].tight()]

    def lower(self, op: Operation) -> Local:
        """Relative to the logarithm of the sum over all tiles; half precision in float32, as torch does."""
        name, dims, dtype = op.node.name, self._dim(op.node), op.node.kwargs.get("dtype")
        over = Over(dims, True, 1, {})

        def relate(x: Tensor, own: Tensor, group: dist.ProcessGroup) -> Tensor:
            given = x.dtype if dtype is None else dtype
            wide = torch.promote_types(given, torch.float32)
            x, own = ((-t if name == "softmin" else t).to(wide) for t in (x, own))
            found = x - LogSumExp().combine(own, over, group)
            return (found if "log" in name else found.exp()).to(given)

        return _lowered(op, dims, relate)


@rule("normalize")
class Normalize:
    """Lines of length one."""

    def _options(self, node: Node) -> Mapping[str, Any]:
        names = ("input", "p", "dim", "eps")
        return {"p": 2.0, "dim": 1, "eps": 1e-12, **arguments(node, names)}

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operand; other lengths than the Euclidean over whole dims only."""
        options, given = self._options(op.node), op.given[0]
        dims = dims_of(options["dim"], len(given.shape))
        cut = any(given.cuts[dim] is not None for dim in dims)
        return None if cut and options["p"] != 2 else [given.tight()]

    def lower(self, op: Operation) -> Local:
        """Divided by the length over all tiles."""
        options = self._options(op.node)
        dims = dims_of(options["dim"], len(op.node.shapes[0]))
        over = Over(dims, True, 1, {})

        def relate(x: Tensor, own: Tensor, group: dist.ProcessGroup) -> Tensor:
            return x / Norm().combine(own, over, group).clamp_min(options["eps"])

        return _lowered(op, dims, relate)
