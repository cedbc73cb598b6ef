"""What nn.MultiheadAttention calls: its tensors have tokens on dim 0 and samples on dim 1.

query   tokens, samples, channels   ┐
key     tokens, samples, channels   │ divided by samples: every sample by itself     anything else: gathered
value   tokens, samples, channels   ┘
padding        samples, tokens
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.parallel.graph.refs import Slot
from fivefold.parallel.program.rule import Local, Operation, call, want_of
from fivefold.parallel.program.spread import Spread

__all__ = ["Heads"]

_SAMPLES = {"query": 1, "key": 1, "value": 1, "key_padding_mask": 0}
"""where samples are"""


class Heads:
    """torch's `multi_head_attention_forward` without dropout."""

    def _samples(self, op: Operation) -> dict[int, int]:
        """The number of each operand that has samples, and the dim that they are on."""
        given = op.node.bound(("query", "key", "value"))
        slots = {name: given.get(name) for name in _SAMPLES}
        return {slot.index: _SAMPLES[n] for n, slot in slots.items() if isinstance(slot, Slot)}

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """By samples, as the queries are."""
        samples, tokens = self._samples(op), op.given[0]
        cut = tokens.cuts[1] if len(tokens.shape) == 3 else None
        if cut is None:
            return None
        for number, spread in enumerate(op.given):
            dim = samples.get(number)
            if spread.cut_dims != (() if dim is None else (dim,)):
                return None
            if dim is not None and not cut.same_as(spread.cuts[dim]):
                return None
            if dim is None and len(spread.shape) == 3:  # a mask of every sample and head
                return None
        shapes = op.node.output_shapes
        return [Spread.whole(s).with_cut(1 - n, cut) for n, s in enumerate(shapes)]

    def lower(self, op: Operation) -> Local:
        """The same call on the samples that are here."""
        samples, cut = self._samples(op), op.made[0].cuts[1]
        wants = tuple(
            tuple(
                want_of(n, cut if dim == samples.get(number) else None)
                for dim, n in enumerate(spread.shape)
            )
            for number, spread in enumerate(op.given)
        )
        return Local(wants, call(op.node))
