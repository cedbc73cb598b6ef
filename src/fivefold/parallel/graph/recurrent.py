"""Recurrent layers that begin with zeros, as torch's modules do: zeros for as many samples as there are.

    h = zeros(layers, len(x), hidden); lstm(x, (h, h), weights, ...)        x' = Recurrence(x, *weights)

The zeros have the samples of the whole batch on their second dim, by which nobody could tell that a part of
the batch needs zeros for its samples only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fivefold.parallel.graph.refs import Slot, Value
from fivefold.parallel.graph.tape import Node

__all__ = ["Recurrence", "from_zeros"]

_NAMES = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A recurrent layer of torch's that begins with zeros."""

    function: Callable[..., Any]
    states: tuple[tuple[int, int], ...]
    """layers times directions, and features, of each state"""
    options: tuple[Any, ...]
    """has_biases, num_layers, dropout, train, bidirectional, batch_first"""

    @property
    def samples(self) -> int:
        """The dim of the input that samples are on."""
        return 0 if self.options[-1] else 1

    def __call__(self, x: Tensor, *weights: Tensor) -> Any:
        """What the function returns: outputs, and the last states."""
        count = x.shape[self.samples]
        made = [x.new_zeros((layers, count, size)) for layers, size in self.states]
        return self.function(x, made if len(made) > 1 else made[0], weights, *self.options)


def from_zeros(nodes: Sequence[Node]) -> list[Node]:
    """The same nodes, with `Recurrence` for recurrent layers without dropout that begin with zeros."""
    zeros = {node.outputs[0] for node in nodes if node.name == "zeros"}
    return [_replaced(node, zeros) if node.name in _NAMES else node for node in nodes]


def _replaced(node: Node, zeros: set[int]) -> Node:
    arguments: list[Any] = [*node.args]
    if len(arguments) != 9 or node.kwargs:
        return node
    x, states, weights, *options = arguments
    states = states if isinstance(states, (tuple, list)) else (states,)
    slots = [x, *states, *weights]
    drops = options[2] > 0.0 and options[3]
    if drops or not all(isinstance(slot, Slot) for slot in slots):
        return node
    if len(node.shapes[x.index]) != 3:  # a single sequence
        return node
    starts = [node.operands[slot.index] for slot in states]
    if not all(isinstance(ref, Value) and ref.index in zeros for ref in starts):
        return node
    kept = [x.index, *(slot.index for slot in weights)]
    shapes = [node.shapes[slot.index] for slot in states]
    return dataclasses.replace(
        node,
        function=Recurrence(
            node.function, tuple((shape[0], shape[2]) for shape in shapes), tuple(options)
        ),
        name="recurrence",
        args=tuple(map(Slot, range(len(kept)))),
        operands=tuple(node.operands[index] for index in kept),
        shapes=tuple(node.shapes[index] for index in kept),
    )
