"""Recurrent layers: every sample by itself; along the sequence they are gathered."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.parallel.graph.recurrent import Recurrence
from fivefold.parallel.program.rule import Local, Operation, call, rule, want_of
from fivefold.parallel.program.spread import Spread

__all__ = ["Recurrences"]


@rule("recurrence")
class Recurrences:
    """By samples."""

    def _samples(self, op: Operation) -> int:
        assert isinstance(op.node.function, Recurrence)
        return op.node.function.samples

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Outputs as the input; the last states have samples on their second dim."""
        samples, given = self._samples(op), op.given[0]
        cut = given.cuts[samples]
        if given.cut_dims != (samples,) or not all(spread.is_whole for spread in op.given[1:]):
            return None
        return [
            Spread.whole(shape).with_cut(1 if number else samples, cut)
            for number, shape in enumerate(op.node.output_shapes)
        ]

    def lower(self, op: Operation) -> Local:
        """The same call on the samples that are here."""
        samples = self._samples(op)
        cut = op.made[0].cuts[samples]
        wants = tuple(
            want_of(n, cut if dim == samples else None) for dim, n in enumerate(op.given[0].shape)
        )
        return Local((wants, *op.whole(1)), call(op.node))
